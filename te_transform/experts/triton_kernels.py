"""Triton kernels for experts: the sum over the choices of a token, and gated activations."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_COLUMNS = 1024  # the maximum number of columns that a program reads or computes at once


@triton.jit
def _combine_rows(y, places, weights, bias, experts, out, width, HAS_WEIGHTS: tl.constexpr,
                  HAS_BIAS: tl.constexpr, CHOICES: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for choice in tl.static_range(CHOICES):
        at = token * CHOICES + choice
        row = tl.load(places + at)
        read = tl.load(y + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            start = bias + tl.load(experts + at) * width
            read += tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            read *= tl.load(weights + at).to(tl.float32)
        total += read
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _combine_gradients(grad, y, places, weights, bias, experts, grad_y, grad_weights, width,
                       HAS_BIAS: tl.constexpr, CHOICES: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    row, weight = tl.load(places + at), tl.load(weights + at).to(tl.float32)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for first in range(0, width, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        inside = columns < width
        given = tl.load(grad + at // CHOICES * width + columns, mask=inside, other=0.0).to(tl.float32)
        read = tl.load(y + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            start = bias + tl.load(experts + at) * width
            read += tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_y + row * width + columns, (given * weight).to(grad_y.dtype.element_ty), mask=inside)
        total += given * read
    tl.store(grad_weights + at, tl.sum(total, axis=0).to(grad_weights.dtype.element_ty))


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
    gated = first * tl.sigmoid(slope * first) * (beside + offset)
    tl.store(out + row * width + columns, gated.to(out.dtype.element_ty), mask=columns < width)


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


def combine_rows(
    y: Tensor, places: Tensor, weights: Tensor | None, bias: Tensor | None, experts: Tensor | None
) -> Tensor:
    """Return the weighted sum of each token's rows: [tokens, width] in the dtype of y.

    Args:
        y: the rows, [tokens * choices, width].
        places: the rows of each token, [tokens, choices].
        weights: the weight of each choice, [tokens, choices]; None: all are 1.
        bias: a bias per expert, [experts, width], added to the rows of that expert.
        experts: the expert of each choice, [tokens, choices]; needed with a bias.
    """
    (tokens, choices), width = places.shape, y.shape[-1]
    out, columns = y.new_empty(tokens, width), _program_columns(width)
    given = (*_without_gaps(y, places, weights, bias, experts), out, width)
    how = {"HAS_WEIGHTS": weights is not None, "HAS_BIAS": bias is not None, "CHOICES": choices}
    with torch.cuda.device(y.device):
        _combine_rows[tokens, triton.cdiv(width, columns)](*given, COLUMNS=columns, **how)
    return out


def combine_backward(
    grad: Tensor, y: Tensor, places: Tensor, weights: Tensor, bias: Tensor | None, experts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of y and of the weights."""
    grad, y, places, weights, *rest = _without_gaps(grad, y, places, weights, bias, experts)
    grad_y, grad_weights = torch.empty_like(y), torch.empty_like(weights)
    width = y.shape[-1]
    given = grad, y, places, weights, *rest, grad_y, grad_weights, width
    how = {"HAS_BIAS": bias is not None, "CHOICES": places.shape[-1], "COLUMNS": _program_columns(width)}
    with torch.cuda.device(y.device):
        _combine_gradients[places.numel(),](*given, **how)
    return grad_y, grad_weights


def gated(hidden: Tensor, bias: Tensor | None, groups: Tensor, *gate: Any) -> Tensor:
    """Compute the gate of each row: [rows, width] in the dtype of `hidden`.

    Args:
        hidden: gates and what is beside them, [rows, 2 * width], in 16 bits, contiguous.
        bias: a bias per expert, [experts, 2 * width].
        groups: the expert of each row, [rows].
        gate: the fields of kernels.Gate.
    """
    out = hidden.new_empty(len(hidden), hidden.shape[-1] // 2)
    _launch_gate(_gated_rows, (*_without_gaps(hidden, bias, groups), out), out.shape, bias is not None, *gate)
    return out


def gated_backward(grad: Tensor, hidden: Tensor, bias: Tensor | None, groups: Tensor, *gate: Any) -> Tensor:
    """Return the gradient of `hidden`; the gradient of each row's bias is the same."""
    out = torch.empty_like(hidden)
    given = (*_without_gaps(grad, hidden, bias, groups), out)
    _launch_gate(_gate_gradients, given, grad.shape, bias is not None, *gate)
    return out


def _without_gaps(first: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """Return contiguous tensors, with the first one in the place of missing ones, which no kernel reads."""
    first = first.contiguous()
    return [first, *(first if tensor is None else tensor.contiguous() for tensor in tensors)]


def _program_columns(width: int) -> int:
    return min(MAX_COLUMNS, triton.next_power_of_2(width))


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
    columns = _program_columns(width)
    how = {"HAS_BIAS": has_bias, "PAIRS": pairs, "COLUMNS": columns}
    if rows:
        with torch.cuda.device(tensors[0].device):
            grid = rows, triton.cdiv(width, columns)
            kernel[grid](*tensors, width, slope, limit, float(offset), **how)
