"""Take an optimizer's state along: from an original model to a converted one, or back."""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from te_transform.originals import Original, fusions, original_parameters


class OptimizerError(ValueError):
    """The optimizer's state cannot be said in the other model's parameters."""


@dataclass(frozen=True)
class _Owned:
    """What an optimizer keeps for one original parameter: its group, and its state."""

    group: int
    state: dict[str, Any]


def move_optimizer(
    optimizer: Optimizer, target: nn.Module, source: nn.Module | None = None, *, inplace: bool = False
) -> Optimizer:
    """The same optimizer, hyperparameters and state, for the parameters of `target`.

    Works both ways: from a model to its conversion, and from a converted model to a reverted copy of it.
    State that has the shape of its parameter (Adam's and AdamW's moments, momentum) is joined and split as
    the parameters are, bitwise.

    Args:
        optimizer: any torch.optim optimizer over the parameters of `source`.
        target: the model whose parameters it is to step from now on.
        source: the model it steps now; None where `target` was converted in place.
        inplace: change `optimizer` itself, so that schedulers and scalers go on with it; else it is left
            untouched.

    Raises:
        OptimizerError: parameters that are joined in `target` are in different groups, have made different
            numbers of
            steps, or have state of another shape (Adafactor's rows and columns, LBFGS); or the optimizer has
            parameters that are not the source's. Nothing has been changed then.
    """
    owned = _owned(optimizer, _names(target if source is None else source, converted_in_place=source is None))
    groups: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
    state: dict[Tensor, dict[str, Any]] = defaultdict(dict)
    for held, originals in _by_held(original_parameters(target)).items():
        parts = {name: owned[name] for name in originals if name in owned}
        if parts:
            groups[_group(parts, originals)].append(held)
            joined = _joined(held, originals, parts)
            if joined:
                state[held] = joined
    moved = optimizer if inplace else copy.copy(optimizer)
    moved.param_groups = [
        {**group, "params": held} for group, held in zip(optimizer.param_groups, groups, strict=True)
    ]
    moved.state = state
    return moved


def _names(source: nn.Module, converted_in_place: bool) -> dict[int, dict[str, Original]]:
    """The original names that each parameter an optimizer may hold stands for, by the parameter's id."""
    names: dict[int, dict[str, Original]] = defaultdict(dict)
    for name, original in original_parameters(source).items():
        names[id(original.held)][name] = original
    if converted_in_place:
        for fusion in fusions(source):
            for name, reference in fusion.originals.items():
                parameter = reference()
                if parameter is not None:
                    names[id(parameter)].setdefault(name, Original(parameter))
    return names


def _owned(optimizer: Optimizer, names: dict[int, dict[str, Original]]) -> dict[str, _Owned]:
    owned = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise OptimizerError(
                    f"the optimizer's group {index} has a parameter of shape {list(parameter.shape)} that is "
                    "none of the source model's: pass the model that the optimizer was made for as source="
                )
            for name, original in names[id(parameter)].items():
                state = {
                    k: _part(original, v, k, name) for k, v in optimizer.state.get(parameter, {}).items()
                }
                owned[name] = _Owned(index, state)
    return owned


def _part(original: Original, value: Any, key: str, name: str) -> Any:
    if not isinstance(value, Tensor):
        return copy.copy(value)
    if value.dim() == 0:  # Adam counts its steps in a tensor, in place
        return value.clone()
    if value.shape == original.held.shape:
        return original.part(value)
    if original.view is None:
        return value
    raise OptimizerError(
        f"the state {key!r} of {name} has shape {list(value.shape)}, to be split it needs the shape of its "
        f"parameter {list(original.held.shape)}: revert without the optimizer, or start a new one"
    )


def _by_held(originals: dict[str, Original]) -> dict[nn.Parameter, dict[str, Original]]:
    found: dict[nn.Parameter, dict[str, Original]] = {}
    for name, original in originals.items():
        found.setdefault(original.held, {})[name] = original
    return found


def _group(parts: dict[str, _Owned], originals: dict[str, Original]) -> int:
    missing, groups = originals.keys() - parts.keys(), {part.group for part in parts.values()}
    if missing or len(groups) > 1:
        found = ", ".join(f"{name} in {parts[name].group if name in parts else 'none'}" for name in originals)
        raise OptimizerError(
            f"one parameter now holds what is in different groups of the optimizer ({found}), it has to be "
            "in one: give them one group, or convert with skip="
        )
    return groups.pop()


def _joined(held: nn.Parameter, originals: dict[str, Original], parts: dict[str, _Owned]) -> dict[str, Any]:
    states = [part.state for part in parts.values()]
    keys = list(dict.fromkeys(key for state in states for key in state))
    joined = {}
    for key in keys:
        values = {name: part.state.get(key) for name, part in parts.items()}
        joined[key] = _join(held, originals, values, key)
    return joined


def _join(held: nn.Parameter, originals: dict[str, Original], values: dict[str, Any], key: str) -> Any:
    first, view = next(iter(values.values())), next(iter(originals.values())).view
    if isinstance(first, Tensor) and first.dim() > 0 and all(isinstance(v, Tensor) for v in values.values()):
        if view is None:
            return first.clone()
        if all(v.numel() == view.layout.part(held, name).numel() for name, v in values.items()):
            with torch.no_grad():
                return view.layout.join(values).contiguous()
    elif view is None or all(_equal(first, value) for value in values.values()):
        return first
    raise OptimizerError(
        f"the state {key!r} of {', '.join(values)} differs or has another shape than the parameters, to be "
        "joined it needs theirs and the same number of steps: convert with skip= for these modules, or start "
        "a new optimizer"
    )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and one == other
