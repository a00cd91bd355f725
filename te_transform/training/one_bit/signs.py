"""Pack the signs of numbers into bits: a Triton kernel on a GPU, torch ops elsewhere, in the same format.

Bit k of byte j is 1 if number 8 j + k is >= 0. Zero counts as positive.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack_(values: Tensor, scale: Tensor, bits: Tensor) -> None:
    """Write the signs q of `values` into `bits`, and replace `values` by the error, values - scale * q.

    Args:
        values: fp32 [rows, columns], contiguous; columns are a multiple of 8.
        scale: fp32, one element.
        bits: uint8 [rows, columns / 8]; rows may have gaps between them.
    """
    if values.is_cuda:
        from te_transform.training.one_bit import signs_kernel

        return signs_kernel.pack_(values, scale, bits)
    is_positive = values >= 0
    weights = 1 << _bit_positions(values)
    bits.copy_((is_positive.unflatten(-1, (-1, 8)) * weights).sum(-1, dtype=torch.uint8))
    values.sub_(torch.where(is_positive, scale, -scale))


def unpack(bits: Tensor, scales: Tensor, values: Tensor) -> None:
    """Write `scales` with the signs in `bits` into `values`, row by row.

    Args:
        bits: uint8 [rows, columns / 8]; rows may have gaps between them.
        scales: fp32 [rows].
        values: fp32 [rows, columns], contiguous.
    """
    if values.is_cuda:
        from te_transform.training.one_bit import signs_kernel

        return signs_kernel.unpack(bits, scales, values)
    for row, scale, out in zip(bits, scales, values, strict=True):
        torch.where(_is_positive(row), scale, -scale, out=out)


def add_sum_(values: Tensor, bits: Tensor, scales: Tensor) -> None:
    """Add the sum over rows of `scales` with the signs in `bits` to `values`. Rows are summed in order.

    Args:
        values: fp32 [columns], contiguous.
        bits: uint8 [rows, columns / 8]; rows may have gaps between them.
        scales: fp32 [rows].
    """
    if values.is_cuda:
        from te_transform.training.one_bit import signs_kernel

        return signs_kernel.add_sum_(values, bits, scales)
    total = torch.zeros_like(values)
    for row, scale in zip(bits, scales, strict=True):
        total += torch.where(_is_positive(row), scale, -scale)
    values += total


def _is_positive(row: Tensor) -> Tensor:
    return ((row[:, None] >> _bit_positions(row)) & 1).flatten().bool()


def _bit_positions(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
