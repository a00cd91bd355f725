"""The fused ops on NVIDIA Transformer Engine: the only file that imports it.

Products run in TE's own modules, built on meta and without parameters; each call puts the weights that it was
given in their place. The modules, which hold what FP8 needs from one step to the next, belong to the
parameters, see joined.State. Where TE has no kernel for a call (another device, float32), or none that is
faster (few tokens), the op runs in plain PyTorch, and `plain_calls` counts why.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial, wraps
from itertools import chain
from operator import is_not
from typing import Any

import torch  # before TE, which loads libraries that come with it
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb
from transformer_engine.pytorch.constants import TE_DType
from transformer_engine.pytorch.module import layernorm_mlp
from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer, Float8Tensor

from te_transform.backends import few_rows, fp8, plain, scale_rows
from te_transform.backends.cudnn import DotProductAttention
from te_transform.backends.fp8_ops import KERNELS, InFP8
from te_transform.backends.gradients import Gradients, gradients_of
from te_transform.backends.joined import Source, state_of, watched
from te_transform.backends.limits import (
    too_small,
    without_cross_entropy,
    without_kernel,
    without_rotary,
)
from te_transform.backends.op import FusedOp
from te_transform.backends.plain import ACTIVATIONS, EXACT_GELU, GATED_ACTIVATIONS
from te_transform.backends.quantized import Quantized, exact, is_quantized, scale_for
from te_transform.backends.running import in_recipe, is_evaluating, stamp_of
from te_transform.backends.scales import Seen
from te_transform.backends.stamp import Stamp
from te_transform.backends.tracing import in_backward, saving_hooks, traced, transformed
from te_transform.backends.twice import differentiable_once, differentiable_twice

try:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as _State
except ImportError:  # TE before 2.8
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager as _State

__all__ = [
    "ACTIVATIONS", "GATED_ACTIVATIONS", "GATES", "HAS_BIAS", "HAS_KERNELS", "NAME",
    "CrossEntropy", "DotProductAttention", "LayerNormLinear", "LayerNormMLP", "Linear", "PaddedLinear",
    "Rotary", "activation_of", "autocast", "forgetting_scales", "is_delayed", "multiple", "recipe_now",
    "recipe_of", "scaling_of", "update_scales_after_backward", "within_step",
]  # fmt: skip

NAME = "te"
HAS_KERNELS = True
HAS_BIAS = False
GATES = ("no", "first half")

_RECIPES = {
    # TE would reduce what all modules of a process saw, twice a step, which have to be the same ones in all
    # processes: runtime/precision.py lets them agree in one collective, whatever ran
    "fp8-delayed": lambda: recipes.DelayedScaling(reduce_amax=False),
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
    """What the rows and columns of a product have to be a multiple of."""
    return 32 if isinstance(recipe, recipes.MXFP8BlockScaling) else 16


def autocast(recipe: Any, enabled: bool = True) -> contextlib.AbstractContextManager:
    """Run TE's modules in the recipe's precision."""
    if hasattr(te, "autocast"):
        return te.autocast(enabled=enabled, recipe=recipe)
    return te.fp8_autocast(enabled=enabled, fp8_recipe=recipe)  # TE before 2.8


def recipe_now() -> Any:
    """The recipe that is on, None where there is none."""
    return _State.get_fp8_recipe() if _State.is_fp8_enabled() else None


def scaling_of(recipe: Any) -> fp8.Scaling | None:
    """How a compiled graph computes the products of a recipe; None where only TE's modules do: for several
    scales a tensor, and settings that few use."""
    delayed = is_delayed(recipe)
    if not delayed and not isinstance(recipe, recipes.Float8CurrentScaling):
        return None
    if getattr(recipe, "use_power_2_scales", False) or getattr(recipe, "backward_override", None) is not None:
        return None
    formats = {"HYBRID": (torch.float8_e4m3fn, torch.float8_e5m2), "E4M3": (torch.float8_e4m3fn,) * 2}
    if recipe.fp8_format.name not in formats:
        return None
    # what TE's modules take where a recipe says nothing
    split = {"fp8_gemm_fprop": False, "fp8_gemm_dgrad": True, "fp8_gemm_wgrad": True}
    for name in split.keys() & vars(type(recipe)).keys():
        split[name] = getattr(recipe, name).use_split_accumulator
    return fp8.Scaling(*formats[recipe.fp8_format.name], tuple(not each for each in split.values()), delayed)


def _quantized_by_kernel(
    compute: Callable[[Any], Any],
    scales: Tensor,
    history: Tensor | None,
    index: int,
    dtype: torch.dtype,
    with_transpose: bool,
) -> InFP8:
    """What one kernel computes, casts, transposes and looks through for its largest value."""
    amax = torch.empty_like(scales) if history is None else history[0]
    quantizer = Float8Quantizer(
        scale=scales[index : index + 1],
        amax=amax[index : index + 1],
        fp8_dtype=TE_DType[dtype],
        rowwise=True,
        columnwise=with_transpose,
    )
    quantizer.internal = True
    held = compute(quantizer).get_metadata()
    rows, transposed = held["data"].view(dtype), held["data_transpose"]
    if not with_transpose:
        transposed = held["data"].new_empty(0)
    elif transposed is None:  # GPUs whose products read both ways have none
        transposed = held["data"].t().contiguous()
    return rows, transposed.view(dtype), held["fp8_scale_inv"]


def _quantize(x: Tensor, *where: Any) -> InFP8:
    return _quantized_by_kernel(lambda quantizer: quantizer(x), *where)


def _activate(x: Tensor, activation: str, *where: Any) -> InFP8:
    forward, *_ = _functions_of(activation)
    return _quantized_by_kernel(partial(forward, x), *where)


def _activate_backward(
    grad: Tensor, x: Tensor, activation: str, with_sum: bool, *where: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, backward, with_bias = _functions_of(activation)
    if not with_sum:
        return (*_quantized_by_kernel(partial(backward, grad, x), *where), grad.new_empty(0))
    total = grad.new_empty(0)

    def compute(quantizer: Any) -> Any:
        nonlocal total
        total, held = with_bias(grad, x, quantizer)
        return held

    return (*_quantized_by_kernel(compute, *where), total)


@cache
def _functions_of(activation: str) -> tuple[Any, ...]:
    """TE's functions for an activation, its gradient, and that with a bias's, which take a quantizer."""
    return layernorm_mlp._act_func(activation, recipes.DelayedScaling())


KERNELS.update(quantize=_quantize, activate=_activate, activate_backward=_activate_backward)


def update_scales_after_backward(outputs: Sequence[Any]) -> None:
    """Let the scales of gradients be updated at the end of each backward that begins at these outputs of a
    forward, unless a module of TE's that ran before in the same step does it in its own."""
    trained = [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]
    if not trained or not _State.is_first_fp8_module():
        return
    waiting: list[bool] = []

    def update() -> None:
        waiting.clear()
        _State.reduce_and_update_fp8_tensors(forward=False)

    def at_the_end(grad: Tensor) -> None:
        if not waiting:
            waiting.append(True)
            torch.autograd.Variable._execution_engine.queue_callback(update)

    for out in trained:
        out.register_hook(at_the_end)


