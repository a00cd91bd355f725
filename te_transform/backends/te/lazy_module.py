"""TE's modules, built on meta and without parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

from te_transform.backends.fp8.checkpointed_calls import NotedCall
from te_transform.backends.te.recipes import (
    FP8GlobalStateManager,
    update_scales_after_repeated,
    within_step,
)


class LazyModule:
    """One of TE's modules, built when it first runs; each call passes the tensors to use as parameters.

    Args:
        make: builds the module, on meta.
        names: the attributes of the module that the tensors of a call replace, in the order of the call.
        products: the number of its matrix products.
    """

    def __init__(self, make: Callable[[], nn.Module], names: Sequence[str], products: int):
        self.make, self.names, self.products = make, names, products
        self.built: nn.Module | None = None

    @property
    def module(self) -> nn.Module:
        """The module, built at its first call."""
        if self.built is None:
            self.built = self.make()
            self.built._parameters.clear()
        return self.built

    @property
    def scales_by_blocks(self) -> bool:
        """True if the recipe of its last call in FP8 has more than one scale for a weight."""
        recipe = None if self.built is None else self.built.fp8_meta.get("recipe")
        return isinstance(recipe, (recipes.Float8BlockScaling, recipes.MXFP8BlockScaling))

    def run(self, x: Tensor, tensors: Sequence[Tensor | None], adds: bool, keeps: bool = False) -> Tensor:
        """Run the module with these tensors in the place of its parameters.

        Args:
            x: the input.
            tensors: the parameters; None for a missing bias.
            adds: True to add the gradients of the weights to their main_grad.
            keeps: True to cache the quantized weights.
        """
        own = vars(self.module)
        is_fp8_only = any(isinstance(tensor, Float8Tensor) for tensor in tensors)
        own.update(zip(self.names, tensors, strict=True))
        own.update(fuse_wgrad_accumulation=adds, primary_weights_in_fp8=is_fp8_only)
        try:
            # True would also overwrite the gradients of earlier calls
            return self.module.forward(x, is_first_microbatch=False if keeps else None)
        finally:
            own.update(dict.fromkeys(self.names))

    def free_weights(self) -> None:
        """Free the quantized weights that the module keeps."""
        if self.built is not None:
            self.built._fp8_workspaces.clear()

    def weight_quantizer(self, number: int) -> Any:
        """Return a quantizer of the weight of one product, by rows, within a recipe."""
        self.init_scales()
        quantizer = self.module._get_weight_quantizers()[number].copy()
        quantizer.internal = False
        quantizer.set_usage(rowwise=True, columnwise=False)
        return quantizer

    def init_scales(self) -> None:
        """Create the module's tensors for scales, if it has none."""
        # A call without a recipe sets `fp8` to False, and the module then gives out no quantizers until
        # init_fp8_metadata() has set it again.
        if self.module.fp8 and self.module.fp8_meta.get("recipe") is FP8GlobalStateManager.get_fp8_recipe():
            return
        inference = torch.is_inference_mode_enabled()  # whose tensors later steps could not write to
        with torch.inference_mode(False) if inference else contextlib.nullcontext():
            self.module.init_fp8_metadata(num_gemms=self.products)

    def delayed(self) -> dict[str, Any]:
        """Return the states of delayed scaling, "forward" and "backward"; none before there are any."""
        meta = {} if self.built is None else self.built.fp8_meta
        states = {"forward": meta.get("scaling_fwd"), "backward": meta.get("scaling_bwd")}
        return states if all(hasattr(state, "amax_history") for state in states.values()) else {}

    def forward_scales(self) -> Tensor | None:
        """Return a copy of the forward's scales of delayed scaling, or None."""
        state = self.module.fp8_meta.get("scaling_fwd")
        if not hasattr(state, "amax_history"):
            return None
        with _disable_current_modes():
            return state.scale.clone()

    @contextlib.contextmanager
    def as_before(self, call: NotedCall, recipe: Any) -> Iterator[None]:
        """Enter the recipe with the scales that this call of a forward had, within its step.

        The step has recorded the amax already. Selective checkpoints match operations by their order, so
        operations on scales are hidden from them.
        """
        if call.scales is None:
            with within_step(recipe):
                yield
            return
        update_scales_after_repeated(call.forward)
        state = self.module.fp8_meta["scaling_fwd"]
        tensors = state.scale, state.amax_history[0]
        with _disable_current_modes():
            now = [tensor.clone() for tensor in tensors]
            state.scale.copy_(call.scales)
        try:
            with within_step(recipe):
                yield
        finally:
            with _disable_current_modes():
                torch._foreach_copy_(tensors, now)
