"""TE's modules, built on meta and without parameters, and what each keeps for those that it is given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

from te_transform.backends import fp8, scale_rows
from te_transform.backends.joined import Source
from te_transform.backends.quantized import Quantized, is_quantized, scale_for
from te_transform.backends.running import sample_of, stamp_of
from te_transform.backends.scales import Call, Calls, Seen
from te_transform.backends.te.recipes import (
    FP8GlobalStateManager,
    is_delayed,
    scaling_of,
    update_scales_after_this_backward,
    within_step,
)
from te_transform.backends.tensor_version import TensorVersion


class Kernel:
    """TE's module for the products that begin with one parameter, and what it keeps for them.

    `names` are the module's attributes that a call's tensors stand for, in the order of the call.
    """

    def __init__(self, make: Callable[[], nn.Module], names: Sequence[str], weights: Sequence[Tensor]):
        self.make, self.names, self.seen = make, names, Seen.of(len(weights))
        self.weights = [Source.of(weight) for weight in weights]
        self.made: nn.Module | None = None
        self.in_fp8 = False  # whether its last call was
        self.calibrating = False  # whether its last call was in its own dtype for want of scales
        self.calls = Calls()
        self.stamp: Any = None  # of the quantized weights that are kept
        self.sample: Tensor | None = None  # of the weights that these were made of
        self.kept: fp8.State | None = None  # of compiled calls, with quantized weights
        self.scaled = fp8.State()  # of compiled calls, without weights
        self.tensors: dict[
            int, tuple[TensorVersion, Tensor]
        ] = {}  # TE's, of weights that are held in FP8 alone
        self.vectors: dict[tuple[float, torch.device], Tensor] = {}  # for norms without a scale or a bias

    @property
    def module(self) -> nn.Module:
        """The module, made when it first runs."""
        if self.made is None:
            self.made = self.make()
            self.made._parameters.clear()
        return self.made

    def parameters(self) -> list[Tensor]:
        """Those of the weights of its last call that are still there."""
        return [parameter for source in self.weights for parameter in source.parameters()]

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

    def look_at(self, weights: Sequence[Tensor]) -> bool:
        """Note the weights of a call, and free what is kept of others; whether they are to be quantized
        anew, and kept."""
        self.weights = [*map(Source.of, weights)]  # any but the first may be of another parameter by now
        stamp = None if any(map(is_quantized, weights)) else stamp_of(weights)
        is_new = stamp is None or stamp != self.stamp
        if is_new:
            self.forget_weights()
            self.sample = None if stamp is None else sample_of(self.parameters())
        self.stamp = stamp
        return is_new and stamp is not None

    @property
    def keeps(self) -> bool:
        """Whether the quantized weights of this call are to be kept."""
        return self.stamp is not None

    @torch.no_grad()
    def fit(self, recipe: Any, weights: Sequence[Tensor]) -> None:
        """Let the scales of weights fit these: no step of TE's looks at what evaluation loads.

        Where one is no half of what it was, other weights were loaded, which other inputs may come with:
        these are looked at anew, in the next forward. The CPU waits for that, once for such weights.
        """
        state = self.delayed().get("forward")
        if state is None or "forward" not in self.seen.used:
            return
        own = state.scale[1 : 3 * len(weights) : 3]
        limit = recipe.fp8_format.value.max_fwd / 2**recipe.margin
        fitting = torch.stack([scale_for(weight.abs().amax().float(), limit) for weight in weights])
        if bool((fitting < own / 2).any()):
            self.seen = self.seen.anew()
        own.copy_(torch.minimum(own, fitting))

    def forget_weights(self) -> None:
        """Free the quantized weights that are kept; the next call makes them anew."""
        self.stamp, self.sample, self.kept = None, None, None
        if self.made is not None:
            self.made._fp8_workspaces.clear()

    def tensor_of(self, number: int, weight: Quantized) -> Tensor:
        """TE's tensor of the bytes that a weight is held in, within a recipe; it keeps the transpose."""
        if number not in self.tensors or not self.tensors[number][0].is_of(weight.held):
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
            self.tensors[number] = TensorVersion.of(weight.held), made
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
        if self.module.fp8 and self.module.fp8_meta.get("recipe") is FP8GlobalStateManager.get_fp8_recipe():
            return
        inference = torch.is_inference_mode_enabled()  # whose tensors later steps could not write to
        with torch.inference_mode(False) if inference else contextlib.nullcontext():
            self.module.init_fp8_metadata(num_gemms=len(self.weights))

    def delayed(self) -> dict[str, Any]:
        """Its states of delayed scaling, "forward" and "backward"; none before there are any."""
        meta = {} if self.made is None else self.made.fp8_meta
        states = {"forward": meta.get("scaling_fwd"), "backward": meta.get("scaling_bwd")}
        return states if all(hasattr(state, "amax_history") for state in states.values()) else {}

    def notice_other_recipe(self) -> None:
        """Begin anew where another model that has the weights too ran in a recipe of another kind since, with
        which TE drops the scales."""
        if self.seen.used and not self.delayed():
            self.seen = Seen.of(len(self.weights))

    def take_saved(self) -> None:
        """Begin with the scales that were loaded for its weights, if there are any."""
        if not self.seen.used and not self.seen.again and (saved := scale_rows.taken(self)) is not None:
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
        if not self.keeps:
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
        FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(meta)
        forward, backward = meta["scaling_fwd"], meta["scaling_bwd"]
        now = (forward.scale, forward.amax_history), (backward.scale, backward.amax_history)
        if any(map(is_not, chain(*now), self.scaled.tensors())) or not self.scaled.forward:
            self.scaled = fp8.State(*now)
        return self.scaled

    def note_call(self) -> None:
        """Note how this call runs, which a checkpoint may make again."""
        self.calls.note(self.in_fp8, self.calibrating, self._scales_now)

    def call_again(self) -> Call | None:
        """The call that a checkpoint makes again, the last one if none was noted; None if that was in no
        recipe."""
        found = self.calls.again() or Call(self.in_fp8, self.calibrating)
        return found if found.in_recipe else None

    def _scales_now(self) -> Tensor | None:
        state = self.module.fp8_meta.get("scaling_fwd")
        if not hasattr(state, "amax_history"):
            return None
        with _disable_current_modes():
            return state.scale.clone()

    @contextlib.contextmanager
    def as_before(self, call: Call, recipe: Any) -> Iterator[None]:
        """In the recipe, with the scales that this call of a forward had, and as a part of its step, which
        has noted the largest values already.

        Selective checkpoints find what the forward computed by the order of its operations: they see none of
        those on scales.
        """
        if call.scales is None:
            with within_step(recipe):
                yield
            return
        update_scales_after_this_backward()
        state = self.module.fp8_meta["scaling_fwd"]
        held = state.scale, state.amax_history[0]
        with _disable_current_modes():
            now = [tensor.clone() for tensor in held]
            state.scale.copy_(call.scales)
        try:
            with within_step(recipe):
                yield
        finally:
            with _disable_current_modes():
                torch._foreach_copy_(held, now)


_UNSCALED = fp8.State()


def _set_scales(state: Any, amaxes: dict[int, Tensor], limit: float, recipe: Any) -> None:
    """scale = max / amax / 2^margin, which is TE's own formula."""
    for index, amax in amaxes.items():
        state.scale[index] = scale_for(amax, limit / 2**recipe.margin)
        # as the oldest: the next step writes to row 0
        state.amax_history[-1, index] = torch.where(amax.isfinite(), amax, 0.0)
