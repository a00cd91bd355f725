"""Cross entropy by TE's kernels."""

from __future__ import annotations

from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import Tensor

from te_transform.backends import plain
from te_transform.backends.limits import without_cross_entropy
from te_transform.backends.tracing import traced
from te_transform.graph import ops


class CrossEntropy(plain.CrossEntropy):
    """The op -log softmax(logits)[target] in one kernel, which reads bf16 logits and computes in fp32."""

    def forward(
        self, logits: Tensor, targets: Tensor, ignore_index: int, reduction: str, dtype: torch.dtype
    ) -> Tensor:
        """Compute the loss in `dtype`, from logits [..., vocabulary] and targets [...].

        The loss is a scalar, or with reduction "none" one number per target.
        """
        if traced():
            return super().forward(logits, targets, ignore_index, reduction, dtype)
        if why := without_cross_entropy(logits, targets):
            self.plain_calls[f"the loss, {why}"] += 1
            return super().forward(logits, targets, ignore_index, reduction, dtype)
        counted = targets != ignore_index
        plain.check_targets(targets, counted, logits.shape[-1])
        losses = _CrossEntropy.apply(logits, targets, ignore_index)
        return plain.reduced(losses, counted, reduction, dtype)


class _CrossEntropy(torch.autograd.Function):
    """The autograd function of TE's kernels, without their copy of the logits.

    TE saves a copy of the logits, which its backward overwrites, so the backward cannot run twice. This
    function saves the logits themselves, which are in memory anyway, and runs both kernels in the backward.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        ctx.save_for_backward(logits, targets)
        ctx.ignore_index = ignore_index
        return _te_losses(logits, targets, ignore_index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (logits, targets), recorded = ctx.saved_tensors, torch.is_grad_enabled()
        # if no target counts, the gradient of a mean is infinite, and the kernel would multiply zeros by it
        grad = grad.masked_fill(targets == ctx.ignore_index, 0)
        with torch.enable_grad():
            own = logits.view_as(logits) if recorded else logits.detach().requires_grad_()
            if recorded:  # TE's kernels have no second derivative
                losses = ops.cross_entropy(own, targets, ctx.ignore_index, "none", torch.float32)
            else:
                losses = _te_losses(own, targets, ctx.ignore_index)
        (gradient,) = torch.autograd.grad(losses, own, grad, create_graph=recorded)
        return gradient, None, None


def _te_losses(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Return the loss of each target in fp32, or 0 if the target is ignored."""
    rows = logits.reshape(1, -1, logits.shape[-1])
    losses = te.parallel_cross_entropy(rows, targets.reshape(1, -1), ignore_idx=ignore_index)
    return losses.view_as(targets)
