"""The kernels of gated.py."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAM_COLUMNS = 1024  # the maximum number of output columns that a program computes


@triton.jit
def _load_parts(x, row, columns, width, PAIRS: tl.constexpr):
    """Load the gates and what is beside them, from a row of 2 * width elements."""
    start, inside = x + row * 2 * width, columns < width
    if PAIRS:
        both = columns[:, None] * 2 + tl.arange(0, 2)[None, :]
        first, beside = tl.split(tl.load(start + both, mask=both < 2 * width, other=0.0))
    else:
        first = tl.load(start + columns, mask=inside, other=0.0)
        beside = tl.load(start + width + columns, mask=inside, other=0.0)
    return first.to(tl.float32), beside.to(tl.float32)


@triton.jit
def _load_biased(hidden, bias, groups, row, columns, width, HAS_BIAS: tl.constexpr, PAIRS: tl.constexpr):
    first, beside = _load_parts(hidden, row, columns, width, PAIRS)
    if HAS_BIAS:
        more, more_beside = _load_parts(bias, tl.load(groups + row), columns, width, PAIRS)
        first, beside = first + more, beside + more_beside
    return first, beside


@triton.jit
def _clamp_in_kernel(first, beside, limit):
    first = tl.minimum(first, limit, propagate_nan=tl.PropagateNan.ALL)
    beside = tl.minimum(beside, limit, propagate_nan=tl.PropagateNan.ALL)
    return first, tl.maximum(beside, -limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _gated_rows(hidden, bias, groups, out, width, slope, limit, offset, HAS_BIAS: tl.constexpr,
                PAIRS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first, beside = _load_biased(hidden, bias, groups, row, columns, width, HAS_BIAS, PAIRS)
    first, beside = _clamp_in_kernel(first, beside, limit)
    made = first * tl.sigmoid(slope * first) * (beside + offset)
    tl.store(out + row * width + columns, made.to(out.dtype.element_ty), mask=columns < width)


@triton.jit
def _gate_gradients(grad, hidden, bias, groups, out, width, slope, limit, offset, HAS_BIAS: tl.constexpr,
                       PAIRS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    given = tl.load(grad + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    first, beside = _load_biased(hidden, bias, groups, row, columns, width, HAS_BIAS, PAIRS)
    counts, beside_counts = first <= limit, tl.abs(beside) <= limit
    first, beside = _clamp_in_kernel(first, beside, limit)
    share = tl.sigmoid(slope * first)
    of_first = given * share * (1 + slope * first * (1 - share)) * (beside + offset)
    of_first = tl.where(counts, of_first, 0.0).to(out.dtype.element_ty)
    of_beside = tl.where(beside_counts, given * first * share, 0.0).to(out.dtype.element_ty)
    start = out + row * 2 * width
    if PAIRS:
        both = columns[:, None] * 2 + tl.arange(0, 2)[None, :]
        tl.store(start + both, tl.join(of_first, of_beside), mask=both < 2 * width)
    else:
        tl.store(start + columns, of_first, mask=inside)
        tl.store(start + width + columns, of_beside, mask=inside)


def gated(hidden: Tensor, bias: Tensor | None, groups: Tensor, *gate: Any) -> Tensor:
    """Run gated.gated() on a contiguous `hidden`."""
    out = hidden.new_empty(len(hidden), hidden.shape[-1] // 2)
    _launch_gate(
        _gated_rows,
        (hidden, _bias_or_stand_in(bias, hidden), groups, out),
        out.shape,
        bias is not None,
        *gate,
    )
    return out


def gated_backward(grad: Tensor, hidden: Tensor, bias: Tensor | None, groups: Tensor, *gate: Any) -> Tensor:
    """Run gated.gated_backward() on a contiguous gradient and `hidden`."""
    out = torch.empty_like(hidden)
    given = grad, hidden, _bias_or_stand_in(bias, hidden), groups, out
    _launch_gate(_gate_gradients, given, grad.shape, bias is not None, *gate)
    return out


def _bias_or_stand_in(bias: Tensor | None, hidden: Tensor) -> Tensor:
    return hidden if bias is None else bias.contiguous()


def _launch_gate(
    kernel: triton.JITFunction,
    tensors: tuple[Tensor, ...],
    shape: torch.Size,
    has_bias: bool,
    slope: float,
    limit: float,
    offset: int,
    pairs: bool,
) -> None:
    rows, width = shape
    columns = min(PROGRAM_COLUMNS, triton.next_power_of_2(width))
    how = {"HAS_BIAS": has_bias, "PAIRS": pairs, "COLUMNS": columns}
    if rows:
        with torch.cuda.device(tensors[0].device):
            grid = rows, triton.cdiv(width, columns)
            kernel[grid](*tensors, width, slope, limit, float(offset), **how)
