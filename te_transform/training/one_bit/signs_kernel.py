"""Triton kernels of signs.py: one pass packs and computes the error, one unpacks and sums up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BYTES = 256  # of packed signs that one program handles


@triton.jit
def _pack(values, scale, bits, row_bytes, stride, total, BYTES: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    place = tl.arange(0, 8)
    at = byte[:, None] * 8 + place[None, :]
    inside = byte < total
    value = tl.load(values + at, mask=inside[:, None], other=0.0)
    is_positive = value >= 0
    size = tl.load(scale)
    error = tl.where(is_positive, value - size, value + size)
    tl.store(values + at, error, mask=inside[:, None])
    packed = tl.sum(is_positive.to(tl.int32) << place[None, :], axis=1)
    tl.store(bits + byte // row_bytes * stride + byte % row_bytes, packed.to(tl.uint8), mask=inside)


@triton.jit
def _unpack(bits, scales, values, row_bytes, stride, scale_stride, SUMMED: tl.constexpr, ADDS: tl.constexpr,
            BYTES: tl.constexpr):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    place = tl.arange(0, 8)
    inside = byte < row_bytes
    total = tl.zeros((BYTES, 8), dtype=tl.float32)
    for summed in range(SUMMED):
        from_row = row * SUMMED + summed
        packed = tl.load(bits + from_row * stride + byte, mask=inside, other=0).to(tl.int32)
        size = tl.load(scales + from_row * scale_stride)
        is_positive = ((packed[:, None] >> place[None, :]) & 1) != 0
        total += tl.where(is_positive, size, -size)
    at = (row * row_bytes + byte[:, None]) * 8 + place[None, :]
    if ADDS:
        total += tl.load(values + at, mask=inside[:, None], other=0.0)
    tl.store(values + at, total, mask=inside[:, None])


def pack_(values: Tensor, scale: Tensor, bits: Tensor) -> None:
    """Pack signs and leave the errors; see signs.pack_()."""
    if total := bits.numel():
        with torch.cuda.device(values.device):
            grid = (triton.cdiv(total, BYTES),)
            _pack[grid](values, scale, bits, bits.shape[1], bits.stride(0), total, BYTES=BYTES)


def unpack(bits: Tensor, scales: Tensor, values: Tensor) -> None:
    """Unpack each row; see signs.unpack()."""
    _launch_unpack(bits, scales, values, rows=len(bits), summed=1, adds=False)


def add_sum_(values: Tensor, bits: Tensor, scales: Tensor) -> None:
    """Unpack and sum up all rows; see signs.add_sum_()."""
    _launch_unpack(bits, scales, values, rows=1, summed=len(bits), adds=True)


def _launch_unpack(bits: Tensor, scales: Tensor, values: Tensor, rows: int, summed: int, adds: bool) -> None:
    if row_bytes := bits.shape[1]:
        with torch.cuda.device(values.device):
            grid = (triton.cdiv(row_bytes, BYTES), rows)
            strides = bits.stride(0), scales.stride(0)
            _unpack[grid](bits, scales, values, row_bytes, *strides, SUMMED=summed, ADDS=adds, BYTES=BYTES)
