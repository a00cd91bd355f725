"""The errors of the exchange in a state dict: one tensor for each matrix, with any number of ranks.

`errors` is fp32 [2, 1 + elements]: a row of the worker error, and a row of the server error. The first column
is the owner: a rank and the number of ranks, or OF_ALL_RANKS. The owner is part of the tensor because
torch.distributed.checkpoint saves a tensor of any rank if several ranks have tensors of the same name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from te_transform.training.one_bit.checks import OneBitError
from te_transform.training.one_bit.layout import FlatLayout

log = logging.getLogger(__name__)
ERRORS = "errors"
OF_ALL_RANKS = (-1, -1)  # the owner of errors that belong to all ranks
State = dict[nn.Parameter, dict[str, Any]]
Shapes = Callable[[nn.Parameter], dict[str, tuple[int, ...]]]
ErrorOwner = tuple[int, int]


def with_errors(
    packed: dict[str, Any],
    parameters: list[nn.Parameter],
    layout: FlatLayout,
    errors: tuple[Tensor, Tensor],
    owner: ErrorOwner,
) -> dict[str, Any]:
    """Return a state dict of `parameters` with the errors of matrices, fp32 [padded] each."""
    state = dict(packed["state"])
    for index, parameter in enumerate(parameters):
        if parameter.dim() > 1 and index in state:
            views = [layout.view(error, parameter).reshape(1, -1) for error in errors]
            marks = torch.tensor(owner, dtype=torch.float32, device=layout.device)[:, None]
            state[index] = {**state[index], ERRORS: torch.cat([marks, torch.cat(views)], 1)}
    return {**packed, "state": state}


def check(state_dict: dict[str, Any], names: set[str], optimizer: str) -> None:
    """Raise OneBitError if another class of optimizer made the state."""
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= set(state_dict):
        given = ", ".join(map(str, state_dict)) if isinstance(state_dict, dict) else type(state_dict).__name__
        raise OneBitError(
            f"expected a state of {optimizer} with state and param_groups, got {given or 'none'}; load what "
            f"{optimizer}.state_dict() returned"
        )
    names_of_states = [set(state) - {ERRORS} for state in state_dict["state"].values()]
    foreign = sorted({name for state in names_of_states for name in state ^ names})
    if foreign or any("frozen" not in group for group in state_dict["param_groups"]):
        differing = [f"{'with' if any(n in s for s in names_of_states) else 'without'} {n}" for n in foreign]
        raise OneBitError(
            f"expected a state of {optimizer}, got one of another optimizer"
            f"{' ' + ', '.join(differing) if foreign else ''}; load what {optimizer}.state_dict() returned"
        )


def check_parameters(states: State, needed: Iterable[nn.Parameter], shapes: Shapes) -> None:
    """Raise OneBitError if the states belong to other parameters, or lack a needed parameter.

    `shapes` returns the expected shapes of the state of a parameter by name.
    """
    if missing := [tuple(p.shape) for p in needed if p not in states]:
        raise OneBitError(
            f"expected a state of every trained parameter after the freeze, got none for shape {missing[0]}; "
            "freeze the parameters that were frozen in the saved run"
        )
    for parameter in states:
        stored = {name: tuple(getattr(value, "shape", ())) for name, value in states[parameter].items()}
        if different := set(stored.items()) ^ set(shapes(parameter).items()):
            name, _ = min(different)
            raise OneBitError(
                f"expected {name} of shape {shapes(parameter).get(name)} for a parameter of shape "
                f"{tuple(parameter.shape)}, got {stored.get(name)}; load the state of the same model, with "
                "its parameters in the same order"
            )


def by_parameter(state_dict: dict[str, Any], parameters: list[nn.Parameter]) -> State:
    """Return the saved state of each parameter, by the order of the groups."""
    keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    states = state_dict["state"]  # torch.optim.Optimizer compares the sizes of groups
    return {p: states[key] for key, p in zip(keys, parameters, strict=False) if key in states}


def owners(states: State) -> set[ErrorOwner]:
    """Return the owners of saved errors."""
    marks = [state[ERRORS][:, 0] for state in states.values() if ERRORS in state]
    return {(int(rank), int(ranks)) for rank, ranks in torch.stack(marks).tolist()} if marks else set()


def errors(states: State, layout: FlatLayout, own: ErrorOwner) -> tuple[Tensor, Tensor] | None:
    """Return worker and server errors, fp32 [padded] each. Errors of other owners are zero.

    Return None if all errors have other owners.
    """
    errors_of_owner = torch.zeros(2, layout.padded, dtype=torch.float32, device=layout.device)
    if foreign := owners(states) - {own, OF_ALL_RANKS}:
        log.warning(
            "errors of rank %s of %s do not belong to rank %s of %s, and start at zero. Call synchronize() "
            "on all ranks before one state is saved for all, or save each rank's own state_dict()",
            *min(foreign), *own,
        )  # fmt: skip
    for parameter in (p for p in layout.parameters if ERRORS in states.get(p, {})):
        saved = states[parameter][ERRORS]
        if owners({parameter: states[parameter]}) <= {own, OF_ALL_RANKS}:
            for buffer, error in zip(errors_of_owner, saved[:, 1:], strict=True):
                layout.view(buffer, parameter).copy_(error.view(parameter.shape))
    return (errors_of_owner[0], errors_of_owner[1]) if errors_of_owner.any() else None
