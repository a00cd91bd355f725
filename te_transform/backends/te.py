"""The fused modules of NVIDIA Transformer Engine: the only file that imports it.

Each is TE's own class, built on meta. Where TE has no kernel for a call (another device, float32, an
attention mask), or none that is faster (few tokens), the same weights run in plain PyTorch,
backends/torch.py, and `plain_calls` counts why.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch  # before TE, which loads libraries that come with it
import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb
from transformer_engine.pytorch.module import layernorm_mlp

from te_transform.autocast import Amax, Kept
from te_transform.backends import torch as plain
from te_transform.backends.cudnn import DotProductAttention as DotProductAttention  # which rules find here
from te_transform.backends.limits import too_small, without_kernel
from te_transform.deferred import saving_hooks
from te_transform.slots import traced
from te_transform.weights import is_quantised

try:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as _State
except ImportError:  # TE before 2.8
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager as _State

NAME = "te"
PLAIN = False
HOLDS_FP8 = hasattr(te.Linear, "_get_weight_quantizers")  # whether quantised() runs with this TE
ACTIVATIONS, GATED_ACTIVATIONS = plain.ACTIVATIONS, plain.GATED_ACTIVATIONS

_RECIPES = {
    "fp8-delayed": recipes.DelayedScaling,
    "fp8-current": recipes.Float8CurrentScaling,
    "fp8-block": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
}
_AVAILABLE = {
    recipes.Float8BlockScaling: "is_fp8_block_scaling_available",
    recipes.MXFP8BlockScaling: "is_mxfp8_available",
}


def recipe_of(asked: Any) -> Any:
    """TE's recipe of this name, or the recipe object itself.

    Raises:
        ValueError: it is neither, or this GPU has no kernels for it; the message says what is missing.
    """
    if isinstance(asked, str):
        asked = _RECIPES[asked]()
    if not isinstance(asked, recipes.Recipe):
        raise ValueError(f"a {type(asked).__name__} is no TE recipe, one of {', '.join(_RECIPES)} is")
    available = getattr(te, _AVAILABLE.get(type(asked), "is_fp8_available"))
    runs, why = available(return_reason=True)
    if not runs:
        raise ValueError(f"{type(asked).__name__} does not run on this GPU: {why}")
    return asked


def is_delayed(recipe: Any) -> bool:
    """Whether the recipe scales by what was seen in earlier steps."""
    return isinstance(recipe, recipes.DelayedScaling)


def multiple(recipe: Any) -> int:
    """What rows and columns of a product have to be a multiple of."""
    return 32 if isinstance(recipe, recipes.MXFP8BlockScaling) else 16


def autocast(recipe: Any, enabled: bool = True) -> contextlib.AbstractContextManager:
    """Run TE's modules in the recipe's precision."""
    if hasattr(te, "autocast"):
        return te.autocast(enabled=enabled, recipe=recipe)
    return te.fp8_autocast(enabled=enabled, fp8_recipe=recipe)  # TE before 2.8


class _Fused(nn.Module):
    """What TE's modules do here beyond TE: no product that TE refuses, and nothing lost where it has none."""

    in_torch: type[nn.Module]  # the same module of backends/torch.py
    kept: Kept | None = None  # of the recipe that the model was converted to
    kept_out = False  # of that recipe
    any_size = False  # whether calls that gain nothing from FP8 run in it too
    was_in_fp8 = False  # whether its last call was
    scales: Tensor | None = None  # of delayed scaling, in the last call that may be made again
    weight_names = ("weight",)
    normalised = False

    def __init__(self, *sizes: int, **options: Any):
        super().__init__(*sizes, **options)
        self.plain_calls: Counter[str] = Counter()
        for name in ("bias", "fc1_bias", "fc2_bias"):
            if name not in self._parameters and hasattr(self, name):
                setattr(self, name, None)  # TE has an empty tensor there, which it does not read

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        if traced():
            return self.in_torch.forward(self, x)
        enabled = _State.is_fp8_enabled()
        # torch.utils.checkpoint runs a forward again from within the backward, where no autocast is on
        again = self.was_in_fp8 and not enabled and torch._C._current_graph_task_id() != -1
        in_fp8 = again or (enabled and not self.kept_out)
        self.was_in_fp8 = in_fp8
        if why := self._why_plain(x, in_fp8):
            self.plain_calls[why] += 1
            return self.in_torch.forward(self, x)
        if again:
            with self._as_before():
                return self._in_fp8(x)
        if in_fp8:
            return self._in_fp8(x)
        with autocast(None, enabled=False) if enabled else contextlib.nullcontext():
            return super().forward(x)

    def why_plain(self, x: Tensor) -> str | None:
        """Why a call with this input runs in plain PyTorch, or None."""
        return self._why_plain(x, _State.is_fp8_enabled() and not self.kept_out)

    def _why_plain(self, x: Tensor, in_fp8: bool) -> str | None:
        weight = self._weight()
        if why := without_kernel(x, weight):
            return why
        # plain calls would have to dequantise weights held in FP8 alone, and know nothing of main_grad
        if (in_fp8 and self.any_size) or is_quantised(weight) or self.fuse_wgrad_accumulation:
            return None
        return too_small(x.shape[:-1].numel(), min(weight.shape), in_fp8)

    def _in_fp8(self, x: Tensor) -> Tensor:
        if saving_hooks() or (self.training and not torch.is_grad_enabled()):
            self._note_scales()  # for a checkpoint, from which this call will be made again
        if self.primary_weights_in_fp8:
            self._give_quantisers()
        # never True, which would also have this call's gradient overwrite those before it
        again = False if self.kept is not None and self.kept.may_be_used() else None
        rows = x.shape[:-1].numel()
        missing = -rows % multiple(_State.get_fp8_recipe())
        if not missing:
            return super().forward(x, is_first_microbatch=again)
        # the last row once more, and again: no number in the product is larger for it, its gradient is zero
        flat = x.reshape(rows, -1)
        padded = torch.cat([flat, flat[-1:].expand(missing, -1)])
        out = super().forward(padded, is_first_microbatch=again)
        return out[:rows].reshape(*x.shape[:-1], -1)

    def _give_quantisers(self) -> None:
        """Weights that are held in FP8 alone lose their quantisers in copies."""
        for name in self.weight_names:
            weight = getattr(self, name)
            if is_quantised(weight) and weight._quantizer is None:
                weight._quantizer = _weight_quantiser(self, name)

    def _note_scales(self) -> None:
        state = self.fp8_meta.get("scaling_fwd")
        if hasattr(state, "amax_history"):
            self.scales = state.scale.clone()

    @contextlib.contextmanager
    def _as_before(self) -> Iterator[None]:
        """In the recipe, with the scales that this step's forward had, and as a part of that step."""
        recipe, state = self.fp8_meta["recipe"], self.fp8_meta.get("scaling_fwd")
        now = None if self.scales is None else state.scale.clone()
        try:
            if now is not None:
                state.scale.copy_(self.scales)
            with _no_new_step(), autocast(recipe):
                yield
        finally:
            if now is not None:
                state.scale.copy_(now)

    def _weight(self) -> Tensor:
        return getattr(self, self.weight_names[0])

    def forget_weights(self) -> None:
        """Free the quantised weights that were kept; the next call makes them anew."""
        self._fp8_workspaces.clear()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # a quantiser's scale is a view of these states, which pickles make a tensor of its own
        for direction in ("scaling_fwd", "scaling_bwd"):
            if hasattr(self.fp8_meta.get(direction), "amax_history"):
                self.quantizers[direction] = self.fp8_meta[direction].make_quantizers()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state["param_init_meta"] = {}  # closures, which cannot be pickled, for parameters that nobody resets
        # where TE keeps this module's scales among those it updates: a copy has to get a place of its own
        state["fp8_meta"] = {k: v for k, v in self.fp8_meta.items() if k != _State.get_buffer_info()}
        return state