class _Kernel:
    """TE's module for the products that begin with one parameter, and what it keeps for them.

    `names` are the module's attributes that a call's tensors stand for, in the order of the call.
    """

    def __init__(self, make: Callable[[], nn.Module], names: Sequence[str], weights: Sequence[Tensor]):
        self.make, self.names, self.seen = make, names, Seen.of(len(weights))
        self.weights = [Source.of(weight) for weight in weights]
        self.made: nn.Module | None = None
        self.in_fp8 = False  # whether its last call was
        self.calibrating = False  # whether its last call was in its own dtype for want of scales
        self.scales: Tensor | None = None  # of delayed scaling, in the last call that may be made again
        self.stamp: Any = None  # of the quantized weights that are kept
        self.kept: fp8.State | None = None  # of compiled calls, with quantized weights
        self.scaled = fp8.State()  # of compiled calls, without weights
        self.tensors: dict[int, tuple[Stamp, Tensor]] = {}  # TE's, of weights that are held in FP8 alone
        self.vectors: dict[tuple[float, torch.device], Tensor] = {}  # for norms without a scale or a bias

    @property
    def module(self) -> nn.Module:
        """The module, made when it first runs."""
        if self.made is None:
            self.made = self.make()
            self.made._parameters.clear()
        return self.made

    @property
    def ran_in_recipe(self) -> bool:
        """Whether its last call was to be in FP8."""
        return self.in_fp8 or self.calibrating

    @property
    def scales_by_blocks(self) -> bool:
        """Whether the recipe of its last call in FP8 has more than one scale for a weight."""
        recipe = None if self.made is None else self.made.fp8_meta.get("recipe")
        return isinstance(recipe, (recipes.Float8BlockScaling, recipes.MXFP8BlockScaling))

    def run(self, x: Tensor, tensors: Sequence[Tensor | None], adds: bool, keeps: bool = False) -> Tensor:
        """Run the module with these tensors in the place of its parameters.

        Args:
            x: its input.
            tensors: None where there is no bias.
            adds: whether the gradients of the weights are added to their main_grad.
            keeps: whether weights are quantized once, and kept.
        """
        own = vars(self.module)
        held = any(isinstance(tensor, Float8Tensor) for tensor in tensors)
        own.update(zip(self.names, tensors, strict=True))
        own.update(fuse_wgrad_accumulation=adds, primary_weights_in_fp8=held)
        try:
            # never True, which would also have this call's gradient overwrite those before it
            return self.module.forward(x, is_first_microbatch=False if keeps else None)
        finally:
            own.update(dict.fromkeys(self.names))

    def keeps(self, weights: Sequence[Tensor]) -> bool:
        """Whether this call's quantized weights are to be kept; frees those of other weights."""
        stamp = None if any(map(is_quantized, weights)) else stamp_of(weights)
        if stamp is None or stamp != self.stamp:
            self.forget_weights()
        self.stamp = stamp
        return stamp is not None

    def forget_weights(self) -> None:
        """Free the quantized weights that are kept; the next call makes them anew."""
        self.stamp, self.kept = None, None
        if self.made is not None:
            self.made._fp8_workspaces.clear()

    def tensor_of(self, number: int, weight: Quantized) -> Tensor:
        """TE's tensor of the bytes that a weight is held in, within a recipe; it keeps the transpose."""
        stamp = Stamp.of(weight.held)
        if number not in self.tensors or self.tensors[number][0] != stamp:
            self._init_scales()
            quantizer = self.module._get_weight_quantizers()[number].copy()
            quantizer.internal = False
            quantizer.set_usage(rowwise=True, columnwise=False)
            made = Float8Tensor(
                shape=weight.shape,
                dtype=weight.dtype,
                data=weight.held,
                fp8_scale_inv=weight.inverse.reshape(1),
                fp8_dtype=quantizer.dtype,
                quantizer=quantizer,
            )
            self.tensors[number] = stamp, made
        return self.tensors[number][1]

    def vector(self, number: float, weight: Tensor) -> Tensor:
        """A vector of one number, for each column of a weight."""
        key = number, weight.device
        if key not in self.vectors:
            with torch.inference_mode(False):  # later calls without it read it
                size = weight.shape[-1:]
                self.vectors[key] = torch.full(size, number, dtype=weight.dtype, device=weight.device)
        return self.vectors[key]

    def _init_scales(self) -> None:
        """Let the module have tensors for scales, if it has none."""
        # A call without a recipe sets `fp8` to False, and the module then gives out no quantizers until
        # init_fp8_metadata() has set it again.
        if self.module.fp8 and self.module.fp8_meta.get("recipe") is _State.get_fp8_recipe():
            return
        inference = torch.is_inference_mode_enabled()  # whose tensors later steps could not write to
        with torch.inference_mode(False) if inference else contextlib.nullcontext():
            self.module.init_fp8_metadata(num_gemms=len(self.weights))

    def delayed(self) -> dict[str, Any]:
        """Its states of delayed scaling, "forward" and "backward"; none before there are any."""
        meta = {} if self.made is None else self.made.fp8_meta
        states = {"forward": meta.get("scaling_fwd"), "backward": meta.get("scaling_bwd")}
        return states if all(hasattr(state, "amax_history") for state in states.values()) else {}

    def take_saved(self) -> None:
        """Begin with the scales that were loaded for its weights, if there are any."""
        if not self.seen.used and (saved := scale_rows.taken(self)) is not None:
            self._init_scales()
            scale_rows.restore(self, saved, self.delayed())

    def give_scales(self, recipe: Any, gradients: bool) -> None:
        """Give the module its first scales of delayed scaling, in TE's order.

        That is input, weight and output of each product forward, the gradients of output and input backward.
        """
        limits, products = recipe.fp8_format.value, list(enumerate(self.seen.products))
        if self.seen.is_new("forward"):
            self._init_scales()
            amaxes = {3 * i: product.input for i, product in products}
            amaxes |= {3 * i + 1: product.weight for i, product in products}
            _set_scales(self.module.fp8_meta["scaling_fwd"], amaxes, limits.max_fwd, recipe)
        if gradients and self.seen.is_new("backward"):
            amaxes = {2 * i: product.grad for i, product in products}
            _set_scales(self.module.fp8_meta["scaling_bwd"], amaxes, limits.max_bwd, recipe)

    def state(self, recipe: Any, weights: Sequence[Tensor]) -> fp8.State:
        """What a compiled call takes; the same object for as long as its tensors are the same."""
        state = self._scales() if is_delayed(recipe) else _UNSCALED
        if not self.keeps(weights):
            return state
        if self.kept is None or self.kept.forward is not state.forward:
            scaling = scaling_of(recipe)
            with torch.inference_mode(False):  # later calls without it read them
                held = tuple(scaling.weight(state, *each, False) for each in enumerate(weights))
            self.kept = state._replace(weights=held)
        return self.kept

    def _scales(self) -> fp8.State:
        """The scales, as TE updates them."""
        self._init_scales()
        meta = self.module.fp8_meta
        _State.add_fp8_tensors_to_global_buffer(meta)
        forward, backward = meta["scaling_fwd"], meta["scaling_bwd"]
        now = (forward.scale, forward.amax_history), (backward.scale, backward.amax_history)
        if any(map(is_not, chain(*now), self.scaled.tensors())) or not self.scaled.forward:
            self.scaled = fp8.State(*now)
        return self.scaled

    def note_scales(self) -> None:
        """Note the scales of this call, which a checkpoint may make again."""
        state = self.module.fp8_meta.get("scaling_fwd")
        self.scales = state.scale.clone() if hasattr(state, "amax_history") else None

    @contextlib.contextmanager
    def as_before(self, recipe: Any) -> Iterator[None]:
        """In the recipe, with the scales that this step's forward had, and as a part of that step."""
        state = self.module.fp8_meta["scaling_fwd"]
        now = None if self.scales is None else state.scale.clone()
        try:
            if now is not None:
                state.scale.copy_(self.scales)
            with within_step(recipe):
                yield
        finally:
            if now is not None:
                state.scale.copy_(now)


