"""The loss of a language model in one kernel."""

from collections.abc import Iterator

from torch import nn

from te_transform.graph import ops
from te_transform.graph.pattern import Call
from te_transform.passes import chunked_loss
from te_transform.plan.rule import Operation, Rule


def refuse(loss: Operation) -> Iterator[str]:
    """No reason of its own: the op has one form."""
    yield from ()


def build(backend, loss: Operation) -> nn.Module:
    """The fused op."""
    return backend.CrossEntropy()


RULE = Rule(
    name="cross_entropy",
    pattern=Call(ops.cross_entropy, role="loss"),
    refuse=refuse,
    build=build,
    reads=("loss.logits", "loss.targets", "loss.ignore_index", "loss.reduction", "loss.dtype"),
    needs_kernels=True,
    example=chunked_loss.RULE.example,
)
"""Saves the copies of the logits in fp32: the kernel reads them as they are, and leaves the gradient in their
place."""
