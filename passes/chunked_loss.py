"""Compute a language model's head and loss together, for one part of the vocabulary at a time."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_transform.backends.chunked_loss import ChunkedLoss
from te_transform.graph import ops
from te_transform.graph.pattern import Call, Linear, Maybe
from te_transform.plan.rule import Operation, Rule


def refuse(loss: Operation, head: Operation, chunked_loss: bool) -> Iterator[str | None]:
    """Yield None if the fusion is off, or if the loss has no gradient: the logits are then the result."""
    if not chunked_loss or not head.value.requires_grad or loss.logits.shape[-1] != head.width:
        yield None


def build(backend) -> nn.Module:
    """Return the fused op, the same for every backend: it uses PyTorch's matrix products."""
    return ChunkedLoss()


class Example(nn.Module):
    """A language model head and its loss."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 64)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), targets)


RULE = Rule(
    name="chunked_loss",
    pattern=Call(ops.cross_entropy, Maybe(torch.reshape, Linear(role="head")), role="loss"),
    refuse=refuse,
    build=build,
    reads=(
        "head.x",
        "head.weight",
        "head.bias",
        "loss.targets",
        "loss.ignore_index",
        "loss.reduction",
        "loss.dtype",
    ),
    hands_out=("head",),
    example=lambda: (Example(), (torch.zeros(4, 16), torch.zeros(4, dtype=torch.long))),
    requires="a cross entropy of a linear's output, with gradients and with nothing but reshapes and casts "
    "between them: slice the linear's input in place of the logits, or leave the option out",
)
"""Saves the memory of the logits and of their gradient, [tokens, vocabulary] each.

The backward computes the head's product a second time. The logits that the model returns are NaN.
"""