class Linear(_Fused, te.Linear):
    """y = x W^T + b; weight [out, in]."""

    in_torch = plain.Linear
    extra_repr = in_torch.extra_repr

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        quantised = self.kept is not None or (_State.is_fp8_enabled() and not self.kept_out)
        if self.fuse_wgrad_accumulation or quantised:
            return super().forward(x)
        return self.in_torch.forward(self, x)  # one product in its own dtype: nothing is faster


class LayerNormLinear(_Fused, te.LayerNormLinear):
    """A linear of a LayerNorm or RMSNorm; layer_norm_weight [in], layer_norm_bias [in], weight, bias."""

    in_torch = plain.LayerNormLinear
    normalise, norm_repr, extra_repr = in_torch.normalise, in_torch.norm_repr, in_torch.extra_repr


class LayerNormMLP(_Fused, te.LayerNormMLP):
    """fc2(activation(fc1(norm(x)))); fc1_weight [ffn, hidden], twice the rows where the activation is
    gated."""

    in_torch = plain.LayerNormMLP
    normalise, norm_repr, extra_repr = in_torch.normalise, in_torch.norm_repr, in_torch.extra_repr
    weight_names = ("fc1_weight", "fc2_weight")

    def __init__(self, hidden_size: int, ffn_hidden_size: int, **options: Any):
        super().__init__(hidden_size, ffn_hidden_size, **options)
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> [..., hidden]."""
        # where neither needs a gradient, TE goes on to ask a LayerNorm's bias, which an RMSNorm has not
        needed = x.requires_grad or self.layer_norm_weight.requires_grad
        if torch.is_grad_enabled() and not needed and not traced():
            own = (*self.weight_names, "layer_norm_bias", "fc1_bias", "fc2_bias")
            if not any(p is not None and p.requires_grad for p in (getattr(self, name) for name in own)):
                with torch.no_grad():
                    return super().forward(x)
            x = x.detach().requires_grad_()
        return super().forward(x)

    def _in_fp8(self, x: Tensor) -> Tensor:
        name = self.activation
        if not self.use_bias and name in GATED_ACTIVATIONS.values():  # the kernel has no gradient for a bias
            self.activation = _CastInBackward(name)
        try:
            return super()._in_fp8(x)
        finally:
            self.activation = name  # by which compilers tell activations apart


class _CastInBackward(str):
    """The name of a gated activation whose gradient is cast to FP8 in the kernel that computes it."""


def _act_func(activation: str, *recipe: Any) -> tuple[Any, ...]:
    """TE's, asked in each forward and backward: an activation, its gradient, and that with its cast.

    For gated activations in delayed scaling TE has no third, and casts in another kernel; but the kernel of
    the gradient takes a quantiser. [8192, 2 x 14336] on an H100: 0.48 ms instead of 0.74, no copy in bf16.
    """
    forward, backward, *with_cast = _TES_ACT_FUNC(activation, *recipe)
    ours = isinstance(activation, _CastInBackward) and any(map(is_delayed, recipe))
    if ours and with_cast == [None]:
        return forward, backward, lambda grad, x, quantiser: (None, backward(grad, x, quantiser))
    return forward, backward, *with_cast


_TES_ACT_FUNC = layernorm_mlp._act_func
layernorm_mlp._act_func = _act_func  # all others get TE's own from it


def rotate(query: Tensor, key: Tensor, angles: Tensor) -> tuple[Tensor, Tensor] | None:
    """Both turned by their positions' angles, in one kernel each; None where TE has no kernel for them.

    query and key [batch, heads, length, width]; angles [1, length, width], fp32, the same for the whole
    batch.
    """
    if traced() or without_kernel(query, key) or query.dim() != 4 or angles.dim() != 3:
        return None
    batch, heads, length, width = query.shape
    if angles.shape != (1, length, width) or too_small(batch * length, heads * width, in_fp8=False):
        return None
    columns = angles.reshape(-1, 1, 1, angles.shape[-1])
    return _rotated(query, columns), _rotated(key, columns)


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    out = apply_rotary_pos_emb(x.transpose(1, 2), angles, tensor_format="bshd", fused=True)
    return out.transpose(1, 2)


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """-log softmax(logits)[target], fp32, 0 where a target is ignored.

    logits [batch, length, vocabulary], bf16, computed with in fp32; targets [batch, length], int64.
    """
    return te.parallel_cross_entropy(logits, targets, ignore_idx=ignore_index)


def calibrate(fused: nn.Module, recipe: Any, products: Sequence[Amax]) -> None:
    """Give a module the scales of delayed scaling that these amaxes call for: scale = max / amax / 2^margin.

    `products` may be empty: the module then begins with scales of 1.
    TE's own formula (its recipe.DelayedScaling), on TE's own order: input, weight, output of each product
    forward, gradient of the output and of the input of each product backward.
    """
    with torch.no_grad(), autocast(recipe):  # with gradients, leaving it would end a step of every FP8 model
        fused.init_fp8_metadata(num_gemms=len(fused.weight_names))
        # as the first call would: where that is one whose traces are wiped out, TE would enter it twice
        _State.add_fp8_tensors_to_global_buffer(fused.fp8_meta)
    forward, backward = {}, {}
    for index, product in enumerate(products):
        forward |= {3 * index: product.input, 3 * index + 1: product.weight}
        if product.grad is not None:
            backward[2 * index] = product.grad
    limits = recipe.fp8_format.value
    _set_scales(fused.fp8_meta["scaling_fwd"], forward, limits.max_fwd, recipe)
    _set_scales(fused.fp8_meta["scaling_bwd"], backward, limits.max_bwd, recipe)


def quantised(fused: nn.Module, name: str, recipe: Any) -> nn.Parameter:
    """The weight `name` [out, in] in the recipe's format alone, as TE's quantized_model_init has parameters;
    delayed scaling takes the scale that this weight calls for."""
    weight, index = getattr(fused, name).detach(), fused.weight_names.index(name)
    with torch.no_grad(), autocast(recipe):  # without gradients, as in calibrate()
        quantiser = _weight_quantiser(fused, name)
        if is_delayed(recipe):
            amaxes = {3 * index + 1: weight.abs().amax().float()}
            _set_scales(fused.fp8_meta["scaling_fwd"], amaxes, recipe.fp8_format.value.max_fwd, recipe)
        held = quantiser(weight)
    fused.primary_weights_in_fp8 = True
    return nn.Parameter(held, requires_grad=False)


def _weight_quantiser(fused: nn.Module, name: str) -> Any:
    """What makes a parameter of the weight `name`, in the recipe that is on; its scale is the module's."""
    fused.init_fp8_metadata(num_gemms=len(fused.weight_names))
    quantiser = fused._get_weight_quantizers()[fused.weight_names.index(name)].copy()
    # the transpose can be made of the rows later, but for MXFP8, whose blocks lie along them
    by_rows = isinstance(_State.get_fp8_recipe(), recipes.MXFP8BlockScaling)
    quantiser.set_usage(rowwise=True, columnwise=by_rows)
    quantiser.internal = False
    return quantiser


@contextlib.contextmanager
def _no_new_step() -> Iterator[None]:
    """Let the next autocast be one within another: TE ends a step of delayed scaling with the outermost."""
    state = getattr(_State, "quantization_state", None)
    owner, name = (_State, "FP8_AUTOCAST_DEPTH") if state is None else (state, "autocast_depth")
    setattr(owner, name, getattr(owner, name) + 1)
    try:
        yield
    finally:
        setattr(owner, name, getattr(owner, name) - 1)


def _set_scales(state: Any, amaxes: dict[int, Tensor], limit: float, recipe: Any) -> None:
    for index, amax in amaxes.items():
        if amax > 0 and amax.isfinite():
            state.scale[index] = limit / amax / 2**recipe.margin
            state.amax_history[-1, index] = amax  # the oldest: row 0 is written to by the next step
