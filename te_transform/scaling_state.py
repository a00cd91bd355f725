"""Save and load the scales of delayed scaling, so that a resumed run continues with the same scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from te_transform.backends.fp8.precision import Precision
from te_transform.execution.attach import runner_of
from te_transform.plan.model import ModelError, check_module
from te_transform.plan.precision_plan import PrecisionError


def scaling_state(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the state of delayed scaling, to be saved in a checkpoint next to the weights.

        dcp.save({"model": ..., "scales": te_transform.scaling_state(model)}, checkpoint_id=folder)

    All ranks that share the weights, by DDP or a mesh, must call this together. Each rank gets the combined
    state of all, which can be loaded on any number of ranks. Keys and sizes are known before the first call,
    as torch.distributed.checkpoint requires for loading.

    Args:
        model: A model returned by te_transform.convert(), or a module that contains it.

    Returns:
        For the name of each matrix that may run in FP8, a dict of fp32 tensors on the CPU. It has "scale"
        [5], "amax_history" [length, 5], and "seen" [3], the values recorded before there are scales. The 5
        columns are input, weight, output, and the gradients of output and input. Matrices that are
        multiplied at once have equal rows. The result is empty if the recipe has no such state.

    Raises:
        ModelError: `model` contains no converted model.
    """
    owner, precision = _converted_with_precision(model, "scaling_state")
    return {} if precision is None else precision.scales(owner)


def load_scaling_state(model: nn.Module, state: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Load the scales that scaling_state() returned; the next call of `model` quantizes with them.

    Raises:
        ModelError: `model` contains no converted model.
        te_transform.PrecisionError: `state` is not a scaling state, or belongs to another model or recipe;
            nothing is loaded then.
    """
    owner, precision = _converted_with_precision(model, "load_scaling_state")
    _check_form(state)
    needed = {} if precision is None else precision.template(owner)
    sizes = {name: {key: [*value.shape] for key, value in row.items()} for name, row in state.items()}
    for name in dict.fromkeys([*needed, *sizes]):
        wanted = {key: [*value.shape] for key, value in needed.get(name, {}).items()}
        if sizes.get(name, {}) != wanted:
            numbers = sizes.get(name, "none")
            raise _scales_error(f" of {name}", numbers, f"{wanted or 'none'}")
    if precision is not None:
        copied = {
            name: {key: value.detach().clone() for key, value in row.items()} for name, row in state.items()
        }
        precision.load_scales(copied)


def _check_form(state: Any) -> None:
    """Raise unless `state` is a dict of dicts of tensors."""
    if not isinstance(state, Mapping):
        raise _scales_error("", f"a {type(state).__name__}", "a dict of dicts of tensors")
    for name, row in state.items():
        if not isinstance(row, Mapping):
            raise _scales_error(f" of {name}", f"a {type(row).__name__}", "a dict of tensors")
        kinds = {key: type(value).__name__ for key, value in row.items()}
        if not all(isinstance(value, Tensor) for value in row.values()):
            raise _scales_error(f" of {name}", kinds, "a dict of tensors")


def _scales_error(whose: str, numbers: Any, needed: str) -> PrecisionError:
    return PrecisionError(
        f"expected {needed} for the scales{whose}, got {numbers}; load what te_transform.scaling_state() "
        "returned for a model that was converted with this recipe"
    )


def _converted_with_precision(model: nn.Module, function: str) -> tuple[nn.Module, Precision | None]:
    """Return the converted model in `model`, and its precision if it uses delayed scaling."""
    check_module(model, function)
    for module in model.modules():
        if (converted := runner_of(module)) is not None:
            precision = converted.precision
            return module, precision if precision is not None and precision.is_delayed else None
    raise ModelError(
        f"expected a converted model for {function}(), got a {type(model).__name__} without; convert it "
        "before its scales are saved or loaded"
    )
