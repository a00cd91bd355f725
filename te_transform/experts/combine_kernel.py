"""The kernels of combine.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_PROGRAM_COLUMNS = 1024  # the maximum number of columns that a program reads at once


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


def combine_rows(
    y: Tensor, places: Tensor, weights: Tensor | None, bias: Tensor | None, experts: Tensor | None
) -> Tensor:
    """Run combine.combine() on contiguous tensors."""
    (tokens, choices), width = places.shape, y.shape[-1]
    out, columns = y.new_empty(tokens, width), _program_columns(width)
    held = (y if tensor is None else tensor for tensor in (weights, bias, experts))
    given = y, places, *held, out, width
    how = {"HAS_WEIGHTS": weights is not None, "HAS_BIAS": bias is not None, "CHOICES": choices}
    with torch.cuda.device(y.device):
        _combine_rows[tokens, triton.cdiv(width, columns)](*given, COLUMNS=columns, **how)
    return out


def combine_backward(
    grad: Tensor, y: Tensor, places: Tensor, weights: Tensor, bias: Tensor | None, experts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run combine.combine_backward() on contiguous tensors."""
    width = y.shape[-1]
    grad_y, grad_weights = torch.empty_like(y), torch.empty_like(weights)
    held = (y if tensor is None else tensor for tensor in (bias, experts))
    given = grad, y, places, weights, *held, grad_y, grad_weights, width
    how = {"HAS_BIAS": bias is not None, "CHOICES": places.shape[-1], "COLUMNS": _program_columns(width)}
    with torch.cuda.device(y.device):
        _combine_gradients[places.numel(),](*given, **how)
    return grad_y, grad_weights


def _program_columns(width: int) -> int:
    return min(MOST_PROGRAM_COLUMNS, triton.next_power_of_2(width))
