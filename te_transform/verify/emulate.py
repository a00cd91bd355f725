"""FP8 as well as it can be done: a model's products on operands that were quantized and dequantized.

What verify() measures an FP8 model against. Formats, scales and blocks are those of TE's recipes
(transformer_engine/common/recipe), read from the recipe object; TE itself is not needed. Ideal means:

    scales      come from the very tensor they scale, where delayed scaling has those of earlier steps;
    operands    are quantized once, from the tensor as it is, in blocks along the dimension summed over;
    sums        are fp32, and rounded once.

A linear that is joined with others is emulated by itself, with scales of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from te_transform.backends.limits import as_autocast, dtypes_in_fp8
from te_transform.backends.quantized import exact
from te_transform.execution.products import Products

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class Quantizer:
    """Rounds to what `dtype` holds, with one scale a `block` of rows x columns, None for the whole tensor.

    The scale is the largest that keeps the block's largest value in range, with `powers` the largest such
    power of two. With a `generator` it is smaller by a random factor, 2 at most: the errors are as large, and
    others, as a tensor that is scaled together with its neighbours has them.
    """

    dtype: torch.dtype
    block: tuple[int, int] | None = None
    powers: bool = False
    generator: torch.Generator | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, columns], fp32 -> the same, quantized and dequantized; what is beyond range saturates."""
        rows, columns = self.block or x.shape
        padded = F.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))  # zeros change no largest value
        blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        limit = torch.finfo(self.dtype).max
        scale = self._scale(blocks.abs().amax((1, 3), keepdim=True), limit)
        held = (blocks * scale).clamp(-limit, limit).to(self.dtype)
        return (held.to(x.dtype) / scale).flatten(2, 3).flatten(0, 1)[: x.shape[0], : x.shape[1]]

    def _scale(self, amax: Tensor, limit: float) -> Tensor:
        scale = (limit / amax).clamp(max=torch.finfo(amax.dtype).max)
        scale = torch.where((amax > 0) & amax.isfinite(), scale, 1.0)
        scale = scale / (2 * torch.frexp(scale).mantissa) if self.powers else scale
        if self.generator is None:
            return scale
        drawn = torch.rand(1, generator=self.generator, dtype=torch.float32, device="cpu")
        return scale * torch.exp2(-drawn).to(scale.device)

    def turned(self, x: Tensor) -> Tensor:
        """As for the transpose of x: blocks of columns x rows."""
        return replace(self, block=self.block and self.block[::-1])(x)


@dataclass(frozen=True)
class Formats:
    """What a recipe does to the operands of a product: its input, its weight, its output's gradient."""

    input: Quantizer
    weight: Quantizer
    grad: Quantizer

    def at_random(self, seed: int) -> Formats:
        """The same with random scales."""
        noise = {"generator": torch.Generator().manual_seed(seed)}
        return Formats(*(replace(q, **noise) for q in (self.input, self.weight, self.grad)))


def formats_of(recipe: Any) -> Formats:
    """The formats of a TE recipe object.

    Raises:
        ValueError: there is no emulation of this recipe.
    """
    kinds = ("delayed", "float8_current_scaling", "float8_block_scaling", "mxfp8")
    kind = next((kind for kind in kinds if getattr(recipe, kind)()), None)
    if kind is None or getattr(recipe, "backward_override", None) is not None:
        raise ValueError(
            f"verify() has no emulation of {type(recipe).__name__} as it is, a recipe of delayed, "
            "current, block or MXFP8 scaling is needed, its backward_override None"
        )
    blocks, powers = (None,) * 3, (kind == "mxfp8",) * 3
    if kind == "float8_block_scaling":
        sides = recipe.x_block_scaling_dim, recipe.w_block_scaling_dim, recipe.grad_block_scaling_dim
        blocks = tuple((128 if side == 2 else 1, 128) for side in sides)
    elif kind == "mxfp8":
        square = getattr(recipe, "enable_2d_quantization", False)  # which older TE does not have
        blocks = (1, 32), (32 if square else 1, 32), (1, 32)
    if kind in ("float8_current_scaling", "float8_block_scaling"):
        roles = recipe.fp8_quant_fwd_inp, recipe.fp8_quant_fwd_weight, recipe.fp8_quant_bwd_grad
        powers = tuple(role.power_2_scale for role in roles)
    grad = E5M2 if recipe.fp8_format.name == "HYBRID" else E4M3
    return Formats(*map(Quantizer, (E4M3, E4M3, grad), blocks, powers))


def product(x: Tensor, weight: Tensor, bias: Tensor | None, formats: Formats) -> Tensor:
    """y = q(x) q(W)^T + b, with dx = q(g) q(W), dW = q(g)^T q(x) and db the sum of g.

    x [..., in], weight [out, in], bias [out] -> [..., out] in the dtype of x; computed in fp32.
    """
    out = _Product.apply(x, weight, formats)
    out = out if bias is None else out + bias.float()
    return out.to(x.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, formats: Formats) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.formats = formats
        with torch.autocast(x.device.type, enabled=False):
            out = formats.input(_rows(x)) @ formats.weight(weight.float()).t()
        return out.reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, weight), formats = ctx.saved_tensors, ctx.formats
        rows = _rows(grad)
        with torch.autocast(x.device.type, enabled=False):
            dx = formats.grad(rows) @ formats.weight.turned(weight.float())
            dw = formats.grad.turned(rows).t() @ formats.input.turned(_rows(x))
        return dx.reshape(x.shape).to(x.dtype), dw.to(weight.dtype), None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).float()


def emulated(weights: Iterable[Tensor], formats: Formats) -> AbstractContextManager:
    """Let every product with one of these weights be computed as a recipe does it, ideally."""

    def multiply(
        parameter: Tensor,
        transposed: bool,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        compute: Callable[[], Tensor],
    ) -> Tensor:
        # what TE's kernels do not take runs in its own dtype in the converted model too
        if not {x.dtype, weight.dtype} <= dtypes_in_fp8(x) or x.numel() == 0:
            return compute()
        x, bias = as_autocast(x, bias)
        return product(x, exact(weight), bias, formats)

    return Products(weights, multiply)
