"""Emulate ideal FP8: matrix products on operands that were quantized and dequantized.

verify() compares an FP8 model with this emulation. Formats, scales and blocks are read from the TE recipe
object (transformer_engine/common/recipe); TE itself is not needed. Ideal means:

    scales      are computed from the tensor they scale; delayed scaling uses those of earlier steps
    operands    are quantized once, from the original tensor, in blocks along the summed dimension
    sums        are fp32, and rounded once

A linear that is joined with others is emulated separately, with its own scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from te_transform.backends.fp8.fp8_only import exact
from te_transform.backends.limits import as_autocast, dtypes_in_fp8
from te_transform.execution.products import Products
from te_transform.graph.keywords import ArgumentError

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class Quantizer:
    """A quantizer to `dtype`, with one scale per `block` of rows x columns, or per tensor if `block` is None.

    The scale is the largest that keeps the block's amax in range; with `powers`, the largest such power of
    two. With a `generator`, the scale is smaller by a random factor of at most 2. The errors then differ but
    stay as large, as for a tensor that shares its scale with others.
    """

    dtype: torch.dtype
    block: tuple[int, int] | None = None
    powers: bool = False
    generator: torch.Generator | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Quantize and dequantize x [rows, columns] in fp32; values out of range saturate."""
        rows, columns = self.block or x.shape
        padded = F.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))  # zeros do not change amax
        blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        limit = torch.finfo(self.dtype).max
        scale = self._scale(blocks.abs().amax((1, 3), keepdim=True), limit)
        quantized = (blocks * scale).clamp(-limit, limit).to(self.dtype)
        return (quantized.to(x.dtype) / scale).flatten(2, 3).flatten(0, 1)[: x.shape[0], : x.shape[1]]

    def _scale(self, amax: Tensor, limit: float) -> Tensor:
        scale = (limit / amax).clamp(max=torch.finfo(amax.dtype).max)
        scale = torch.where((amax > 0) & amax.isfinite(), scale, 1.0)
        scale = scale / (2 * torch.frexp(scale).mantissa) if self.powers else scale
        if self.generator is None:
            return scale
        drawn = torch.rand(1, generator=self.generator, dtype=torch.float32, device="cpu")
        return scale * torch.exp2(-drawn).to(scale.device)

    def turned(self, x: Tensor) -> Tensor:
        """Quantize x like its transpose, in blocks of columns x rows."""
        return replace(self, block=self.block and self.block[::-1])(x)


@dataclass(frozen=True)
class Formats:
    """The quantizers of a recipe for the operands of a product: input, weight and output gradient."""

    input: Quantizer
    weight: Quantizer
    grad: Quantizer

    def at_random(self, seed: int) -> Formats:
        """Return the same formats with random scales."""
        noise = {"generator": torch.Generator().manual_seed(seed)}
        return Formats(*(replace(q, **noise) for q in (self.input, self.weight, self.grad)))


def formats_of(recipe: Any) -> Formats:
    """Return the formats of a TE recipe object.

    Raises:
        ValueError: this recipe cannot be emulated.
    """
    kinds = ("delayed", "float8_current_scaling", "float8_block_scaling", "mxfp8")
    kind = next((kind for kind in kinds if getattr(recipe, kind)()), None)
    if kind is None or getattr(recipe, "backward_override", None) is not None:
        raise ArgumentError(
            "expected a recipe of delayed, current, block or MXFP8 scaling with backward_override=None for "
            f"verify(), got {type(recipe).__name__}, which it cannot emulate"
        )
    blocks, powers = (None,) * 3, (kind == "mxfp8",) * 3
    if kind == "float8_block_scaling":
        sides = recipe.x_block_scaling_dim, recipe.w_block_scaling_dim, recipe.grad_block_scaling_dim
        blocks = tuple((128 if side == 2 else 1, 128) for side in sides)
    elif kind == "mxfp8":
        square = getattr(recipe, "enable_2d_quantization", False)  # older TE lacks it
        blocks = (1, 32), (32 if square else 1, 32), (1, 32)
    if kind in ("float8_current_scaling", "float8_block_scaling"):
        roles = recipe.fp8_quant_fwd_inp, recipe.fp8_quant_fwd_weight, recipe.fp8_quant_bwd_grad
        powers = tuple(role.power_2_scale for role in roles)
    grad = E5M2 if recipe.fp8_format.name == "HYBRID" else E4M3
    return Formats(*map(Quantizer, (E4M3, E4M3, grad), blocks, powers))


def emulated_product(x: Tensor, weight: Tensor, bias: Tensor | None, formats: Formats) -> Tensor:
    """Compute y = q(x) q(W)^T + b, with dx = q(g) q(W), dW = q(g)^T q(x) and db = sum(g).

    x [..., in], weight [out, in], bias [out] -> [..., out] in the dtype of x; computed in fp32.
    """
    out = _EmulatedProduct.apply(x, weight, formats)
    out = out if bias is None else out + bias.float()
    return out.to(x.dtype)


class _EmulatedProduct(torch.autograd.Function):
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
    """Emulate every product with one of these weights in ideal FP8."""

    def multiply(
        parameter: Tensor,
        transposed: bool,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        compute: Callable[[], Tensor],
    ) -> Tensor:
        # dtypes that TE's kernels do not support run unquantized in the converted model too
        if not {x.dtype, weight.dtype} <= dtypes_in_fp8(x) or x.numel() == 0:
            return compute()
        x, bias = as_autocast(x, bias)
        return emulated_product(x, exact(weight), bias, formats)

    return Products(weights, multiply)
