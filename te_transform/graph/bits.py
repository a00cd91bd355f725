"""Compare tensors of any layout bit by bit, and read their numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have the same shape, dtype, layout and bits, and the same sparse indices."""
    return _bit_layout(one) == _bit_layout(other) and all(
        map(_same_dense, _stored_parts(one), _stored_parts(other))
    )


def _bit_layout(tensor: Tensor) -> tuple[Any, ...]:
    return (
        shape_in_bits(tensor),
        tensor.dtype,
        tensor.layout,
        tensor.qscheme() if tensor.is_quantized else None,
    )


def shape_in_bits(tensor: Tensor) -> torch.Size | None:
    """Return the shape, or None for nested tensors."""
    return None if tensor.is_nested else tensor.shape


def _same_dense(one: Tensor, other: Tensor) -> bool:
    one, other = (tensor.detach().resolve_conj().resolve_neg() for tensor in (one, other))
    one, other = (tensor.contiguous().flatten() for tensor in (one, other))
    return one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _stored_parts(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors that a tensor is stored as."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.is_nested:
        is_jagged = tensor.layout is torch.jagged
        sizes = [tensor.offsets(), tensor.lengths()] if is_jagged else [tensor._nested_tensor_size()]
        return [tensor.values(), *(size for size in sizes if size is not None)]
    if tensor.is_quantized:  # comparing the bits directly never ends in PyTorch
        if tensor.qscheme() is torch.per_channel_affine:
            return [tensor.int_repr(), tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
        scale = [tensor.q_scale(), tensor.q_zero_point()]
        return [tensor.int_repr(), torch.tensor(scale, dtype=torch.float64, device="cpu")]
    return [tensor]


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """Return dense tensors with the numbers of a tensor, in dtypes that PyTorch computes in.

    A nested tensor has one part for each tensor in it; other tensors have one part.
    """
    if tensor.is_nested:
        return [part for each in tensor.unbind() for part in dense_parts(each)]
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    is_float8 = tensor.is_floating_point() and tensor.dtype.itemsize == 1
    return [tensor.bfloat16() if is_float8 else tensor]
