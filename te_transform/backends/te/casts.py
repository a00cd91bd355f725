"""TE kernels that cast their result to FP8, for the custom operators of compiled graphs, see fp8/ops.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.constants import TE_DType
from transformer_engine.pytorch.module import layernorm_mlp
from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

from te_transform.backends.fp8.ops import InFP8
from te_transform.backends.te.activations import activation_and_limits


def _quantized_by_kernel(
    compute: Callable[[Any], Any],
    scales: Tensor,
    history: Tensor | None,
    index: int,
    dtype: torch.dtype,
    with_transpose: bool,
) -> InFP8:
    """Run a kernel that computes, casts and transposes a tensor, and updates its amax.

    Values out of range become the largest FP8 number.

    Args:
        compute: runs the kernel with a quantizer.
        scales: the scales of a group of tensors.
        history: the amax history, whose first row the kernel updates; None to discard the amax.
        index: the position of the tensor in the group.
        dtype: the FP8 dtype.
        with_transpose: True to compute the transposed tensor too.

    Returns:
        The tensor in FP8, its transpose or an empty tensor [0], and 1 / scale [1] in fp32.
    """
    amax = torch.empty_like(scales) if history is None else history[0]
    quantizer = Float8Quantizer(
        scale=scales[index : index + 1],
        amax=amax[index : index + 1],
        fp8_dtype=TE_DType[dtype],
        rowwise=True,
        columnwise=with_transpose,
    )
    quantizer.internal = True
    parts = compute(quantizer).get_metadata()
    rows, transposed = parts["data"].view(dtype), parts["data_transpose"]
    if not with_transpose:
        transposed = parts["data"].new_empty(0)
    elif transposed is None:  # TE makes none on GPUs whose FP8 matrix products support every layout
        transposed = parts["data"].t().contiguous()
    return rows, transposed.view(dtype), parts["fp8_scale_inv"]


def quantize(x: Tensor, *where: Any) -> InFP8:
    """Quantize x [rows, columns]; `where` are the arguments of _quantized_by_kernel()."""
    return _quantized_by_kernel(lambda quantizer: quantizer(x), *where)


def activate(x: Tensor, activation: str, *where: Any) -> InFP8:
    """Quantize an activation, by TE's name, of x [rows, columns], or [rows, 2 columns] if it is gated."""
    forward, *_ = functions_of(activation)
    return _quantized_by_kernel(partial(forward, x), *where)


def activate_backward(
    grad: Tensor, x: Tensor, activation: str, with_sum: bool, *where: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize the gradient of x, computed from the gradient of its activation.

    If `with_sum`, also return its sum over the rows, the gradient of a bias.
    """
    _, backward, with_bias = functions_of(activation)
    if not with_sum:
        return (*_quantized_by_kernel(partial(backward, grad, x), *where), grad.new_empty(0))
    total = grad.new_empty(0)

    def compute(quantizer: Any) -> Any:
        nonlocal total
        total, gradient = with_bias(grad, x, quantizer)
        return gradient

    return (*_quantized_by_kernel(compute, *where), total)


@cache
def functions_of(activation: str) -> tuple[Any, ...]:
    """Return TE's functions of an activation: forward, gradient, and gradient with that of the bias."""
    name, limits = activation_and_limits(activation)
    functions = layernorm_mlp._act_func(name, recipes.DelayedScaling())
    return tuple(function and partial(function, **limits) for function in functions)
