"""The errors of the exchange in a state dict: one tensor for each parameter, whatever the number of ranks."""

from __future__ import annotations

import logging
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from te_transform.training.one_bit.checks import OneBitError
from te_transform.training.one_bit.layout import Layout

logger = logging.getLogger(__name__)
ERRORS = ("worker_error", "server_error")
State = dict[nn.Parameter, dict[str, Any]]


def with_errors(
    packed: dict[str, Any],
    parameters: list[nn.Parameter],
    layout: Layout,
    errors: tuple[Tensor, Tensor],
    rank: int,
) -> dict[str, Any]:
    """Return a state dict of `parameters` with the errors of matrices; rank -1 means they are gathered."""
    state = dict(packed["state"])
    for index, parameter in enumerate(parameters):
        if parameter.dim() > 1 and index in state:
            views = (layout.view(error, parameter) for error in errors)
            state[index] = {**state[index], **dict(zip(ERRORS, views, strict=True))}
    owner = {"errors_of_rank": rank, "errors_of_world_size": layout.world_size}
    return {**packed, "state": state, "param_groups": [group | owner for group in packed["param_groups"]]}


def check(state_dict: dict[str, Any], names: set[str], optimizer: str) -> None:
    """Raise OneBitError if the state is not one of this class of optimizer."""
    found = {name for state in state_dict["state"].values() for name in state}
    foreign = sorted(found - names - {*ERRORS})
    if foreign or any("frozen" not in group for group in state_dict["param_groups"]):
        raise OneBitError(
            f"expected a state of {optimizer}, got one of another optimizer"
            f"{' with ' + ', '.join(foreign) if foreign else ''}; load what {optimizer}.state_dict() returned"
        )


def by_parameter(state_dict: dict[str, Any], parameters: list[nn.Parameter]) -> State:
    """Return the saved state of each parameter; the order of the groups says which is which."""
    keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    states = state_dict["state"]
    return {p: states[key] for key, p in zip(keys, parameters, strict=True) if key in states}


def errors(states: State, layout: Layout, rank: int, group: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Return the saved worker and server errors for this rank, fp32 [padded] each; None if there are none."""
    owner = group.get("errors_of_rank"), group.get("errors_of_world_size")
    if owner[0] is None:
        return None
    if owner[0] != -1 and owner != (rank, layout.world_size):
        logger.warning(
            "errors of rank %s of %s do not belong to rank %s of %s, and start at zero; save "
            "gathered_state_dict() for all ranks, or state_dict() of each rank for itself",
            *owner, rank, layout.world_size,
        )  # fmt: skip
        return None
    found = torch.zeros(2, layout.padded, dtype=torch.float32, device=layout.device)
    for parameter in (p for p in layout.parameters if ERRORS[0] in states.get(p, {})):
        for buffer, name in zip(found, ERRORS, strict=True):
            layout.view(buffer, parameter).copy_(states[parameter][name])
    return found[0], found[1]
