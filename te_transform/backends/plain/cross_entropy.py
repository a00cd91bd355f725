"""The cross entropy of logits, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from te_transform.backends.op import FusedOp
from te_transform.backends.tracing import check_index
from te_transform.graph import ops


def reduced(losses: Tensor, counted: Tensor, reduction: str, dtype: torch.dtype) -> Tensor:
    """Reduce the losses of targets as ops.cross_entropy does.

    Args:
        losses: one per target, in fp32 or wider; 0 where `counted` is False.
        counted: True for each target that is not ignored.
        reduction: "mean", "sum" or "none".
        dtype: of the result.
    """
    if reduction == "none":
        return losses.to(dtype)
    return (losses.sum() / counted.sum() if reduction == "mean" else losses.sum()).to(dtype)


def check_targets(targets: Tensor, counted: Tensor, words: int) -> None:
    """Raise unless each counted target is a column of `words` logits; kernels would read other memory.

    Raises:
        IndexError: a target is out of range, on the CPU.
    """
    known = ~counted | ((targets >= 0) & (targets < words))
    check_index(
        known.all(),
        f"expected targets >= 0 and < {words}, or ignore_index, got another number; correct the targets",
    )


class CrossEntropy(FusedOp):
    """The op -log softmax(logits)[target]."""

    def forward(
        self, logits: Tensor, targets: Tensor, ignore_index: int, reduction: str, dtype: torch.dtype
    ) -> Tensor:
        """Compute the loss in `dtype`, from logits [..., vocabulary] and targets [...].

        The loss is a scalar, or with reduction "none" one number per target.
        """
        return ops.cross_entropy(logits, targets, ignore_index, reduction, dtype)
