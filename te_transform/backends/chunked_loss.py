"""A linear layer and its cross entropy in one op, which computes the logits in parts of the vocabulary.

Neither the full logits nor their gradient are ever in memory. The forward accumulates the sum of the
exponentials over the parts. The backward computes each part again: it writes the part's rows of the weight
gradient once, and accumulates the input gradient in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_transform.backends.double_backward import differentiable_twice
from te_transform.backends.fp8.fp8_only import is_fp8_only
from te_transform.backends.limits import as_autocast, whole_logits
from te_transform.backends.op import FusedOp
from te_transform.backends.plain import check_targets, reduced
from te_transform.backends.tracing import transformed
from te_transform.graph import ops
from te_transform.graph.bound import F

NUMBERS = 2**26  # logits in a part: 128 MiB in bf16, 256 MiB in fp32


class ChunkedLoss(FusedOp):
    """The cross entropy of the logits x W^T + b. It returns NaN for the logits, which are never stored."""

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        ignore_index: int,
        reduction: str,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss.

        Args:
            x: [..., in].
            weight: [vocabulary, in].
            bias: [vocabulary], or None.
            targets: [...].
            ignore_index: the value of targets that do not count.
            reduction: "mean", "sum" or "none".
            dtype: of the loss.

        Returns:
            The loss, a scalar or with reduction "none" the shape of the targets; and logits [...,
            vocabulary], which are one expanded NaN.
        """
        x, weight, bias = as_autocast(x, weight, bias)
        if transformed() or is_fp8_only(weight):
            logits = ops.linear(x, weight, bias)
            return ops.cross_entropy(logits, targets, ignore_index, reduction, dtype), logits
        losses = differentiable_twice(_Losses.apply, _plainly, (x, weight, bias, targets, ignore_index))
        if whole_logits:
            logits = ops.linear(x, weight, bias)
        else:
            logits = x.new_full((), torch.nan).expand(*x.shape[:-1], len(weight))
        return reduced(losses, targets != ignore_index, reduction, dtype), logits


def _plainly(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int) -> Tensor:
    logits = ops.linear(x, weight, bias)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return ops.cross_entropy(logits, targets, ignore_index, "none", wide)


class LossPart(NamedTuple):
    """A part of the vocabulary, from `start` up to `stop`: its rows of the weight and the bias."""

    start: int
    stop: int
    weight: Tensor
    bias: Tensor | None

    def logits(self, rows: Tensor) -> Tensor:
        """Compute the logits of this part."""
        return F.linear(rows, self.weight, self.bias)


