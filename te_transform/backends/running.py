"""What ops ask of the converted model that runs: whether its weights stay, and which products are in its
recipe."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from te_transform.backends.joined import parameters_of, state_of
from te_transform.backends.stamp import Stamp


@dataclass
class _Model:
    weights_stay: bool = False
    tell: Callable[[], None] | None = None
    number: int | None = None  # of its forward, among all of the process


_running = _Model()
_numbers = count()


@contextlib.contextmanager
def running(weights_stay: bool, tell: Callable[[], None]) -> Iterator[None]:
    """Let ops know of the model that runs meanwhile.

    Args:
        weights_stay: whether its weights are those of its last call, unless their versions say otherwise.
        tell: lets the states of its parameters say whether their products run in FP8; is called where a
            state says nothing, because the parameter is new.
    """
    global _running
    before, _running = _running, _Model(weights_stay, tell, next(_numbers))
    try:
        yield
    finally:
        _running = before


def is_evaluating() -> bool:
    """Whether the forward that runs is one of evaluation, without gradients."""
    return _running.weights_stay and not torch.is_grad_enabled()


def forward_number() -> int | None:
    """What tells the forward that runs from every other one; None where none runs, as in a backward."""
    return _running.number


def in_recipe(weight: Tensor, default: bool) -> bool:
    """Whether a product that begins with this weight runs in a recipe that is on."""
    state = state_of(weight)
    if not state.told and _running.tell is not None:
        _running.tell()
    return default if state.in_fp8 is None else state.in_fp8


def stamp_of(weights: Sequence[Tensor]) -> Any:
    """What has to be the same for a later call to use these weights as this one has quantized them.

    None where they may not be kept. Over the calls of one accumulation weights do not change; in evaluation
    their stamps tell.
    """
    gradients = state_of(weights[0]).gradients
    if gradients is not None:
        return gradients, torch.is_grad_enabled()
    if not is_evaluating():
        return None
    parameters = [parameter for weight in weights for parameter in parameters_of(weight)]
    if any(p.is_inference() or "_fsdp_flattened" in p.__dict__ for p in parameters):
        return None
    return tuple(map(Stamp.of, parameters))


def forget_weights(parameters: Iterable[Tensor]) -> None:
    """Free the quantized weights that are kept for products which begin with one of these parameters."""
    for parameter in parameters:
        for kernel in state_of(parameter).kernels.values():
            kernel.forget_weights()
