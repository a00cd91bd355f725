"""Compute a language model's loss in one kernel."""

from collections.abc import Iterator

from torch import nn

from te_transform.graph import ops
from te_transform.graph.pattern import Call
from te_transform.passes import chunked_loss
from te_transform.plan.rule import Operation, Rule


def refuse(loss: Operation) -> Iterator[str]:
    """Yield no reason: the op covers every match."""
    yield from ()


def build(backend, loss: Operation) -> nn.Module:
    """Return the fused op."""
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
"""Saves the fp32 copies of the logits: the kernel reads the logits in their own dtype, and overwrites them
with the gradient."""
