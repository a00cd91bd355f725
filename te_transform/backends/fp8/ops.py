"""Operators for compiled graphs that quantize to FP8 (te/casts.py) and multiply in FP8 (cublas.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_transform.backends import plain
from te_transform.backends.library import define_operator

InFP8 = tuple[Tensor, Tensor, Tensor]  # in FP8, its transpose or empty, the inverse of the scale


def multiply(
    a: Tensor,
    b: Tensor,
    a_inverse: Tensor,
    b_inverse: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    """Compute a [rows, inner] b [columns, inner]^T + bias in `dtype`, from FP8.

    Args:
        a: in FP8.
        b: in FP8.
        a_inverse: the inverse of the scale of `a`, fp32.
        b_inverse: the same of `b`.
        bias: [columns] in `dtype`, or None.
        dtype: float16, bfloat16 or float32.
        fast: True to accumulate in the tensor cores, with fewer than 32 bits.
    """
    return torch._scaled_mm(a, b.t(), a_inverse, b_inverse, bias=bias, out_dtype=dtype, use_fast_accum=fast)


_CAST_SCHEMA = "Tensor scales, Tensor(a!){} history, int index, ScalarType dtype, bool with_transpose) -> "
_IN_FP8 = "Tensor, Tensor, Tensor"
define_operator("quantize", f"(Tensor x, {_CAST_SCHEMA.format('?')} ({_IN_FP8})")
define_operator("activate", f"(Tensor x, str activation, {_CAST_SCHEMA.format('')} ({_IN_FP8})")
define_operator(
    "activate_backward",
    f"(Tensor grad, Tensor x, str activation, bool with_sum, {_CAST_SCHEMA.format('')} ({_IN_FP8}, Tensor)",
)
define_operator(
    "multiply",
    "(Tensor a, Tensor b, Tensor a_inverse, Tensor b_inverse, Tensor? bias, ScalarType dtype, bool fast) "
    "-> Tensor",
)


@torch.library.register_fake("te_transform::multiply")
def _multiplied_in_fp8(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=rest[-2])


@torch.library.register_fake("te_transform::quantize")
def _fake_quantized(
    x: Tensor, scales: Tensor, history: Tensor | None, index: int, dtype: torch.dtype, with_transpose: bool
) -> InFP8:
    transposed = x.new_empty(x.shape[::-1] if with_transpose else (0,), dtype=dtype)
    return x.new_empty(x.shape, dtype=dtype), transposed, scales.new_empty(1)


@torch.library.register_fake("te_transform::activate")
def _activated(x: Tensor, activation: str, *where: Any) -> InFP8:
    return _fake_quantized(x.chunk(2, -1)[0] if plain.is_gated(activation) else x, *where)


@torch.library.register_fake("te_transform::activate_backward")
def _activated_backward(
    grad: Tensor, x: Tensor, activation: str, with_sum: bool, *where: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (*_fake_quantized(x, *where), grad.new_empty(x.shape[1] if with_sum else 0))
