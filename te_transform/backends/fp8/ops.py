"""Operations for compiled graphs that quantize to FP8 and record the amax, and that multiply in FP8.

On a GPU, a backend's kernels replace them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from te_transform.backends import plain
from te_transform.backends.library import define_operator

InFP8 = tuple[Tensor, Tensor, Tensor]  # in FP8, its transpose or empty, the inverse of the scale


def quantize(
    x: Tensor, scales: Tensor, history: Tensor | None, index: int, dtype: torch.dtype, with_transpose: bool
) -> InFP8:
    """Quantize x * scale to FP8; values out of range become the largest FP8 number.

    Args:
        x: [rows, columns], contiguous.
        scales: [tensors], fp32.
        history: [steps, tensors], fp32; row 0 becomes the maximum of itself and the amax of x.
        index: the index of x among the tensors.
        dtype: float8_e4m3fn or float8_e5m2.
        with_transpose: True to return the transpose too.

    Returns:
        x in FP8, its transpose [columns, rows] or an empty tensor [0], and 1 / scale [1] in fp32.
    """
    limit, wide = torch.finfo(dtype).max, x.float()
    if history is not None:
        history[0, index] = torch.maximum(history[0, index], wide.abs().amax())
    scale = scales[index : index + 1]
    held = (wide * scale).clamp(-limit, limit).to(dtype)
    # not every device transposes FP8; all transpose bytes
    transposed = held.view(torch.uint8).t().contiguous().view(dtype) if with_transpose else held.new_empty(0)
    return held, transposed, 1 / scale


def activate(x: Tensor, activation: str, *where: Any) -> InFP8:
    """Quantize an activation of x [rows, columns], or [rows, 2 columns] if it is gated.

    Args:
        x: the input of the activation.
        activation: TE's name.
        where: the other arguments of quantize().
    """
    return quantize(plain.activated(activation, x.float()), *where)


def activate_backward(
    grad: Tensor, x: Tensor, activation: str, with_sum: bool, *where: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize the gradient of x, computed from the gradient of its activation.

    Args:
        grad: the gradient of the activation.
        x: the input of the activation.
        activation: TE's name.
        with_sum: True to return the sum over the rows too, the gradient of a bias.
        where: the other arguments of quantize().

    Returns:
        The results of quantize(), and the sum in the dtype of `grad` or an empty tensor [0].
    """
    found = _activation_gradient(grad.float(), x.float(), activation)
    total = found.sum(0).to(grad.dtype) if with_sum else grad.new_empty(0)
    return (*quantize(found, *where), total)


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


def _activation_gradient(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    """Compute the gradient without autograd, which is off inside a library operation."""
    if not plain.is_gated(activation):
        return grad * _DERIVATIVES[activation](x)
    gate, other = x.chunk(2, -1)
    if (clamp := plain.clamp_of(activation)) is not None:
        return _clamped_gradient(grad, gate, other, clamp)
    activated = plain.activated(activation, torch.cat([gate, torch.ones_like(gate)], -1))
    return torch.cat([grad * _DERIVATIVES[_GATE_OF[activation]](gate) * other, grad * activated], -1)


def _clamped_gradient(grad: Tensor, gate: Tensor, other: Tensor, clamp: plain.Clamp) -> Tensor:
    limit, alpha, offset = clamp
    counts, other_counts = gate <= limit, other.abs() <= limit
    gate, other = gate.clamp(max=limit), other.clamp(-limit, limit)
    share = (alpha * gate).sigmoid()
    slope = share + alpha * gate * _sigmoids_slope(alpha * gate)
    parts = (  # a clamped value has no gradient, even if its factor is NaN
        torch.where(counts, grad * slope * (other + offset), 0.0),
        torch.where(other_counts, grad * gate * share, 0.0),
    )
    return torch.cat(parts, -1)


def _sigmoids_slope(x: Tensor) -> Tensor:
    return x.sigmoid() * (1 - x.sigmoid())


_GATE_OF = {
    "geglu": "gelu", "glu": "sigmoid", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu",
    "swiglu": "silu",
}  # fmt: skip
_DERIVATIVES: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate="tanh"),
    "qgelu": lambda x: (1.702 * x).sigmoid() + 1.702 * x * _sigmoids_slope(1.702 * x),
    "silu": lambda x: x.sigmoid() + x * _sigmoids_slope(x),
    "relu": lambda x: (x > 0).float(),
    "srelu": lambda x: 2 * x.relu(),
    "sigmoid": _sigmoids_slope,
}


_CAST_SCHEMA = "Tensor scales, Tensor(a!){} history, int index, ScalarType dtype, bool with_transpose) -> "
_IN_FP8 = "Tensor, Tensor, Tensor"
define_operator(quantize, f"(Tensor x, {_CAST_SCHEMA.format('?')} ({_IN_FP8})")
define_operator(activate, f"(Tensor x, str activation, {_CAST_SCHEMA.format('')} ({_IN_FP8})")
define_operator(
    activate_backward,
    f"(Tensor grad, Tensor x, str activation, bool with_sum, {_CAST_SCHEMA.format('')} ({_IN_FP8}, Tensor)",
)
define_operator(
    multiply,
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
