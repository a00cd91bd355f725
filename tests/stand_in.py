"""A stand-in for Transformer Engine: the names that backends/te/ imports, plain PyTorch on the CPU behind
them.

Its modules read their parameters as TE's do, round to FP8 with scales of the same recipes, run their
backward once, add weights' gradients to main_grad, and keep quantized weights when they are told to.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import te_transform.backends
from te_transform.backends import limits, plain
from te_transform.graph import ops
from tests import (
    reference_experts,
    reference_kernels,  # noqa: F401  computes the operators of compiled graphs on the CPU
)

E4M3 = 448.0
FORMAT = SimpleNamespace(value=SimpleNamespace(max_fwd=E4M3, max_bwd=E4M3), name="E4M3")


@dataclass(frozen=True)
class MMParams:
    use_split_accumulator: bool = True


@dataclass
class Recipe:
    margin: int = 0
    reduce_amax: bool = True
    fp8_format = FORMAT


@dataclass
class DelayedScaling(Recipe):
    amax_history_len: int = 4


@dataclass
class Float8CurrentScaling(Recipe):
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()


class Float8BlockScaling(Recipe):
    pass


class MXFP8BlockScaling(Recipe):
    pass


class FP8GlobalStateManager:
    """The recipe that is on, how deep autocasts are, and the states that the outermost updates."""

    quantization_state = SimpleNamespace(
        autocast_depth=0,
        recipe=None,
        steps=0,
        global_amax_buffer={},
        global_amax_history_buffer={},
        global_scale_buffer={"all": []},  # of which the outermost autocast takes the whole states
        is_first_fp8_module=False,
    )

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.quantization_state.recipe is not None

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        return cls.quantization_state.recipe or DelayedScaling()

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        state = cls.quantization_state
        first, state.is_first_fp8_module = state.is_first_fp8_module, False
        return first

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, meta: dict[str, Any]) -> None:
        states = cls.quantization_state.global_scale_buffer["all"]
        for key in ("scaling_fwd", "scaling_bwd"):
            if meta[key] is not None and all(meta[key] is not state for state in states):
                states.append(meta[key])

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool) -> None:
        for state in cls.quantization_state.global_scale_buffer["all"]:
            if state.forward == forward:
                state.update()


class autocast:
    def __init__(self, enabled: bool = True, recipe: Recipe | None = None):
        self.recipe = recipe if enabled else None

    def __enter__(self) -> None:
        state = FP8GlobalStateManager.quantization_state
        self.before, state.recipe = state.recipe, self.recipe
        state.is_first_fp8_module |= state.autocast_depth == 0
        state.autocast_depth += 1

    def __exit__(self, *_: object) -> None:
        state = FP8GlobalStateManager.quantization_state
        state.recipe = self.before
        state.autocast_depth -= 1
        if self.recipe is not None and state.autocast_depth == 0:
            state.steps += 1
            if torch.is_grad_enabled():
                FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)


class Scales:
    """A state of delayed scaling, as TE's: row 0 of the history is the step that runs."""

    def __init__(self, count: int, forward: bool, length: int):
        self.scale, self.forward = torch.ones(count, dtype=torch.float32, device="cpu"), forward
        self.amax_history = torch.zeros(length, count, dtype=torch.float32, device="cpu")

    def rounded(self, x: Tensor, index: int) -> Tensor:
        self.amax_history[0, index] = torch.maximum(self.amax_history[0, index], x.detach().abs().amax())
        return rounded(x, self.scale[index])

    def update(self) -> None:
        amax = self.amax_history.amax(0)
        known = (amax > 0) & amax.isfinite()
        self.scale.copy_(torch.where(known, torch.full_like(amax, E4M3) / amax, self.scale))
        self.amax_history.copy_(self.amax_history.roll(-1, 0))
        self.amax_history[0] = 0