def _loss_parts(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[LossPart]:
    words = len(weight)
    columns = max(1, NUMBERS // max(1, len(rows)))
    for start in range(0, words, columns):
        stop = min(start + columns, words)
        yield LossPart(start, stop, weight[start:stop], None if bias is None else bias[start:stop])


class _Losses(torch.autograd.Function):
    """The autograd function of the loss of each target, which is 0 for ignored targets."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int
    ) -> Tensor:
        rows, flat = x.reshape(-1, x.shape[-1]), targets.reshape(-1).long()
        counted = flat != ignore_index
        check_targets(flat, counted, len(weight))
        wide = torch.promote_types(x.dtype, torch.float32)
        # The maximum logit of each row, the log-sum-exp relative to the maximum, and the target's logit. The
        # first two stay separate, because their sum would round the second one away.
        top = rows.new_full((len(rows),), -torch.inf, dtype=wide)
        total, own = top.clone(), torch.zeros_like(top)
        for part in _loss_parts(rows, weight, bias):
            _gather(part.logits(rows), flat - part.start, top, total, own)
        ctx.save_for_backward(x, weight, bias, flat, top, total)
        ctx.ignore_index = ignore_index
        return torch.where(counted, top - own + total, 0.0).view(targets.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, flat, top, total = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        rows, wide = x.reshape(-1, x.shape[-1]), total.dtype
        each = torch.where(flat != ctx.ignore_index, grad.reshape(-1).to(wide), 0.0)
        dx = torch.zeros_like(rows, dtype=wide) if of_x else None
        dw = torch.empty_like(weight) if of_weight else None
        db = torch.empty_like(bias) if of_bias else None
        for part in _loss_parts(rows, weight, bias):
            logits = part.logits(rows)
            _to_gradient(logits, flat - part.start, top, total, each)
            if of_x:
                _add_product(dx, logits, part.weight)
            if of_weight:
                torch.mm(logits.t(), rows, out=dw[part.start : part.stop])
            if of_bias:
                db[part.start : part.stop] = logits.sum(0)
            del logits  # free it before the next part's logits are allocated
        return None if dx is None else dx.to(x.dtype).view_as(x), dw, db, None, None


def _gather(logits: Tensor, column: Tensor, top: Tensor, total: Tensor, own: Tensor) -> None:
    """Update the statistics of each row with a part of the logits.

    Args:
        logits: the part, [rows, columns].
        column: the column of each row's target, relative to the part; outside of it if another part has it.
        top: the maximum logit so far.
        total: the log-sum-exp so far, relative to `top`.
        own: the logit of the target, or 0 before its part.
    """
    if _in_kernel(logits, top):
        from te_transform.backends import chunked_loss_kernel

        return chunked_loss_kernel.gather_logits(logits, column, top, total, own)
    inside, index = _targets_in_part(logits, column)
    own += torch.where(inside, logits.gather(1, index).squeeze(1).to(own.dtype), 0.0)
    largest, less = _top_and_logsumexp(logits, top.dtype)
    before = top.clone()
    torch.maximum(before, largest, out=top)
    torch.logaddexp(
        total + _difference_to_top(before, top), less + _difference_to_top(largest, top), out=total
    )


def _to_gradient(logits: Tensor, column: Tensor, top: Tensor, total: Tensor, each: Tensor) -> None:
    """Overwrite a part of the logits with its gradient.

    The gradient is (softmax - one-hot target) * each, where `each` is the gradient of the row's loss. It is
    computed in the wider of the two dtypes. The other arguments are those of _gather().
    """
    if _in_kernel(logits, top):
        from te_transform.backends import chunked_loss_kernel

        return chunked_loss_kernel.to_gradient(logits, column, top, total, each)
    inside, index = _targets_in_part(logits, column)
    gradient = (logits - top.unsqueeze(1)).sub_(total.unsqueeze(1)).exp_()
    gradient.scatter_add_(1, index, -inside.to(gradient.dtype).unsqueeze(1))
    torch.mul(gradient, each.unsqueeze(1), out=logits)


def _in_kernel(logits: Tensor, top: Tensor) -> bool:
    return logits.is_cuda and top.dtype is torch.float32 and logits.numel() > 0


def _targets_in_part(logits: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    """Return which rows have their target in this part, [rows], and the target's column, [rows, 1]."""
    width = logits.shape[1]
    return (column >= 0) & (column < width), column.clamp(0, width - 1).unsqueeze(1)


def _top_and_logsumexp(logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return each row's maximum, and its log-sum-exp relative to the maximum."""
    top, index = logits.max(1, keepdim=True)
    less = torch.log_softmax(logits, 1, dtype=dtype).gather(1, index)
    return top.squeeze(1).to(dtype), torch.where(top.isneginf(), 0.0, -less).squeeze(1)


def _difference_to_top(largest: Tensor, top: Tensor) -> Tensor:
    """Return `largest` - `top`, given that `top` is not smaller, and -inf if both are -inf."""
    return largest - torch.where(top.isneginf(), 0.0, top)


def _add_product(total: Tensor, x: Tensor, y: Tensor) -> None:
    """Add the matrix product x y to `total`, in the dtype of `total`, which is the wider one."""
    if total.is_cuda and total.dtype is not x.dtype:
        torch.addmm(total, x, y, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(x.to(total.dtype), y.to(total.dtype))