_UNSCALED = fp8.State()


def _set_scales(state: Any, amaxes: dict[int, Tensor], limit: float, recipe: Any) -> None:
    """scale = max / amax / 2^margin, which is TE's own formula."""
    for index, amax in amaxes.items():
        state.scale[index] = scale_for(amax, limit / 2**recipe.margin)
        # as the oldest: the next step writes to row 0
        state.amax_history[-1, index] = torch.where(amax.isfinite(), amax, 0.0)


@contextlib.contextmanager
def within_step(recipe: Any) -> Iterator[None]:
    """In the recipe, as a part of a step that ends with an autocast around it, or has ended."""
    with _no_new_step(), autocast(recipe):
        yield


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


@contextlib.contextmanager
def forgetting_scales() -> Iterator[None]:
    """Let TE forget the scales of modules that run for the first time meanwhile.

    At the end of each step TE updates the scales of all modules that ever ran, those that are gone too.
    """
    state = getattr(_State, "quantization_state", _State)
    buffers = state.global_amax_buffer, state.global_amax_history_buffer, state.global_scale_buffer
    before = [{key: len(held) for key, held in buffer.items()} for buffer in buffers]
    try:
        yield
    finally:
        for buffer, lengths in zip(buffers, before, strict=True):
            for key, held in buffer.items():
                del held[lengths.get(key, 0) :]


