"""TE's modules for products, each with its scales and cached quantized weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn
from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

from te_transform.backends.fp8 import scale_table
from te_transform.backends.fp8.calibration import RecordedAmax
from te_transform.backends.fp8.checkpointed_calls import NotedCall, NotedCalls
from te_transform.backends.fp8.current_model import running_forward, sample_of, stamp_of
from te_transform.backends.fp8.fp8_only import FP8Only, is_fp8_only, scale_for
from te_transform.backends.fp8.products import ProductState
from te_transform.backends.fp8.registry import Source
from te_transform.backends.te.lazy_module import LazyModule
from te_transform.backends.te.recipes import FP8GlobalStateManager, is_delayed, scaling_of
from te_transform.backends.tensor_version import TensorVersion
from te_transform.backends.tracing import recorded


@dataclass
class KeptWeights:
    """The quantized weights that a kernel caches.

    Attributes:
        stamp: the stamp of the weights, see stamp_of(); None if they are not cached.
        sample: some elements of the weights when they were quantized.
        state: the state of compiled calls, with the quantized weights.
    """

    stamp: Any = None
    sample: Tensor | None = None
    state: ProductState | None = None


class Kernel(LazyModule):
    """TE's module for the products that begin with one parameter, with their scales and cached weights.

    Args:
        make: builds the module.
        names: the attributes of the module that the tensors of a call replace, in the order of the call.
        weights: the weights of the first call.
    """

    def __init__(self, make: Callable[[], nn.Module], names: Sequence[str], weights: Sequence[Tensor]):
        super().__init__(make, names, len(weights))
        self.seen = RecordedAmax.of(len(weights))
        self.weights = [Source.of(weight) for weight in weights]
        self.in_recipe = False  # True if the last call was meant to run in FP8
        self.in_fp8 = False  # True if the call ran in FP8; False before there are scales
        self.last = 0  # the number of the last forward in training that it ran in
        self.calls = NotedCalls()
        self.kept = KeptWeights()
        self.scaled = ProductState()  # of compiled calls, without weights
        self.tensors: dict[int, tuple[TensorVersion, Tensor]] = {}  # TE's tensors of FP8-only weights
        self.vectors: dict[tuple[float, torch.device], Tensor] = {}  # for norms without a scale or a bias

    def parameters(self) -> list[Tensor]:
        """Return the parameters of the last call's weights that have not been freed."""
        return [parameter for source in self.weights for parameter in source.parameters()]

    def look_at(self, weights: Sequence[Tensor]) -> bool:
        """Note the weights of a call, and free the cache of other weights.

        Returns:
            True if the weights must be quantized again, and cached.
        """
        self.weights = [*map(Source.of, weights)]  # the parameters of all but the first may have changed
        stamp = None if any(map(is_fp8_only, weights)) else stamp_of(weights)
        is_new = stamp is None or stamp != self.kept.stamp
        if is_new:
            self.forget_weights()
            self.kept.sample = None if stamp is None else sample_of(self.parameters())
        self.kept.stamp = stamp
        return is_new and stamp is not None

    @property
    def keeps(self) -> bool:
        """True if the quantized weights of this call are cached."""
        return self.kept.stamp is not None

    @torch.no_grad()
    def fit(self, recipe: Any, weights: Sequence[Tensor]) -> None:
        """Reduce the scales of weights to fit these; TE's steps do not see weights loaded in evaluation.

        If a scale shrinks to less than half, other weights were loaded, and their inputs may differ too. The
        next forward then records inputs again. This synchronizes once per change of the weights.
        """
        state = self.delayed().get("forward")
        if state is None or not all("forward" in product.used for product in self.seen.products):
            return
        own = state.scale[1 : 3 * len(weights) : 3]
        limit = recipe.fp8_format.value.max_fwd / 2**recipe.margin
        fitting = torch.stack([scale_for(weight.abs().amax().float(), limit) for weight in weights])
        if bool((fitting < own / 2).any()):
            self.seen = self.seen.anew()
        own.copy_(torch.minimum(own, fitting))

    def forget_weights(self) -> None:
        """Free the cached quantized weights."""
        self.kept = KeptWeights()
        self.free_weights()

    def tensor_of(self, number: int, weight: FP8Only) -> Tensor:
        """Return TE's tensor of the bytes of an FP8-only weight, within a recipe; TE caches its transpose."""
        if number not in self.tensors or not self.tensors[number][0].is_of(weight.quantized):
            quantizer = self.weight_quantizer(number)
            tensor = Float8Tensor(
                shape=weight.shape,
                dtype=weight.dtype,
                data=weight.quantized.detach(),  # a record must not refer to the tensor it belongs to
                fp8_scale_inv=weight.inverse.detach().reshape(1),
                fp8_dtype=quantizer.dtype,
                quantizer=quantizer,
            )
            self.tensors[number] = TensorVersion.of(weight.quantized), tensor
        return self.tensors[number][1]

    def vector(self, number: float, weight: Tensor) -> Tensor:
        """Return a constant vector with an element for each column of a weight."""
        key = number, weight.device
        if key not in self.vectors:
            with torch.inference_mode(False):  # later calls outside of inference mode read it
                size = weight.shape[-1:]
                self.vectors[key] = torch.full(size, number, dtype=weight.dtype, device=weight.device)
        return self.vectors[key]

    def notice_other_recipe(self) -> None:
        """Calibrate again if TE dropped the scales, for another recipe of another model."""
        if self.seen.has_scales and not self.delayed():
            self.seen = RecordedAmax.of(len(self.weights))

    def note_forward(self, recipe: Any) -> None:
        """Note the forward in training that runs. Calibrate again if the history has no amax any more.

        It has none if the product has not run for as many steps as the history is long, because a parameter
        was frozen meanwhile, and its weight was multiplied in another product.
        """
        forward = running_forward()
        if forward is None or not forward.number:
            return
        waited, self.last = forward.number - self.last, forward.number
        if waited <= recipe.amax_history_len or not self.delayed() or recorded():
            return
        if not self.delayed()["forward"].amax_history[:, 0].any():
            self.seen = RecordedAmax.of(len(self.weights))

    def take_saved(self) -> None:
        """Start with the scales that were loaded for its weights, if there are any."""
        begins = not self.seen.has_scales and not self.seen.again
        if begins and (saved := scale_table.loaded_for(self)) is not None:
            self.init_scales()
            scale_table.restore(self, saved)

    def give_scales(self, recipe: Any, trained: Sequence[bool]) -> None:
        """Set the module's first scales of delayed scaling; the products in `trained` need gradients.

        TE's order is input, weight, output of each product in the forward, and the gradients of output and
        input in the backward.

        If a gradient overflowed, as with a large loss scale, amax is recorded again.
        """
        missing = self.seen.missing_scales(trained)
        if not missing:
            return
        forward: dict[int, Any] = {}
        backward: dict[int, Any] = {}
        for i, direction in missing:
            product = self.seen.products[i]
            if direction == "forward":
                forward |= {3 * i: product.input, 3 * i + 1: product.weight}
            else:
                backward[2 * i] = product.grad
        if not all(amax.isfinite() for amax in (*forward.values(), *backward.values())):  # synchronizes
            self.seen = RecordedAmax.of(len(self.weights))
            return
        self.init_scales()
        meta, limits = self.module.fp8_meta, recipe.fp8_format.value
        _set_scales(meta["scaling_fwd"], forward, limits.max_fwd, recipe)
        _set_scales(meta["scaling_bwd"], backward, limits.max_bwd, recipe)
        for i, direction in missing:
            self.seen.products[i].used.add(direction)

    def state(self, recipe: Any, weights: Sequence[Tensor]) -> ProductState:
        """Return the state of a compiled call, the same object while its tensors are the same."""
        self.init_scales()  # also notes the recipe, in which a checkpoint may repeat the call
        state = self._scales() if is_delayed(recipe) else _UNSCALED
        if not self.keeps:
            return state
        if self.kept.state is None or self.kept.state.forward is not state.forward:
            scaling = scaling_of(recipe)
            with torch.inference_mode(False):  # later calls outside of inference mode read them
                quantized = tuple(scaling.weight(state, *each, False) for each in enumerate(weights))
            self.kept.state = state._replace(weights=quantized)
        return self.kept.state

    def _scales(self) -> ProductState:
        """Return the tensors of the scales, which TE updates in place."""
        meta = self.module.fp8_meta
        FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(meta)
        forward, backward = meta["scaling_fwd"], meta["scaling_bwd"]
        now = (forward.scale, forward.amax_history), (backward.scale, backward.amax_history)
        if any(map(is_not, chain(*now), self.scaled.tensors())) or not self.scaled.forward:
            self.scaled = ProductState(*now)
        return self.scaled

    def state_again(self, call: NotedCall) -> ProductState:
        """Return the state of a compiled call that a checkpoint repeats: its scales, and no amax history."""
        if call.scales is None:
            return _UNSCALED
        if call.state is None:
            _, history = self.scaled.forward  # the step has recorded the amax already
            call.state = self.scaled._replace(forward=(call.scales, torch.empty_like(history)))
        return call.state

    def note_call(self) -> None:
        """Note how this call runs, for a checkpoint that may repeat it."""
        self.calls.note(self.in_fp8, self.in_recipe, self.forward_scales)

    def call_again(self) -> NotedCall | None:
        """Return the call that a checkpoint repeats, by default the last one, or None if it had no recipe."""
        call = self.calls.again() or NotedCall(self.in_fp8, self.in_recipe)
        return call if call.in_recipe else None


_UNSCALED = ProductState()


def _set_scales(state: Any, amaxes: dict[int, Tensor], limit: float, recipe: Any) -> None:
    """Set scale = max / amax / 2^margin, TE's formula for DelayedScaling, from finite amax values."""
    for index, amax in amaxes.items():
        state.scale[index] = scale_for(amax, limit / 2**recipe.margin)
        # the oldest row, because the next step writes to row 0
        state.amax_history[-1, index] = amax
