"""A linear and the cross entropy of what it makes, a part of the columns at a time.

The logits are never in memory as a whole, and neither is their gradient: the sum of their exponentials is
gathered over the parts, and the backward computes each part again. The weight's gradient is complete for the
rows of a part, that of the input is summed up in fp32.
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
from te_transform.backends.plain import reduced
from te_transform.backends.tracing import check_index, transformed
from te_transform.graph import ops
from te_transform.graph.bound import F

NUMBERS = 2**26  # logits in a part: 128 MiB in bf16, 256 in fp32


class ChunkedLoss(FusedOp):
    """cross_entropy(x W^T + b, targets), and the logits: NaN, for who reads them reads nothing."""

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
        """x [..., in], weight [words, in], targets [...] -> the loss in `dtype`, one number or one a target
        where reduction is "none"; and logits [..., words], which are one NaN, expanded."""
        x, weight, bias = as_autocast(x, weight, bias)
        if transformed() or is_fp8_only(weight):
            logits = ops.linear(x, weight, bias)
            return ops.cross_entropy(logits, targets, ignore_index, reduction, dtype), logits
        losses = differentiable_twice(_losses, _plainly, (x, weight, bias, targets, ignore_index))
        logits = ops.linear(x, weight, bias) if whole_logits else _withheld(x, weight)
        return reduced(losses, targets != ignore_index, reduction, dtype), logits


def _withheld(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_full((), torch.nan).expand(*x.shape[:-1], len(weight))


def _losses(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int) -> Tensor:
    return _Losses.apply(x, weight, bias, targets, ignore_index)


def _plainly(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int) -> Tensor:
    logits = ops.linear(x, weight, bias)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return ops.cross_entropy(logits, targets, ignore_index, "none", wide)


class Part(NamedTuple):
    """Some rows of the weight, and the bias: those of a part of the vocabulary."""

    start: int
    stop: int
    weight: Tensor
    bias: Tensor | None

    def logits(self, rows: Tensor) -> Tensor:
        """As the model computes them."""
        return F.linear(rows, self.weight, self.bias)


def _parts(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[Part]:
    words = len(weight)
    columns = max(1, NUMBERS // max(1, len(rows)))
    for start in range(0, words, columns):
        stop = min(start + columns, words)
        yield Part(start, stop, weight[start:stop], None if bias is None else bias[start:stop])


class _Losses(torch.autograd.Function):
    """The losses of the targets, 0 where they are ignored."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int
    ) -> Tensor:
        rows, flat = x.reshape(-1, x.shape[-1]), targets.reshape(-1).long()
        counted = flat != ignore_index
        known = ~counted | ((flat >= 0) & (flat < len(weight)))
        check_index(known.all(), f"a target is no word of the {len(weight)} that there are")
        wide = torch.promote_types(x.dtype, torch.float32)
        # the largest logits, the logarithm of the sum of all exponentials relative to them, which would be
        # rounded away in one number with them, and the logits of the targets
        top = rows.new_full((len(rows),), -torch.inf, dtype=wide)
        total, own = top.clone(), torch.zeros_like(top)
        for part in _parts(rows, weight, bias):
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
        for part in _parts(rows, weight, bias):
            found = part.logits(rows)
            _to_gradient(found, flat - part.start, top, total, each)
            if of_x:
                _add_product(dx, found, part.weight)
            if of_weight:
                torch.mm(found.t(), rows, out=dw[part.start : part.stop])
            if of_bias:
                db[part.start : part.stop] = found.sum(0)
            del found  # or the next part's logits would be beside it
        return None if dx is None else dx.to(x.dtype).view_as(x), dw, db, None, None


def _gather(logits: Tensor, column: Tensor, top: Tensor, total: Tensor, own: Tensor) -> None:
    """Take a part of the logits, [rows, columns], into what is known of each row; the targets' columns lie
    outside of the part where they are in another one."""
    if _in_kernel(logits, top):
        from te_transform.backends import chunked_loss_kernel

        return chunked_loss_kernel.gather(logits, column, top, total, own)
    inside, place = _inside(logits, column)
    own += torch.where(inside, logits.gather(1, place).squeeze(1).to(own.dtype), 0.0)
    largest, less = _top_and_logsumexp(logits, top.dtype)
    before = top.clone()
    torch.maximum(before, largest, out=top)
    torch.logaddexp(total + _below(before, top), less + _below(largest, top), out=total)


def _to_gradient(logits: Tensor, column: Tensor, top: Tensor, total: Tensor, each: Tensor) -> None:
    """Put the gradients of a part of the logits in their place: softmax, less one at the target, by the
    gradient of the row's loss, computed in the wider dtype of the two."""
    if _in_kernel(logits, top):
        from te_transform.backends import chunked_loss_kernel

        return chunked_loss_kernel.to_gradient(logits, column, top, total, each)
    inside, place = _inside(logits, column)
    found = (logits - top.unsqueeze(1)).sub_(total.unsqueeze(1)).exp_()
    found.scatter_add_(1, place, -inside.to(found.dtype).unsqueeze(1))
    torch.mul(found, each.unsqueeze(1), out=logits)


def _in_kernel(logits: Tensor, top: Tensor) -> bool:
    return logits.is_cuda and top.dtype is torch.float32 and logits.numel() > 0


def _inside(logits: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows have their target in this part, and its column there, [rows, 1]."""
    width = logits.shape[1]
    return (column >= 0) & (column < width), column.clamp(0, width - 1).unsqueeze(1)


def _top_and_logsumexp(logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The largest of the columns, and the logarithm of the exponentials' sum relative to it."""
    top, place = logits.max(1, keepdim=True)
    less = torch.log_softmax(logits, 1, dtype=dtype).gather(1, place)
    return top.squeeze(1).to(dtype), torch.where(top.isneginf(), 0.0, -less).squeeze(1)


def _below(largest: Tensor, top: Tensor) -> Tensor:
    """How much lower than `top`, which is the larger, a largest logit is: at most 0, -inf where both are."""
    return largest - torch.where(top.isneginf(), 0.0, top)


def _add_product(total: Tensor, x: Tensor, y: Tensor) -> None:
    """Add x y in the wider dtype of the total, which the sums are in anyway."""
    if total.is_cuda and total.dtype is not x.dtype:
        torch.addmm(total, x, y, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(x.to(total.dtype), y.to(total.dtype))
