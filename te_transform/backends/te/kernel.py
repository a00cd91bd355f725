"""TE's modules for products, with the scales and quantized weights of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn
from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

from te_transform.backends import fp8, scale_rows
from te_transform.backends.joined import Source
from te_transform.backends.quantized import Quantized, is_quantized, scale_for
from te_transform.backends.running import sample_of, stamp_of
from te_transform.backends.scales import Call, Calls, Seen
from te_transform.backends.te.lazy_module import LazyModule
from te_transform.backends.te.recipes import FP8GlobalStateManager, is_delayed, scaling_of
from te_transform.backends.tensor_version import TensorVersion


@dataclass
class KeptWeights:
    """The quantized weights that a kernel keeps for later calls.

    Attributes:
        stamp: of the weights, see stamp_of(); None if they are not kept.
        sample: some numbers of the weights when they were quantized.
        state: of compiled calls, with the quantized weights.
    """

    stamp: Any = None
    sample: Tensor | None = None
    state: fp8.State | None = None


class Kernel:
    """TE's module for the products that begin with one parameter, and what it keeps for them.

    `names` are the module's attributes that a call's tensors stand for, in the order of the call.
    """

    def __init__(self, make: Callable[[], nn.Module], names: Sequence[str], weights: Sequence[Tensor]):
        self.te, self.seen = LazyModule(make, names, len(weights)), Seen.of(len(weights))
        self.weights = [Source.of(weight) for weight in weights]
        self.in_fp8 = False  # whether its last call was
        self.calibrating = False  # whether its last call was in its own dtype for want of scales
        self.calls = Calls()
        self.kept = KeptWeights()
        self.scaled = fp8.State()  # of compiled calls, without weights
        self.tensors: dict[
            int, tuple[TensorVersion, Tensor]
        ] = {}  # TE's, of weights that are held in FP8 alone
        self.vectors: dict[tuple[float, torch.device], Tensor] = {}  # for norms without a scale or a bias

    @property
    def module(self) -> nn.Module:
        """TE's module, made when it first runs."""
        return self.te.module

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
        return self.te.scales_by_blocks

    def look_at(self, weights: Sequence[Tensor]) -> bool:
        """Note the weights of a call, and free what is kept of others; whether they are to be quantized
        anew, and kept."""
        self.weights = [*map(Source.of, weights)]  # any but the first may be of another parameter by now
        stamp = None if any(map(is_quantized, weights)) else stamp_of(weights)
        is_new = stamp is None or stamp != self.kept.stamp
        if is_new:
            self.forget_weights()
            self.kept.sample = None if stamp is None else sample_of(self.parameters())
        self.kept.stamp = stamp
        return is_new and stamp is not None

    @property
    def keeps(self) -> bool:
        """Whether the quantized weights of this call are to be kept."""
        return self.kept.stamp is not None

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
        self.kept = KeptWeights()
        self.te.free_weights()

    def tensor_of(self, number: int, weight: Quantized) -> Tensor:
        """TE's tensor of the bytes that a weight is held in, within a recipe; it keeps the transpose."""
        if number not in self.tensors or not self.tensors[number][0].is_of(weight.held):
            quantizer = self.te.weight_quantizer(number)
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

    def delayed(self) -> dict[str, Any]:
        """Its states of delayed scaling, "forward" and "backward"; none before there are any."""
        return self.te.delayed()

    def notice_other_recipe(self) -> None:
        """Begin anew where another model that has the weights too ran in a recipe of another kind since, with
        which TE drops the scales."""
        if self.seen.used and not self.delayed():
            self.seen = Seen.of(len(self.weights))

    def take_saved(self) -> None:
        """Begin with the scales that were loaded for its weights, if there are any."""
        if not self.seen.used and not self.seen.again and (saved := scale_rows.taken(self)) is not None:
            self.te.init_scales()
            scale_rows.restore(self, saved, self.delayed())

    def give_scales(self, recipe: Any, gradients: bool) -> None:
        """Give the module its first scales of delayed scaling, in TE's order.

        That is input, weight and output of each product forward, the gradients of output and input backward.
        """
        limits, products = recipe.fp8_format.value, list(enumerate(self.seen.products))
        if self.seen.is_new("forward"):
            self.te.init_scales()
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
        if self.kept.state is None or self.kept.state.forward is not state.forward:
            scaling = scaling_of(recipe)
            with torch.inference_mode(False):  # later calls without it read them
                held = tuple(scaling.weight(state, *each, False) for each in enumerate(weights))
            self.kept.state = state._replace(weights=held)
        return self.kept.state

    def _scales(self) -> fp8.State:
        """The scales, as TE updates them."""
        self.te.init_scales()
        meta = self.module.fp8_meta
        FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(meta)
        forward, backward = meta["scaling_fwd"], meta["scaling_bwd"]
        now = (forward.scale, forward.amax_history), (backward.scale, backward.amax_history)
        if any(map(is_not, chain(*now), self.scaled.tensors())) or not self.scaled.forward:
            self.scaled = fp8.State(*now)
        return self.scaled

    def note_call(self) -> None:
        """Note how this call runs, which a checkpoint may make again."""
        self.calls.note(self.in_fp8, self.calibrating, self.te.forward_scales)

    def call_again(self) -> Call | None:
        """The call that a checkpoint makes again, the last one if none was noted; None if that was in no
        recipe."""
        found = self.calls.again() or Call(self.in_fp8, self.calibrating)
        return found if found.in_recipe else None


_UNSCALED = fp8.State()


def _set_scales(state: Any, amaxes: dict[int, Tensor], limit: float, recipe: Any) -> None:
    """scale = max / amax / 2^margin, which is TE's own formula."""
    for index, amax in amaxes.items():
        state.scale[index] = scale_for(amax, limit / 2**recipe.margin)
        # as the oldest: the next step writes to row 0
        state.amax_history[-1, index] = torch.where(amax.isfinite(), amax, 0.0)
