"""The operations of our own in compiled graphs: they quantize to FP8, and note the largest value.

On a GPU a backend's kernels run in their place. torch.library.custom_op would take the CPU three times as
long for each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from te_transform.backends import plain

InFP8 = tuple[Tensor, Tensor, Tensor]  # in FP8, its transpose or nothing, what both are multiplied by

KERNELS: dict[str, Callable[..., InFP8]] = {}
"""A backend's kernels for GPUs, by the names of the functions of this file."""


def quantize(
    x: Tensor, scales: Tensor, history: Tensor | None, index: int, dtype: torch.dtype, with_transpose: bool
) -> InFP8:
    """x * scale in FP8, beyond its range the largest number there is.

    Args:
        x: [rows, columns], contiguous.
        scales: [tensors], fp32.
        history: [steps, tensors], fp32; in row 0 the largest absolute value of x is noted, if it is larger
            than what stands there.
        index: of x among the tensors.
        dtype: float8_e4m3fn or float8_e5m2.
        with_transpose: whether the transpose is wanted too.

    Returns:
        x in FP8, its transpose [columns, rows] or nothing [0], and 1 / scale [1] in fp32.
    """
    limit, wide = torch.finfo(dtype).max, x.float()
    if history is not None:
        history[0, index] = torch.maximum(history[0, index], wide.abs().amax())
    scale = scales[index : index + 1]
    held = (wide * scale).clamp(-limit, limit).to(dtype)
    # not every device transposes FP8, all transpose bytes
    transposed = held.view(torch.uint8).t().contiguous().view(dtype) if with_transpose else held.new_empty(0)
    return held, transposed, 1 / scale


def activate(x: Tensor, activation: str, *where: Any) -> InFP8:
    """quantize() of a gated activation of x [rows, 2 columns], by TE's name for it: [rows, columns]; `where`
    are its other arguments."""
    return quantize(plain.gated(activation, x.float()), *where)


def activate_backward(grad: Tensor, x: Tensor, activation: str, *where: Any) -> InFP8:
    """quantize() of the gradient of x [rows, 2 columns], from that of its gated activation; `where` are its
    other arguments."""
    gate, other = x.float().chunk(2, -1)
    activated = plain.gated(activation, torch.cat([gate, torch.ones_like(gate)], -1))
    halves = grad.float() * _SLOPES[activation](gate) * other, grad.float() * activated
    return quantize(torch.cat(halves, -1), *where)


def _sigmoids_slope(x: Tensor) -> Tensor:
    return x.sigmoid() * (1 - x.sigmoid())


# The derivatives of gated activations: autograd is off inside an operation of a library.
_SLOPES: dict[str, Callable[[Tensor], Tensor]] = {
    "geglu": lambda x: torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate="tanh"),
    "qgeglu": lambda x: (1.702 * x).sigmoid() + 1.702 * x * _sigmoids_slope(1.702 * x),
    "swiglu": lambda x: x.sigmoid() + x * _sigmoids_slope(x),
    "reglu": lambda x: (x > 0).float(),
    "glu": _sigmoids_slope,
}


def _by_kernel(function: Callable[..., InFP8]) -> Callable[..., InFP8]:
    """The function, or the backend's kernel for it, if there is one by the time of a call."""

    def run(*arguments: Any) -> InFP8:
        return KERNELS.get(function.__name__, function)(*arguments)

    return run


_REST = (
    "Tensor scales, Tensor(a!){} history, int index, ScalarType dtype, bool with_transpose) "
    "-> (Tensor, Tensor, Tensor)"
)
_LIBRARY = torch.library.Library("te_transform", "FRAGMENT")
_LIBRARY.define("quantize(Tensor x, " + _REST.format("?"))
_LIBRARY.define("activate(Tensor x, str activation, " + _REST.format(""))
_LIBRARY.define("activate_backward(Tensor grad, Tensor x, str activation, " + _REST.format(""))
for _function in (quantize, activate, activate_backward):
    _LIBRARY.impl(_function.__name__, _function, "CPU")
    _LIBRARY.impl(_function.__name__, _by_kernel(_function), "CUDA")
ops = torch.ops.te_transform


@torch.library.register_fake("te_transform::quantize")
def _quantized(
    x: Tensor, scales: Tensor, history: Tensor | None, index: int, dtype: torch.dtype, with_transpose: bool
) -> InFP8:
    transposed = x.new_empty(x.shape[::-1] if with_transpose else (0,), dtype=dtype)
    return x.new_empty(x.shape, dtype=dtype), transposed, scales.new_empty(1)


@torch.library.register_fake("te_transform::activate")
def _activated(x: Tensor, activation: str, *where: Any) -> InFP8:
    return _quantized(x.new_empty(x.shape[0], x.shape[1] // 2), *where)


@torch.library.register_fake("te_transform::activate_backward")
def _activated_backward(grad: Tensor, x: Tensor, activation: str, *where: Any) -> InFP8:
    return _quantized(x, *where)
