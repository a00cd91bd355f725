"""FP8 as well as it can be done: a model's products on operands that were quantised and dequantised.

What verify() measures an FP8 model against. Formats, scales and blocks are those of TE's recipes
(transformer_engine/common/recipe), read from the recipe object; TE itself is not needed. Ideal means:

    scales      come from the very tensor they scale, where delayed scaling has those of earlier steps;
    operands    are quantised once, from the tensor as it is, in blocks along the dimension summed over;
    sums        are fp32, and rounded once.

A linear that is joined with others is emulated by itself, with scales of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_transform.autocast import Precision, precisions
from te_transform.backends.limits import DTYPES
from te_transform.originals import fusions, sources
from te_transform.weights import Piece, exact

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class Quantiser:
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
        """x [rows, columns], fp32 -> the same, quantised and dequantised; what is beyond range saturates."""
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
        return scale * torch.exp2(-torch.rand(1, generator=self.generator)).to(scale.device)

    def turned(self, x: Tensor) -> Tensor:
        """As for the transpose of x: blocks of columns x rows."""
        return replace(self, block=self.block and self.block[::-1])(x)


@dataclass(frozen=True)
class Formats:
    """What a recipe does to the operands of a product: its input, its weight, its output's gradient."""

    input: Quantiser
    weight: Quantiser
    grad: Quantiser

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
    return Formats(*map(Quantiser, (E4M3, E4M3, grad), blocks, powers))


def product(x: Tensor, weight: Tensor, bias: Tensor | None, formats: Formats) -> Tensor:
    """y = q(x) q(W)^T + b, with dx = q(g) q(W), dW = q(g)^T q(x) and db the sum of g.

    x [..., in], weight [out, in], bias [out] -> [..., out] in the dtype of x; computed in fp32.
    """
    out = _Product.apply(x, weight, formats)
    out = out if bias is None else out + bias.float()
    return out.to(x.dtype)  # where replay.py sees it, which rounds results at random


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, formats: Formats) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.formats = formats
        out = formats.input(_rows(x)) @ formats.weight(weight.float()).t()
        return out.reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, weight), formats = ctx.saved_tensors, ctx.formats
        rows = _rows(grad)
        dx = formats.grad(rows) @ formats.weight.turned(weight.float())
        dw = formats.grad.turned(rows).t() @ formats.input.turned(_rows(x))
        return dx.reshape(x.shape).to(x.dtype), dw.to(weight.dtype), None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).float()


@contextlib.contextmanager
def emulated(model: nn.Module, converted: nn.Module, seed: int | None = None) -> Iterator[None]:
    """Let those linears of `model` that run in FP8 in `converted` multiply as its recipes do, ideally.

    Args:
        model: the original, or `converted` itself, run on its original modules (replay.only).
        converted: what te_transform.convert() returned; it is only read.
        seed: of random scales, for other errors of the same size; None takes the best scales.

    Raises:
        ValueError: there is no emulation of a recipe.
    """
    with contextlib.ExitStack() as stack:
        for path, precision in precisions(converted).items():
            root, formats = model.get_submodule(path), formats_of(precision.recipe)
            formats = formats if seed is None else formats.at_random(seed)
            for where, weight, bias in _pieces(converted.get_submodule(path), precision):
                module = root.get_submodule(where)
                stack.callback(_restore, module, {k: v for k, v in vars(module).items() if k == "forward"})
                vars(module)["forward"] = partial(_forward, module, module.forward, weight, bias, formats)
        yield


def _restore(module: nn.Module, own: dict[str, Any]) -> None:
    vars(module).pop("forward", None)
    vars(module).update(own)


def _pieces(converted: nn.Module, precision: Precision) -> Iterator[tuple[str, Piece, Piece | None]]:
    """The original weights, with their modules' paths and their biases, whose products run in FP8."""
    inside = set(precision.modules)
    for fusion in fusions(converted):
        for name in fusion.fused.weight_names if fusion.fused in inside else ():
            biases = fusion.layouts.get(name.replace("weight", "bias"))
            for number, (path, weight) in enumerate(sources(converted, fusion, name)):
                yield path, weight, biases.pieces[number] if biases else None


def _forward(
    module: nn.Module,
    own: Callable[..., Tensor],
    weight: Piece,
    bias: Piece | None,
    formats: Formats,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    x, matrix = next(iter((*args, *kwargs.values()))), _read(module, weight)
    # what TE's kernels do not take runs in its own dtype in the converted model too
    if x.dtype not in DTYPES or x.dtype != matrix.dtype or x.numel() == 0:
        return own(*args, **kwargs)
    return product(x, matrix, bias and _read(module, bias), formats)


def _read(module: nn.Module, piece: Piece) -> Tensor:
    return piece.stored(exact(getattr(module, piece.name.rpartition(".")[2])))
