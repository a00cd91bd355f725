"""TE's FP8 recipes, and the steps of delayed scaling, which TE keeps for the whole process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch  # before TE, which loads libraries that come with it
import transformer_engine.pytorch as te
from torch import Tensor
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from te_transform.backends.fp8.products import Scaling
from te_transform.backends.repeated_forwards import ForwardNodes, running_backward

_FAST = recipes.MMParams(use_split_accumulator=False)


class _FastDelayedScaling(recipes.DelayedScaling):
    """Delayed scaling whose gradients accumulate in the tensor cores too, as the forward does."""

    # TE's modules read these names from any recipe that has them
    fp8_gemm_fprop = fp8_gemm_dgrad = fp8_gemm_wgrad = _FAST


_RECIPES = {
    # TE would reduce the amax of all modules twice per step, and needs the same modules on all ranks.
    # fp8/precision.py reduces in one collective, whichever modules ran.
    "fp8-delayed": lambda: recipes.DelayedScaling(reduce_amax=False),
    "fp8-delayed-fast": lambda: _FastDelayedScaling(reduce_amax=False),
    "fp8-current": recipes.Float8CurrentScaling,
    "fp8-current-fast": lambda: recipes.Float8CurrentScaling(fp8_gemm_dgrad=_FAST, fp8_gemm_wgrad=_FAST),
    "fp8-block": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
}
_AVAILABLE = {
    recipes.Float8BlockScaling: "is_fp8_block_scaling_available",
    recipes.MXFP8BlockScaling: "is_mxfp8_available",
}


def recipe_of(asked: Any) -> Any:
    """Return TE's recipe with this name, or the recipe object itself.

    Raises:
        ValueError: `asked` is neither, or this GPU has no kernels for it; the message says what is missing.
    """
    if isinstance(asked, str):
        asked = _RECIPES[asked]()
    if not isinstance(asked, recipes.Recipe):
        raise ValueError(f"expected a recipe of TE or one of {', '.join(_RECIPES)}, got {asked!r}")
    available = getattr(te, _AVAILABLE.get(type(asked), "is_fp8_available"))
    runs, why = available(return_reason=True)
    if not runs:
        raise ValueError(f"expected a recipe that this GPU supports, got {type(asked).__name__}: {why}")
    return asked


def is_delayed(recipe: Any) -> bool:
    """Return True if the recipe computes scales from earlier steps."""
    return isinstance(recipe, recipes.DelayedScaling)


def multiple(recipe: Any) -> int:
    """Return the number that must divide the rows and columns of a product."""
    return 32 if isinstance(recipe, recipes.MXFP8BlockScaling) else 16


def autocast(recipe: Any, enabled: bool = True) -> contextlib.AbstractContextManager:
    """Run TE's modules in the recipe's precision."""
    return te.autocast(enabled=enabled, recipe=recipe)


def recipe_now() -> Any:
    """Return the active recipe, or None."""
    return FP8GlobalStateManager.get_fp8_recipe() if FP8GlobalStateManager.is_fp8_enabled() else None


def scaling_of(recipe: Any) -> Scaling | None:
    """Return how a compiled graph computes the products of a recipe, or None if only TE's modules can.

    Only they can with several scales per tensor, and with rare settings.
    """
    delayed = is_delayed(recipe)
    if not delayed and not isinstance(recipe, recipes.Float8CurrentScaling):
        return None
    if getattr(recipe, "use_power_2_scales", False) or getattr(recipe, "backward_override", None) is not None:
        return None
    formats = {"HYBRID": (torch.float8_e4m3fn, torch.float8_e5m2), "E4M3": (torch.float8_e4m3fn,) * 2}
    if recipe.fp8_format.name not in formats:
        return None
    # the defaults of TE's modules
    split = {"fp8_gemm_fprop": False, "fp8_gemm_dgrad": True, "fp8_gemm_wgrad": True}
    for name in split:
        if hasattr(recipe, name):
            split[name] = getattr(recipe, name).use_split_accumulator
    return Scaling(*formats[recipe.fp8_format.name], tuple(not each for each in split.values()), delayed)


def update_scales_after_backward(outputs: Sequence[Any]) -> None:
    """Update the scales of gradients at the end of each backward from these outputs of a forward.

    A TE module that ran earlier in the step does so itself.
    """
    trained = [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]
    if not trained or not FP8GlobalStateManager.is_first_fp8_module():
        return
    waiting: list[bool] = []

    def update() -> None:
        waiting.clear()
        _update_scales_of_gradients()

    def at_the_end(grad: Tensor) -> None:
        if not waiting:
            waiting.append(True)
            torch.autograd.Variable._execution_engine.queue_callback(update)

    for out in trained:
        out.register_hook(at_the_end)


def update_scales_after_repeated(forward: ForwardNodes | None) -> None:
    """Update the scales of gradients after the backward of a forward that a checkpoint repeats.

    In TE, the first module that runs with gradients in a step does so in its own backward. The forward of a
    reentrant checkpoint has no gradients, so none of its modules was the first.
    """
    if needs_update() if forward is None else forward.needs_update:
        running_backward().after(forward, _update_scales_of_gradients)


def needs_update() -> bool:
    """Return True if no module of this step will update the scales of gradients in its own backward."""
    state, _, first = _state_of_step()
    return getattr(state, first)


def _update_scales_of_gradients() -> None:
    FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)


@contextlib.contextmanager
def within_step(recipe: Any) -> Iterator[None]:
    """Enter the recipe within a step that an outer autocast ends, or that has ended."""
    with _no_new_step(), autocast(recipe):
        yield


@contextlib.contextmanager
def _no_new_step() -> Iterator[None]:
    """Make the next autocast a nested one, and no module in it the first of its step.

    TE ends a step of delayed scaling with the outermost autocast, and updates the scales of gradients in the
    backward of the first module.
    """
    state, depth, first = _state_of_step()
    before = {name: getattr(state, name) for name in (depth, first)}
    setattr(state, depth, before[depth] + 1)
    setattr(state, first, False)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(state, name, value)


def _state_of_step() -> tuple[Any, str, str]:
    """Return TE's object for the step, and the names of its autocast depth and its first-module flag."""
    state = getattr(FP8GlobalStateManager, "quantization_state", None)
    if state is None:  # an older TE
        return FP8GlobalStateManager, "FP8_AUTOCAST_DEPTH", "IS_FIRST_FP8_MODULE"
    return state, "autocast_depth", "is_first_fp8_module"


@contextlib.contextmanager
def forgetting_scales() -> Iterator[None]:
    """Make TE forget the scales of modules that first run within this context.

    At the end of each step, TE updates the scales of all modules that ever ran, including freed ones.
    """
    state = getattr(FP8GlobalStateManager, "quantization_state", FP8GlobalStateManager)
    buffers = state.global_amax_buffer, state.global_amax_history_buffer, state.global_scale_buffer
    before = [{key: len(entries) for key, entries in buffer.items()} for buffer in buffers]
    try:
        yield
    finally:
        for buffer, lengths in zip(buffers, before, strict=True):
            for key, entries in buffer.items():
                del entries[lengths.get(key, 0) :]
