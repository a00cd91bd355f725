"""The loss of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from te_transform.backends.op import FusedOp
from te_transform.graph import ops


def reduced(losses: Tensor, counted: Tensor, reduction: str, dtype: torch.dtype) -> Tensor:
    """The losses of targets, 0 where they are not `counted`, as ops.cross_entropy gives them in `dtype`."""
    if reduction == "none":
        return losses.to(dtype)
    return (losses.sum() / counted.sum() if reduction == "mean" else losses.sum()).to(dtype)


class CrossEntropy(FusedOp):
    """-log softmax(logits)[target]."""

    def forward(
        self, logits: Tensor, targets: Tensor, ignore_index: int, reduction: str, dtype: torch.dtype
    ) -> Tensor:
        """logits [..., vocabulary], targets [...] -> one number in `dtype`, or one for each target where
        reduction is "none"."""
        return ops.cross_entropy(logits, targets, ignore_index, reduction, dtype)
