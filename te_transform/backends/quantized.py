"""Tensors that hold their values in FP8 alone."""

from __future__ import annotations

from torch import Tensor


def is_quantized(tensor: Tensor) -> bool:
    """Whether it is one of TE's tensors, which hold their values in FP8 alone."""
    return hasattr(tensor, "_quantizer")


def exact(tensor: Tensor) -> Tensor:
    """The tensor, in the dtype it says it has: dequantized where that is not how it is held."""
    return tensor.dequantize() if is_quantized(tensor) else tensor
