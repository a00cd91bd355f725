"""Triton kernels of chunked_loss.py, which read each part of the logits once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_COLUMNS = 4096  # the maximum number of columns in one block


@triton.jit
def _difference_in_kernel(largest, top):
    """Return `largest` - `top`, given that `top` is not smaller, and -inf if both are -inf."""
    return largest - tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _logaddexp(x, y):
    larger = tl.maximum(x, y)
    return larger + tl.log(
        tl.exp(_difference_in_kernel(x, larger)) + tl.exp(_difference_in_kernel(y, larger))
    )


@triton.jit
def _gather_rows(logits, column, top, total, own, width, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * width
    largest, less = tl.load(top + row), tl.load(total + row)
    for first in range(0, width, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        read = tl.load(line + columns, mask=columns < width, other=float("-inf")).to(tl.float32)
        here = tl.max(read, axis=0)
        summed = tl.sum(tl.exp(_difference_in_kernel(read, here)), axis=0)
        higher = tl.maximum(largest, here)
        less = _logaddexp(
            less + _difference_in_kernel(largest, higher),
            tl.log(summed) + _difference_in_kernel(here, higher),
        )
        largest = higher
    tl.store(top + row, largest)
    tl.store(total + row, less)
    place = tl.load(column + row)
    inside = (place >= 0) & (place < width)
    logit = tl.load(line + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(own + row, tl.load(own + row) + logit)


@triton.jit
def _loss_gradients(logits, column, top, total, each, width, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at, inside = logits + row * width + columns, columns < width
    read = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    share = tl.exp(read - tl.load(top + row) - tl.load(total + row))
    gradient = tl.where(columns == tl.load(column + row), share - 1, share) * tl.load(each + row)
    tl.store(at, gradient.to(logits.dtype.element_ty), mask=inside)


def gather_logits(logits: Tensor, column: Tensor, top: Tensor, total: Tensor, own: Tensor) -> None:
    """Run chunked_loss._gather() on contiguous logits; the statistics are in fp32."""
    rows, width = logits.shape
    with torch.cuda.device(logits.device):
        columns = min(MOST_COLUMNS, triton.next_power_of_2(width))
        _gather_rows[(rows,)](logits, column, top, total, own, width, COLUMNS=columns, num_warps=8)


def to_gradient(logits: Tensor, column: Tensor, top: Tensor, total: Tensor, each: Tensor) -> None:
    """Run chunked_loss._to_gradient() on contiguous logits; the statistics are in fp32."""
    rows, width = logits.shape
    with torch.cuda.device(logits.device):
        columns = min(MOST_COLUMNS, triton.next_power_of_2(width))
        grid = rows, triton.cdiv(width, columns)
        _loss_gradients[grid](logits, column, top, total, each, width, COLUMNS=columns, num_warps=8)
