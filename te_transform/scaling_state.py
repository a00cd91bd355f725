"""The scales of delayed scaling in a checkpoint: a resumed run goes on with the numbers that it had."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from te_transform.execution.precision import Precision
from te_transform.execution.runner import runner_of
from te_transform.plan.model import ModelError, check_module
from te_transform.plan.precision_plan import PrecisionError


def scaling_state(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """What delayed scaling keeps from step to step, for a checkpoint beside the weights.

        dcp.save({"model": ..., "scales": te_transform.scaling_state(model)}, checkpoint_id=folder)

    Processes that share the weights, by DDP or a mesh, call this together: each gets what all have seen, so
    that it can be loaded in any number of processes. The keys and sizes are there before anything has run, as
    torch.distributed.checkpoint wants them for loading.

    Args:
        model: what te_transform.convert() returned, or something that contains it.

    Returns:
        By the name of each matrix that may run in FP8, tensors in fp32 on the CPU: "scale" [5], the
        "amax_history" [length, 5] and what was "seen" [3] before there are scales; a column each for input,
        weight, output, and the gradients of output and input. Empty where the recipe keeps nothing.

    Raises:
        ModelError: there is no converted model in `model`.
    """
    owner, precision = _found(model, "scaling_state")
    return {} if precision is None else precision.scales(owner)


def load_scaling_state(model: nn.Module, state: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Let the next call of `model` quantize by the scales that scaling_state() returned.

    Raises:
        ModelError: there is no converted model in `model`.
        te_transform.PrecisionError: the state is none, another model's, or that of another recipe; nothing is
            loaded then.
    """
    owner, precision = _found(model, "load_scaling_state")
    _check_form(state)
    needed = {} if precision is None else precision.template(owner)
    sizes = {name: {key: [*value.shape] for key, value in row.items()} for name, row in state.items()}
    for name in dict.fromkeys([*needed, *sizes]):
        wanted = {key: [*value.shape] for key, value in needed.get(name, {}).items()}
        if sizes.get(name, {}) != wanted:
            found = sizes.get(name, "missing")
            raise _refused(f" of {name}", found, f"{wanted or 'none'} are")
    if precision is not None:
        copied = {
            name: {key: value.detach().clone() for key, value in row.items()} for name, row in state.items()
        }
        precision.load_scales(copied)


def _check_form(state: Any) -> None:
    """Raise unless `state` is a dict of dicts of tensors."""
    if not isinstance(state, Mapping):
        raise _refused("", f"a {type(state).__name__}", "a dict of dicts of tensors is")
    for name, row in state.items():
        if not isinstance(row, Mapping):
            raise _refused(f" of {name}", f"a {type(row).__name__}", "a dict of tensors is")
        kinds = {key: type(value).__name__ for key, value in row.items()}
        if not all(isinstance(value, Tensor) for value in row.values()):
            raise _refused(f" of {name}", kinds, "a dict of tensors is")


def _refused(whose: str, found: Any, needed: str) -> PrecisionError:
    return PrecisionError(
        f"the scales{whose} are {found}, {needed} needed: load what te_transform.scaling_state() returned "
        "for a model that was converted with this recipe"
    )


def _found(model: nn.Module, function: str) -> tuple[nn.Module, Precision | None]:
    """The converted model in `model`, which `function` was given, and its precision if that keeps scales."""
    check_module(model, function)
    for module in model.modules():
        if (converted := runner_of(module)) is not None:
            precision = converted.precision
            return module, precision if precision is not None and precision.is_delayed else None
    raise ModelError(
        f"{type(model).__name__} holds no converted model, one is needed: convert it before its scales are "
        "saved or loaded"
    )
