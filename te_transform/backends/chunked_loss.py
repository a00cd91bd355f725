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

from te_transform.backends.limits import as_autocast, whole_logits
from te_transform.backends.op import FusedOp
from te_transform.backends.plain import reduced
from te_transform.backends.quantized import is_quantized
from te_transform.backends.tracing import transformed
from te_transform.backends.twice import differentiable_twice
from te_transform.graph import ops
from te_transform.graph.bound import F

NUMBERS = 2**25  # logits in a part: 64 MiB in bf16, 128 in fp32


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
        if transformed() or is_quantized(weight):
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

    def inside(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Which rows have their target in this part, and its column there."""
        found = (targets >= self.start) & (targets < self.stop)
        return found, (targets - self.start).clamp(0, self.stop - self.start - 1).unsqueeze(1)


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
        torch._assert_async(known.all(), f"a target is no word of the {len(weight)} that there are")
        wide = torch.promote_types(x.dtype, torch.float32)
        # the largest logits, the logarithm of the sum of all exponentials relative to them, which would be
        # rounded away in one number with them, and the logits of the targets
        top = rows.new_full((len(rows),), -torch.inf, dtype=wide)
        total = top
        own = rows.new_zeros(len(rows), dtype=wide)
        for part in _parts(rows, weight, bias):
            logits = part.logits(rows)
            inside, column = part.inside(flat)
            own += torch.where(inside, logits.gather(1, column).squeeze(1).to(wide), 0.0)
            largest, less = _top_and_logsumexp(logits, wide)
            before, top = top, torch.maximum(top, largest)
            total = torch.logaddexp(total + _below(before, top), less + _below(largest, top))
        ctx.save_for_backward(x, weight, bias, flat, top, total)
        ctx.ignore_index = ignore_index
        return torch.where(counted, top - own + total, 0.0).view(targets.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, flat, top, total = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        rows, wide = x.reshape(-1, x.shape[-1]), total.dtype
        each = torch.where(flat != ctx.ignore_index, grad.reshape(-1).to(wide), 0.0).unsqueeze(1)
        dx = torch.zeros_like(rows, dtype=wide) if of_x else None
        dw = torch.empty_like(weight) if of_weight else None
        db = torch.empty_like(bias) if of_bias else None
        for part in _parts(rows, weight, bias):
            inside, column = part.inside(flat)
            # softmax less one at the target, by the gradient of the row's loss, in the wider dtype of the two
            logits = part.logits(rows)
            found = (logits - top.unsqueeze(1)).sub_(total.unsqueeze(1)).exp_()
            found.scatter_add_(1, column, -inside.to(wide).unsqueeze(1))
            found = torch.mul(found, each, out=logits)  # rounded in the logits' place
            if of_x:
                dx += _multiplied(found, part.weight, wide)
            if of_weight:
                torch.mm(found.t(), rows, out=dw[part.start : part.stop])
            if of_bias:
                db[part.start : part.stop] = found.sum(0)
        return None if dx is None else dx.to(x.dtype).view_as(x), dw, db, None, None


def _top_and_logsumexp(logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The largest of the columns, and the logarithm of the exponentials' sum relative to it; in a wider
    dtype, by the one kernel that reads narrow numbers and computes so."""
    top, place = logits.max(1, keepdim=True)
    less = torch.log_softmax(logits, 1, dtype=dtype).gather(1, place)
    return top.squeeze(1).to(dtype), torch.where(top.isneginf(), 0.0, -less).squeeze(1)


def _below(largest: Tensor, top: Tensor) -> Tensor:
    """How much lower than `top`, which is the larger, a largest logit is: at most 0, -inf where both are."""
    return torch.where(top.isneginf(), top, largest - top)


def _multiplied(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """x y in a wider dtype, which the sums are in anyway."""
    if x.dtype is dtype:
        return x @ y
    return torch.mm(x, y, out_dtype=dtype) if x.is_cuda else x.to(dtype) @ y.to(dtype)