class _Product(FusedOp):
    """An op with matrix products: no call that TE refuses, and nothing lost where it has none."""

    FASTER = True  # whether TE is faster in the weights' own dtype too

    def forward(self, x: Tensor, *tensors: Tensor | None, state: fp8.State | None = None) -> Tensor:
        """x [..., in] -> [..., out]; with a `state` for a compiler, in FP8, see state_for()."""
        if state is not None and not transformed():
            return self._recorded(scaling_of(_State.get_fp8_recipe()), state, x, tensors)
        if traced():
            return self._plainly(plain.product, x, tensors)
        weights = self._weights(tensors)
        kernel, gradients = self._kernel(weights, tensors[-1] is not None), gradients_of(weights)
        enabled = _State.is_fp8_enabled()
        # torch.utils.checkpoint runs a forward again from within the backward, where no autocast is on
        if kernel.ran_in_recipe and not enabled and in_backward():
            return self._again(kernel, x, tensors, gradients)
        in_fp8 = enabled and in_recipe(weights[0], self.in_fp8)
        if not (in_fp8 or self.FASTER or gradients):
            return self._plainly(plain.product, x, tensors)
        why = self._why_plain(x, weights, in_fp8, gradients is not None)
        inside = in_fp8 and why is None
        kernel.calibrating = inside and not self._has_scales(
            kernel, _State.get_fp8_recipe(), _is_trained(x, *tensors)
        )
        kernel.in_fp8 = inside and not kernel.calibrating
        if why or kernel.calibrating:
            self.plain_calls[why or _CALIBRATING] += 1
            return self._plainly(kernel.seen.product() if kernel.calibrating else plain.product, x, tensors)
        if not in_fp8:
            return self._in_its_dtype(kernel, x, tensors, gradients)
        if saving_hooks() or not (torch.is_grad_enabled() or is_evaluating()):
            kernel.note_scales()  # for a checkpoint, from which this call will be made again
        return self._in_fp8(kernel, x, tensors, gradients)

    def _recorded(
        self, scaling: fp8.Scaling, state: fp8.State, x: Tensor, tensors: Sequence[Tensor | None]
    ) -> Tensor:
        """A call in FP8 as operations that a compiler records."""
        return self.plain(scaling.product(state), x, *tensors)

    def _weights(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        return [tensors[place - 1] for place in self.PRODUCTS]

    def _plainly(self, product: plain.Product, x: Tensor, tensors: Sequence[Tensor | None]) -> Tensor:
        return self.plain(product, x, *tensors)

    def _why_plain(self, x: Tensor, weights: Sequence[Tensor], in_fp8: bool, adds: bool) -> str | None:
        """Why a call with this input runs in plain PyTorch, or None."""
        for weight in weights:
            if why := without_kernel(x, weight, in_fp8):
                return why
        factor = multiple(_State.get_fp8_recipe()) if in_fp8 else 1
        if any(size % factor for weight in weights for size in weight.shape):
            return f"weights whose sizes are no multiples of {factor}"
        held = in_fp8 and any(map(is_quantized, weights))
        if held and all(few_rows.takes(x, weight) for weight in weights) and not torch.is_grad_enabled():
            return "few rows, whose products read weights that are held in FP8 alone"
        # other plain calls would have to dequantize such weights, and know nothing of main_grad
        if adds or held:
            return None
        return too_small(x.shape[:-1].numel(), min(weights[0].shape), in_fp8)

    def _again(
        self, kernel: _Kernel, x: Tensor, tensors: Sequence[Tensor | None], gradients: Gradients | None
    ) -> Tensor:
        """Repeat the last call, for a checkpoint."""
        recipe = kernel.module.fp8_meta["recipe"] if kernel.in_fp8 else None
        if recipe is None or not self._has_scales(kernel, recipe, _is_trained(x, *tensors)):
            return self._plainly(kernel.seen.product(), x, tensors)
        with kernel.as_before(recipe):
            return self._in_fp8(kernel, x, tensors, gradients)

    def ran_in_recipe(self, weights: Sequence[Tensor], bias: bool) -> bool:
        """Whether the last call with these weights did, or was to."""
        return self._kernel(weights, bias).ran_in_recipe

    def state_for(self, weights: Sequence[Tensor], bias: bool, trained: bool) -> fp8.State | None:
        """What a compiled call takes as its `state`, in the recipe that is on.

        None where the call has to run uncompiled: until the first scales are there, where gradients are added
        to main_grad, and with weights that are held in FP8 alone.

        Args:
            weights: of its products.
            bias: whether there is one.
            trained: whether it has a backward.
        """
        recipe, kernel = _State.get_fp8_recipe(), self._kernel(weights, bias)
        if gradients_of(weights) is not None or any(map(is_quantized, weights)):
            return None
        if not self._has_scales(kernel, recipe, trained):
            return None
        kernel.in_fp8, kernel.calibrating = True, False
        return kernel.state(recipe, weights)

    def _has_scales(self, kernel: _Kernel, recipe: Any, trained: bool) -> bool:
        """Whether the kernel has the scales that the recipe needs for a call; gives it the first ones."""
        if not is_delayed(recipe):
            return True
        kernel.take_saved()
        if not kernel.seen.knows(trained):
            return False
        kernel.give_scales(recipe, trained)
        return True

    def _in_its_dtype(
        self, kernel: _Kernel, x: Tensor, tensors: Sequence[Tensor | None], gradients: Gradients | None
    ) -> Tensor:
        """A call in the dtype of the weights, whether or not a recipe is on."""

        def run(x: Tensor, *given: Tensor | None) -> Tensor:
            given = self._by_rows(kernel, given, tensors, gradients)
            if not _State.is_fp8_enabled():
                return kernel.run(x, given, gradients is not None)
            with autocast(None, enabled=False):
                return kernel.run(x, given, gradients is not None)

        def plainly(*arguments: Any) -> Tensor:
            return self.plain(plain.product, *arguments)

        plain_tensors = (None if tensor is None else exact(tensor) for tensor in tensors)
        return self._watched(differentiable_twice(run, plainly, (x, *plain_tensors)), tensors)

    def _in_fp8(
        self, kernel: _Kernel, x: Tensor, tensors: Sequence[Tensor | None], gradients: Gradients | None
    ) -> Tensor:
        """A call in the recipe that is on, of a number of rows that its kernels take."""
        keeps = kernel.keeps(self._weights(tensors))
        given = self._by_rows(kernel, tensors, tensors, gradients)

        def run(x: Tensor) -> Tensor:
            return differentiable_once(kernel.run(x, given, gradients is not None, keeps), _ONCE)

        out = fp8.with_full_rows(run, x, multiple(_State.get_fp8_recipe()))
        return self._watched(out, tensors)

    def _by_rows(
        self,
        kernel: _Kernel,
        given: Sequence[Tensor | None],
        tensors: Sequence[Tensor | None],
        gradients: Gradients | None,
    ) -> list[Tensor | None]:
        """What a kernel gets of `given`, which stand for `tensors`: weights by rows, with their main_grad."""
        found = list(given)
        for place in (place - 1 for place in self.PRODUCTS):
            weight = given[place]
            if is_quantized(weight):
                found[place] = kernel.tensor_of(self.PRODUCTS.index(place + 1), weight)
                continue
            weight = weight.contiguous()
            if gradients is not None and torch.is_grad_enabled():
                weight = weight.view_as(weight)  # parameters stay as they are
                weight.main_grad = gradients.of(tensors[place])
            found[place] = weight
        return found

    def _watched(self, out: Tensor, tensors: Sequence[Tensor | None]) -> Tensor:
        for weight in self._weights(tensors):
            out = watched(out, weight)
        return out

    def _kernel(self, weights: Sequence[Tensor], bias: bool) -> _Kernel:
        """The kernel of the first weight's parameter for a call of this form."""
        first = weights[0]
        offset = 0 if first._base is None else first.storage_offset()  # parts of one parameter differ in it
        form = (*self.form, bias, first.dtype, offset, *(weight.shape for weight in weights))
        kernels = state_of(first).kernels
        if form not in kernels:
            kernels[form] = self._made(weights, bias=bias, params_dtype=first.dtype)
        return kernels[form]

    @property
    def form(self) -> tuple[Any, ...]:
        """What the kernels of one parameter differ in, beside dtype and sizes."""
        raise NotImplementedError

    def _made(self, weights: Sequence[Tensor], **options: Any) -> _Kernel:
        raise NotImplementedError


def _is_trained(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


_CALIBRATING = "a first call in FP8, from which delayed scaling takes its scales"
_ONCE = (
    "the backward of a product in FP8 is recorded or run again, its kernels keep nothing for a second time: "
    "convert the model without a recipe, or keep the product out of it by a te_transform.PrecisionPlan"
)


class Linear(_Product, plain.Linear):
    """y = x W^T + b; weight [out, in]."""

    FASTER = False
    form = ("Linear",)

    def _made(self, weights: Sequence[Tensor], **options: Any) -> _Kernel:
        outs, ins = weights[0].shape
        return _Kernel(lambda: te.Linear(ins, outs, device="meta", **options), ("weight", "bias"), weights)


class PaddedLinear(Linear, plain.PaddedLinear):
    """A linear whose weight gets rows of zeros where it runs in plain PyTorch."""


class LayerNormLinear(_Product, plain.LayerNormLinear):
    """A linear of a LayerNorm or RMSNorm."""

    @property
    def form(self) -> tuple[Any, ...]:
        return "LayerNormLinear", *self._norm.values()

    @property
    def _norm(self) -> dict[str, Any]:
        return {
            "eps": self.eps,
            "normalization": self.normalization,
            "zero_centered_gamma": self.zero_centered_gamma,
        }

    def _by_rows(self, kernel: _Kernel, given: Sequence[Tensor | None], *rest: Any) -> list[Tensor | None]:
        """With vectors for a scale or a bias that the norm has not: TE's always have them."""
        scale, bias, weight, *others = super()._by_rows(kernel, given, *rest)
        if scale is None:
            scale = kernel.vector(0.0 if self.zero_centered_gamma else 1.0, weight)
        if bias is None and self.normalization == "LayerNorm":
            bias = kernel.vector(0.0, weight)
        return [scale, bias, weight, *others]

    def _made(self, weights: Sequence[Tensor], **options: Any) -> _Kernel:
        (outs, ins), options = weights[0].shape, {**options, **self._norm}
        names = ("layer_norm_weight", "layer_norm_bias", "weight", "bias")
        return _Kernel(lambda: te.LayerNormLinear(ins, outs, device="meta", **options), names, weights)


class LayerNormMLP(LayerNormLinear, plain.LayerNormMLP):
    """fc2(activation(fc1(norm(x)))); fc1_weight [ffn, hidden], twice the rows where it is gated."""

    @property
    def form(self) -> tuple[Any, ...]:
        return "LayerNormMLP", self.activation, *self._norm.values()

    def _recorded(
        self, scaling: fp8.Scaling, state: fp8.State, x: Tensor, tensors: Sequence[Tensor | None]
    ) -> Tensor:
        norm_weight, norm_bias, *rest = tensors
        _, fc1_bias, *_ = rest
        # TE has no kernels of the exact GELU, and none that sum the gradient of a gated activation for a bias
        has_kernels = self.activation != EXACT_GELU and (self.gated == "no" or fc1_bias is None)
        if not has_kernels or not scaling.delayed or not _with_own_activations():
            return super()._recorded(scaling, state, x, tensors)
        return scaling.mlp(state, self.activation, self.norm(x, norm_weight, norm_bias), *rest)

    def _why_plain(self, *call: Any) -> str | None:
        if self.activation == EXACT_GELU and not _with_own_activations():
            return "the exact GELU, which this version of TE cannot be told of"
        return super()._why_plain(*call)

    def _made(self, weights: Sequence[Tensor], **options: Any) -> _Kernel:
        hidden, inner = weights[1].shape
        options = {**options, **self._norm, "activation": activation_of(self.activation, options["bias"])}
        names = ("layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")
        return _Kernel(lambda: _Mlp(hidden, inner, device="meta", **options), names, weights)


class _Mlp(te.LayerNormMLP):
    """TE's, which also runs where neither its input nor its norm needs a gradient."""

    def forward(self, x: Tensor, **how: Any) -> Tensor:
        """x [..., hidden] -> [..., hidden]."""
        # where neither needs a gradient, TE goes on to ask a LayerNorm's bias, which an RMSNorm has not
        needed = x.requires_grad or self.layer_norm_weight.requires_grad
        if not torch.is_grad_enabled() or needed:
            return super().forward(x, **how)
        if any(weight is not None and weight.requires_grad for weight in self._others()):
            return super().forward(x.detach().requires_grad_(), **how)
        with torch.no_grad():
            return super().forward(x, **how)

    def _others(self) -> tuple[Tensor | None, ...]:
        return self.layer_norm_bias, self.fc1_weight, self.fc1_bias, self.fc2_weight, self.fc2_bias


def _exact_gelu(x: Tensor, quantizer: Any) -> Any:
    """GELU(x), as TE's functions return it."""
    return _quantized(F.gelu(x), quantizer)


def _exact_gelu_backward(grad: Tensor, x: Tensor, quantizer: Any) -> Any:
    """The gradient of x, as TE's functions return it."""
    return _quantized(torch.ops.aten.gelu_backward(grad, x), quantizer)


def _quantized(x: Tensor, quantizer: Any) -> Any:
    return x if quantizer is None else quantizer(x)


class _CastInBackward(str):
    """The name of a gated activation whose gradient is cast to FP8 in the kernel that computes it."""


def activation_of(name: str, bias: bool) -> str:
    """The activation as TE's module gets it.

    Gradients of gated ones are cast where they are computed, but for those with a bias, whose gradient that
    kernel does not compute.
    """
    if not _with_own_activations() or bias or name not in GATED_ACTIVATIONS.values():
        return name
    return _CastInBackward(name)


@cache
def _with_own_activations() -> bool:
    """Let TE compute the exact GELU, and cast gated activations' gradients where they are computed; False
    where this TE has another way.

    TE asks _act_func in each forward and backward: for an activation, its gradient, and that with a bias's
    gradient and the cast. The exact GELU is computed and then cast: kernels that do both were slower where
    they were tried. For gated ones in delayed scaling TE casts in another kernel; but the kernel of the
    gradient takes a quantizer. [8192, 2 x 14336] on an H100: 0.48 ms instead of 0.74, no copy in bf16.
    """
    original = getattr(layernorm_mlp, "_act_func", None)
    if original is None or original("swiglu", recipes.DelayedScaling())[2:] != (None,):
        return False

    @wraps(original)
    def act_func(activation: str, *recipe: Any) -> tuple[Any, ...]:
        if activation == EXACT_GELU:
            return _exact_gelu, _exact_gelu_backward, None
        forward, backward, with_cast = original(activation, *recipe)
        ours = isinstance(activation, _CastInBackward) and any(map(is_delayed, recipe))
        if not ours or with_cast is not None:
            return forward, backward, with_cast
        return forward, backward, lambda grad, x, quantizer: (None, backward(grad, x, quantizer))

    layernorm_mlp._act_func = act_func
    return True


class Rotary(plain.Rotary):
    """Rotary position embedding in one kernel, from the angles themselves."""

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """x [batch, heads, length, width], angles [1 or batch, length, width] in fp32 -> as x."""
        if traced():
            return super().forward(x, angles)
        if why := without_rotary(x, angles):
            self.plain_calls[f"the rotation, {why}"] += 1
            return super().forward(x, angles)
        return differentiable_twice(_rotated, super().forward, (x, angles), linear=True)


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    columns = angles.reshape(-1, 1, 1, angles.shape[-1])
    out = apply_rotary_pos_emb(x.transpose(1, 2), columns, tensor_format="bshd", fused=True)
    return out.transpose(1, 2)


class CrossEntropy(plain.CrossEntropy):
    """-log softmax(logits)[target] in one kernel, which reads bf16 logits and computes in fp32."""

    def forward(self, logits: Tensor, targets: Tensor, ignore_index: int, reduction: str) -> Tensor:
        """logits [..., vocabulary], targets [...] -> one number, or one a target if reduction is "none"."""
        if traced():
            return super().forward(logits, targets, ignore_index, reduction)
        if why := without_cross_entropy(logits, targets):
            self.plain_calls[f"the loss, {why}"] += 1
            return super().forward(logits, targets, ignore_index, reduction)
        counted = targets != ignore_index
        # the kernel would read past the logits: an assertion as PyTorch has one, which waits for nothing
        torch._assert_async((~counted | ((targets >= 0) & (targets < logits.shape[-1]))).all())
        losses = _CrossEntropy.apply(logits, targets, ignore_index)
        if reduction == "none":
            return losses
        return losses.sum() if reduction == "sum" else losses.sum() / counted.sum()


class _CrossEntropy(torch.autograd.Function):
    """TE's kernels keep a copy of the logits, which their backward overwrites and which they so have but
    once. This keeps the logits themselves, which are there anyway, and runs both kernels in the backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        ctx.save_for_backward(logits, targets)
        ctx.ignore_index = ignore_index
        return _losses(logits, targets, ignore_index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (logits, targets), recorded = ctx.saved_tensors, torch.is_grad_enabled()
        with torch.enable_grad():
            own = logits.view_as(logits) if recorded else logits.detach().requires_grad_()
            if recorded:  # TE's kernels have no second derivative
                losses = plain.CrossEntropy()(own, targets, ctx.ignore_index, "none")
            else:
                losses = _losses(own, targets, ctx.ignore_index)
        (found,) = torch.autograd.grad(losses, own, grad, create_graph=recorded)
        return found, None, None


def _losses(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """For each target, in fp32; 0 where it is ignored."""
    rows = logits.reshape(1, -1, logits.shape[-1])
    losses = te.parallel_cross_entropy(rows, targets.reshape(1, -1), ignore_idx=ignore_index)
    return losses.view_as(targets)