def rounded(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """To E4M3 and back, with the best scale if none is given."""
    wide = x.detach().float()
    scale = E4M3 / wide.abs().amax().clamp(min=1e-20) if scale is None else scale
    return ((wide * scale).clamp(-E4M3, E4M3).to(torch.float8_e4m3fn).float() / scale).to(x.dtype)


class Quantizer:
    """The base of quantizers of weights."""

    dtype = "E4M3"
    internal = True

    def copy(self) -> Quantizer:
        return Quantizer()

    def set_usage(self, rowwise: bool, columnwise: bool) -> None:
        assert (rowwise, columnwise) == (True, False)


class Float8Quantizer:
    """The quantizer of delayed scaling. No CPU code calls it."""


class Float8Tensor(Tensor):
    """Bytes in E4M3 and a scale, as a tensor of their values."""

    @staticmethod
    def __new__(
        cls, *, shape: Any, dtype: Any, data: Tensor, fp8_scale_inv: Tensor, fp8_dtype: Any, quantizer: Any
    ) -> Float8Tensor:
        assert (data.shape, data.dtype, fp8_scale_inv.shape) == (shape, torch.uint8, (1,))
        values = (data.view(torch.float8_e4m3fn).float() * fp8_scale_inv).to(dtype)
        return values.as_subclass(cls)

    def __init__(self, **_: Any): ...


class Base(nn.Module):
    """The common base of TE's modules."""

    quantized = 0  # how often weights were
    weight_names = ("weight",)

    def __init__(
        self, *sizes: int, bias: bool = True, params_dtype: torch.dtype, device: str, **options: Any
    ):
        super().__init__()
        assert device == "meta"
        self.sizes, self.given = (
            sizes,
            {"bias": bias, "params_dtype": params_dtype, "device": device, **options},
        )
        self.use_bias, self.dtype, self.options = bias, params_dtype, options
        self.fuse_wgrad_accumulation, self.fp8, self.fp8_meta, self._fp8_workspaces = False, False, {}, {}
        for name in self.names:
            setattr(self, name, nn.Parameter(torch.empty(0, device="meta")))

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        recipe = FP8GlobalStateManager.get_fp8_recipe()
        self.fp8 = True
        if type(self.fp8_meta.get("recipe")) is type(recipe):
            return
        self.fp8_meta.update(recipe=recipe, scaling_fwd=None, scaling_bwd=None)
        if isinstance(recipe, DelayedScaling):
            length = recipe.amax_history_len
            fwd = Scales(3 * num_gemms, forward=True, length=length)
            bwd = Scales(2 * num_gemms, forward=False, length=length)
            self.fp8_meta.update(scaling_fwd=fwd, scaling_bwd=bwd)
            FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(self.fp8_meta)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        tensors = [getattr(self, name) for name in self.names]
        cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        if self._parameters or (cast is None and {t.dtype for t in tensors if t is not None} != {x.dtype}):
            raise TypeError("Data types for parameters must match")
        in_fp8 = FP8GlobalStateManager.is_fp8_enabled()
        if in_fp8:
            self.init_fp8_metadata(num_gemms=len(self.weight_names))
            assert x.shape[:-1].numel() % 16 == 0, "FP8 kernels take multiples of 16 rows"
        self.fp8 = in_fp8
        keeps = is_first_microbatch is False

        def run(x: Tensor, *tensors: Tensor | None) -> Tensor:
            products = iter(range(len(self.weight_names)))

            def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
                if not in_fp8:
                    return F.linear(x, weight.to(x.dtype), bias)
                return Product.apply(self, next(products), keeps, x, weight, bias)

            # autocast's dtype is that of all but the weights, a norm's input and scale too
            own = [(n in self.weight_names, t) for n, t in zip(self.names, tensors, strict=True)]
            given = [t if t is None or is_weight else t.to(cast or t.dtype) for is_weight, t in own]
            with torch.autocast("cpu", enabled=False):
                return self.op().plain(product, x.to(cast or x.dtype), *given)

        if not torch.is_grad_enabled():
            return run(x, *tensors)
        adds = self.fuse_wgrad_accumulation
        trained = any(t is not None and t.requires_grad for t in (x, *tensors))
        first = in_fp8 and trained and FP8GlobalStateManager.is_first_fp8_module()
        state = self.fp8_meta.get("scaling_fwd") if in_fp8 else None
        weights = [n in self.weight_names for n in self.names]
        return Run.apply(partial(run_again, state, run), run, adds, first, weights, x, *tensors)

    def quantize(self, index: int, x: Tensor) -> Tensor:
        state = self.fp8_meta["scaling_fwd"]
        return rounded(x) if state is None else state.rounded(x, index)

    def _get_weight_quantizers(self) -> list[Quantizer | None]:
        return [Quantizer() if self.fp8 else None for _ in self.weight_names]

    def weight_in_fp8(self, number: int, weight: Tensor, keeps: bool) -> Tensor:
        if isinstance(weight, Float8Tensor):
            assert self.primary_weights_in_fp8
            return weight.as_subclass(Tensor)
        if keeps and number in self._fp8_workspaces:
            return self._fp8_workspaces[number]
        Base.quantized += 1
        held = self.quantize(3 * number + 1, weight)
        if keeps:
            self._fp8_workspaces[number] = held
        return held


class Product(torch.autograd.Function):
    """A product of operands in FP8, whose backward is one too."""

    @staticmethod
    def forward(
        ctx: Any, module: Base, number: int, keeps: bool, x: Tensor, weight: Tensor, bias: Any
    ) -> Tensor:
        operands = module.quantize(3 * number, x), module.weight_in_fp8(number, weight, keeps).to(x.dtype)
        ctx.module, ctx.number, ctx.operands, ctx.bias = module, number, operands, bias is not None
        return F.linear(*operands, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        x, weight = ctx.operands
        state = ctx.module.fp8_meta["scaling_bwd"]
        held = rounded(grad) if state is None else state.rounded(grad, 2 * ctx.number)
        dw = held.flatten(0, -2).t() @ x.flatten(0, -2)
        db = grad.flatten(0, -2).sum(0) if ctx.bias else None
        return None, None, None, held @ weight, dw, db


def run_again(state: Scales | None, run: Callable) -> Callable[..., Tensor]:
    """What computes a call once more as it was: by its own scales, whatever became of them, and noting
    nothing."""
    if state is None:
        return run
    then = state.scale.clone()

    def again(*tensors: Tensor | None) -> Tensor:
        now = state.scale.clone(), state.amax_history.clone()
        state.scale.copy_(then)
        out = run(*tensors)
        state.scale.copy_(now[0])
        state.amax_history.copy_(now[1])
        return out

    return again


class Run(torch.autograd.Function):
    """A module's call, whose backward runs once, and is not recorded whatever the gradient mode is."""

    @staticmethod
    def forward(
        ctx: Any, again: Callable, run: Callable, adds: bool, first: bool, weights: list[bool],
        *tensors: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.run, ctx.adds, ctx.weights, ctx.tensors, ctx.ran = (
            again(),
            adds,
            [False, *weights],
            tensors,
            False,
        )
        ctx.first = first
        with torch.no_grad():
            out = run(*tensors)
        return tree_map(lambda out: out.view(out.shape), out)  # as TE's, which multiplies rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        if ctx.ran:
            raise AttributeError("ctx must have .tensor_objects to restore saved tensors")
        ctx.ran = True
        with torch.enable_grad():
            own = [None if t is None else t.detach().requires_grad_(t.requires_grad) for t in ctx.tensors]
            wanted = [t for t in own if t is not None and t.requires_grad]
            outs = ctx.run(*own)
            outs = outs if isinstance(outs, tuple) else (outs,)
            # the norm that a module returns has no gradient if its input and its scale are frozen
            trained = [(out, g) for out, g in zip(outs, grads, strict=True) if out.requires_grad]
            outs, grads = zip(*trained, strict=True)
            found = iter(torch.autograd.grad(outs, wanted, grads))
        grads = [next(found) if t is not None and t.requires_grad else None for t in own]
        for place, (weight, is_weight) in enumerate(zip(ctx.tensors, ctx.weights, strict=True)):
            if ctx.adds and is_weight and grads[place] is not None:
                weight.main_grad += grads[place]
                grads[place] = None
        if ctx.first:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return *(None,) * 5, *(None if g is None else g.detach() for g in grads)


def _of_op(options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a module's constructor, by our names."""
    return {"returns_norm" if k == "return_layernorm_output" else k: v for k, v in options.items()}


def _with_limits(activation: str, **limits: float) -> str:
    """Our name of an activation with TE's parameters."""
    assert bool(limits) == (activation == plain.CLAMPED)
    return f"{activation}{tuple(plain.Clamp(**limits))}" if limits else activation


class Linear(Base):
    names = ("weight", "bias")

    def op(self) -> plain.Linear:
        return plain.Linear()


class LayerNormLinear(Base):
    names = ("layer_norm_weight", "layer_norm_bias", "weight", "bias")

    def op(self) -> plain.LayerNormLinear:
        return plain.LayerNormLinear(**_of_op(self.options))


class LayerNormMLP(Base):
    """Its activation_params are 'limit', 'alpha', and 'glu_linear_offset', of 'clamped_swiglu'."""

    names = ("layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")
    weight_names = ("fc1_weight", "fc2_weight")

    def op(self) -> plain.LayerNormMLP:
        options = _of_op(self.options)
        name = _with_limits(str(options["activation"]), **options.pop("activation_params", {}))
        gated = "first half" if plain.is_gated(name) else "no"
        return plain.LayerNormMLP(**{**options, "activation": name}, gated=gated)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        if torch.is_grad_enabled() and not (x.requires_grad or self.layer_norm_weight.requires_grad):
            assert self.layer_norm_bias is not None, "'NoneType' object has no attribute 'requires_grad'"
        return super().forward(x, is_first_microbatch)


def apply_rotary_pos_emb(
    x: Tensor, angles: Tensor, tensor_format: str, interleaved: bool, fused: bool
) -> Tensor:
    """x [batch, length, heads, width], angles [length, 1, 1, width]."""
    assert (tensor_format, fused) == ("bshd", True)
    assert angles.shape == (x.shape[1], 1, 1, x.shape[3])
    columns = angles.transpose(0, 1)
    return ops.rope(x, columns.cos(), columns.sin(), True, interleaved)


def fused_attn_fwd(
    is_training: bool,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fake_dtype: torch.dtype,
    fused_attention_backend: str,
    o_format: str,
    **how: Any,
) -> tuple[Tensor, list[Tensor]]:
    """Sequence by sequence, as TE's signature describes it; zero where no sequence is."""
    how["o_format"] = o_format
    _check_layout(max_seqlen_q, max_seqlen_kv, (q, k, v), fake_dtype, fused_attention_backend, **how)
    out, sums = _attended(cu_seqlens_q, cu_seqlens_kv, q, k, v, **how)
    return out, [sums, q.new_zeros(1)] if is_training else []


def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    d_o: Tensor,
    fake_dtype: torch.dtype,
    aux_ctx_tensors: list[Tensor],
    fused_attention_backend: str,
    do_format: str,
    dqkv_layout: str,
    deterministic: bool,
    **how: Any,
) -> tuple[Tensor, ...]:
    assert (do_format, dqkv_layout, len(aux_ctx_tensors)) == (how["o_format"], how["qkv_layout"], 2)
    parts = q, k, v, o, d_o
    _check_layout(max_seqlen_q, max_seqlen_kv, parts, fake_dtype, fused_attention_backend, **how)
    sums, _ = aux_ctx_tensors
    return *_attended_backward(cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, sums, **how), None


def _check_layout(
    longest_q: int, longest_kv: int, parts: tuple[Tensor, ...], dtype: torch.dtype, kernel: str, **how: Any
) -> None:
    form = how["o_format"]
    assert kernel == "a kernel"
    assert how["qkv_layout"] == f"{form}_{form}_{form}"
    assert all(part.is_contiguous() and part.dtype is dtype for part in parts)  # it reads no strides
    assert all(part.dim() == (3 if form == "thd" else 4) for part in parts)
    if form == "bshd":
        lengths = parts[0].shape[1], parts[1].shape[1]
        assert (longest_q, longest_kv) == lengths
        # told nothing of lengths that are no multiple, cuDNN's gradients are wrong in CUDA graphs
        assert how["attn_mask_type"].startswith("padding") or not any(length % 128 for length in lengths)
    else:
        assert longest_q % 128 == longest_kv % 128 == 0


def _sequences(
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    q: Tensor,
    k: Tensor,
    attn_scale: float,
    qkv_layout: str,
    o_format: str,
    attn_mask_type: str,
    window_size: tuple[int, int],
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
) -> Iterator[tuple[Any, Any, Tensor]]:
    """The places of each sequence's queries and of its keys, and its scores [heads, queries, keys]."""
    before, after = window_size
    # top left, as for all but the kinds of masks that are named after the bottom right
    assert window_size in ((-1, -1), (-1, 0)) or min(window_size) >= 0
    assert attn_mask_type in ("no_mask", "causal", "padding", "padding_causal")
    assert attn_mask_type.startswith("padding") or o_format == "bshd"
    counts = zip(cu_seqlens_q.diff().tolist(), cu_seqlens_kv.diff().tolist(), strict=True)
    for number, (count_q, count_kv) in enumerate(counts):
        if o_format == "thd":
            first_q, first_kv = (int(at[number]) for at in (cu_seqlens_q_padded, cu_seqlens_kv_padded))
            queries, keys = slice(first_q, first_q + count_q), slice(first_kv, first_kv + count_kv)
        else:
            queries, keys = (number, slice(count_q)), (number, slice(count_kv))
        if not attn_mask_type.startswith("padding"):
            assert (count_q, count_kv) == (len(q[number]), len(k[number]))
        row, column = (torch.arange(count, device=q.device) for count in (count_q, count_kv))
        row, hides = row.unsqueeze(-1), torch.zeros(count_q, count_kv, dtype=torch.bool, device=q.device)
        if attn_mask_type.endswith("causal"):
            hides = hides | (column > row)
        if before >= 0:
            hides = hides | (column < row - before)
        if after >= 0:
            hides = hides | (column > row + after)
        scores = _of_heads(q[queries]) @ _of_heads(k[keys], q.shape[-2]).mT * attn_scale
        yield queries, keys, scores.masked_fill(hides, -torch.inf)


def _of_heads(x: Tensor, heads: int | None = None) -> Tensor:
    """[length, heads or groups, width] -> [heads, length, width] in fp32."""
    return x.float().transpose(0, 1).repeat_interleave((heads or x.shape[1]) // x.shape[1], 0)


def _attended(
    cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, q: Tensor, k: Tensor, v: Tensor, **how: Any
) -> tuple[Tensor, Tensor]:
    """The attention, and the logarithms of its sums: [batch, heads, length, 1], packed [rows, heads, 1]."""
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    sums = q.new_zeros(*q.shape[:-1], 1, dtype=torch.float32)
    for queries, keys, scores in _sequences(cu_seqlens_q, cu_seqlens_kv, q, k, **how):
        weights = torch.ops.aten._safe_softmax(scores, -1)
        out[queries] = (weights @ _of_heads(v[keys], q.shape[-2])).transpose(0, 1).to(q.dtype)
        sums[queries] = scores.logsumexp(-1, keepdim=True).transpose(0, 1)
    return out, sums if how["o_format"] == "thd" else sums.transpose(1, 2).contiguous()


def _attended_backward(
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    d_o: Tensor,
    sums: Tensor,
    **how: Any,
) -> tuple[Tensor, ...]:
    """From the output and the sums that it is given, as cuDNN's kernels compute it."""
    assert sums.is_contiguous()
    sums = sums if how["o_format"] == "thd" else sums.transpose(1, 2)
    grads, heads = tuple(torch.zeros_like(part) for part in (q, k, v)), q.shape[-2]
    for queries, keys, scores in _sequences(cu_seqlens_q, cu_seqlens_kv, q, k, **how):
        given, own = _of_heads(d_o[queries]), _of_heads(o[queries])
        weights = torch.where(scores.isneginf(), 0.0, (scores - _of_heads(sums[queries])).exp())
        inner = given @ _of_heads(v[keys], heads).mT - (given * own).sum(-1, keepdim=True)
        of_scores = weights * inner * how["attn_scale"]
        found = (
            of_scores @ _of_heads(k[keys], heads),
            of_scores.mT @ _of_heads(q[queries]),
            weights.mT @ given,
        )
        for grad, part, place in zip(grads, found, (queries, keys, keys), strict=True):
            groups = part.unflatten(0, (grad.shape[-2], -1)).sum(1)
            grad[place] = groups.transpose(0, 1).to(grad.dtype)
    return grads


def parallel_cross_entropy(logits: Tensor, targets: Tensor, ignore_idx: int) -> Tensor:
    return CrossEntropy.apply(logits, targets, ignore_idx)


class CrossEntropy(torch.autograd.Function):
    """The stand-in for TE's cross entropy, whose backward overwrites the saved logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_idx: int) -> Tensor:
        assert logits.dim() == 3
        ctx.kept = logits.detach().float().clone(), targets
        flat = logits.float().flatten(0, 1)
        loss = F.cross_entropy(flat, targets.flatten(), ignore_index=ignore_idx, reduction="none")
        ctx.counted, ctx.dtype = targets != ignore_idx, logits.dtype
        return loss.view_as(targets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        (logits, targets), ctx.kept = ctx.kept, None
        hot = F.one_hot(targets.clamp(min=0), logits.shape[-1])
        found = (logits.softmax(-1) - hot) * (grad * ctx.counted).unsqueeze(-1)
        return found.to(ctx.dtype), None, None


def _act_func(activation: str, recipe: Any = None) -> tuple[Any, ...]:
    def forward(x: Tensor, quantizer: None, **limits: float) -> Tensor:
        return plain.activated(_with_limits(activation, **limits), x)

    def backward(grad: Tensor, x: Tensor, quantizer: None, **limits: float) -> Tensor:
        with torch.enable_grad():
            own = x.detach().requires_grad_()
            return torch.autograd.grad(forward(own, None, **limits), own, grad)[0]

    return forward, backward, None


def _available(return_reason: bool = False) -> Any:
    return (True, "") if return_reason else True


def modules() -> dict[str, ModuleType]:
    """The package by the names that its parts are imported by."""
    parts: dict[str, dict[str, Any]] = {
        "": {},
        ".common": {"recipe": None},
        ".common.recipe": {
            kind.__name__: kind
            for kind in (
                Recipe,
                MMParams,
                DelayedScaling,
                Float8CurrentScaling,
                Float8BlockScaling,
                MXFP8BlockScaling,
            )
        },
        ".pytorch": {
            "Linear": Linear,
            "LayerNormLinear": LayerNormLinear,
            "LayerNormMLP": LayerNormMLP,
            "autocast": autocast,
            "parallel_cross_entropy": parallel_cross_entropy,
            "is_fp8_available": _available,
            "is_fp8_block_scaling_available": _available,
            "is_mxfp8_available": _available,
        },
        ".pytorch.attention": {},
        ".pytorch.attention.rope": {"apply_rotary_pos_emb": apply_rotary_pos_emb},
        ".pytorch.constants": {"TE_DType": {}},
        ".pytorch.cpp_extensions": {},
        ".pytorch.cpp_extensions.fused_attn": {
            "FusedAttnBackend": {"F16_arbitrary_seqlen": "a kernel"},
            "fused_attn_bwd": fused_attn_bwd,
            "fused_attn_fwd": fused_attn_fwd,
        },
        ".pytorch.module": {},
        ".pytorch.module.layernorm_mlp": {"_act_func": _act_func},
        ".pytorch.tensor": {},
        ".pytorch.tensor.float8_tensor": {"Float8Quantizer": Float8Quantizer, "Float8Tensor": Float8Tensor},
        ".pytorch.quantization": {"FP8GlobalStateManager": FP8GlobalStateManager},
    }
    made = {}
    for name, held in parts.items():
        made[f"transformer_engine{name}"] = module = ModuleType(f"transformer_engine{name}")
        vars(module).update(held)
        parent, _, leaf = f"transformer_engine{name}".rpartition(".")
        if parent:
            setattr(made[parent], leaf, module)
    return made


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the next import of backends/te/ run it again."""
    for name in _names():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(te_transform.backends, "te", raising=False)


def _names() -> list[str]:
    return [name for name in sys.modules if f"{name}.".startswith("te_transform.backends.te.")]


def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """te_transform.backends.te, imported on the stand-in; kernels run on the CPU, at any size."""
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    forget(monkeypatch)
    imported = importlib.import_module("te_transform.backends.te")
    for name in _names():
        monkeypatch.setitem(sys.modules, name, sys.modules.pop(name))  # gone again after the test
    monkeypatch.setitem(sys.modules, "te_transform.experts.triton_kernels", reference_experts)
    monkeypatch.setattr(te_transform.backends, "te", imported)
    monkeypatch.setattr(te_transform.backends, "why_missing", lambda: None)
    monkeypatch.setattr(limits, "DEVICE", "cpu")
    state = FP8GlobalStateManager.quantization_state
    state.global_scale_buffer, state.steps = {"all": []}, 0
    Base.quantized = 0
    return imported
