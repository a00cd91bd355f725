"""What ops ask of the converted model that runs: whether its weights stay, and which products are in its
recipe."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from te_transform.backends.joined import State, parameters_of, state_of
from te_transform.backends.tensor_version import TensorVersion


@dataclass
class _Model:
    weights_stay: bool = False
    token: Any = None
    tell: Callable[[], None] | None = None
    look: Callable[[], None] | None = None  # until it has been called
    number: int | None = None  # of its forward, among all of the process


_running = _Model()
_numbers = count()


@contextlib.contextmanager
def running(
    weights_stay: bool,
    tell: Callable[[], None],
    look: Callable[[], None] | None = None,
    token: Any = None,
) -> Iterator[None]:
    """Let ops know of the model that runs meanwhile.

    Args:
        weights_stay: whether its weights are those of its last call, unless their versions say otherwise.
        tell: lets the states of its parameters say whether their products run in FP8; is called where a
            state does not have its token, because the parameter is new, or another model's too.
        look: forgets quantized weights that are not up to date, whatever their versions say; is called once,
            before the first of them is used.
        token: what tell() leaves in the states.
    """
    global _running
    _count_steps()
    before, _running = _running, _Model(weights_stay, token, tell, look, next(_numbers))
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
    if state.told is not _running.token and _running.tell is not None:
        _running.tell()
    return default if state.in_fp8 is None else state.in_fp8


def stamp_of(weights: Sequence[Tensor]) -> Any:
    """What has to be the same for a later call to use these weights as this one has quantized them.

    None where they may not be kept: they are over the calls of one accumulation, and in evaluation.
    """
    gradients = state_of(weights[0]).gradients
    if gradients is None and not is_evaluating():
        return None
    parameters = [parameter for weight in weights for parameter in parameters_of(weight)]
    if any(p.is_inference() or "_fsdp_flattened" in p.__dict__ for p in parameters):
        return None
    if is_evaluating() and _running.look is not None:
        look, _running.look = _running.look, None
        look()
    written = [(TensorVersion.of(parameter), state_of(parameter).steps) for parameter in parameters]
    return gradients, torch.is_grad_enabled(), *written


def sample_of(parameters: Iterable[Tensor]) -> Tensor:
    """About one number of each row of the parameters, each in another column.

    A write through `.data` changes no version. It is seen by these numbers, unless it changes few others
    alone: adapters that are merged, and averages that take the place of weights, change nearly all.
    """
    with torch.no_grad():
        return torch.cat([*map(_spread_over, parameters)])


def _spread_over(parameter: Tensor) -> Tensor:
    step = parameter.shape[-1] + 1
    if not parameter.is_contiguous():
        return parameter.reshape(-1)[::step]
    return parameter.as_strided((-(-parameter.numel() // step),), (step,))  # in a third of the CPU's time


@cache
def _count_steps() -> None:
    """Let the states of parameters count the steps of optimizers from now on."""
    register_optimizer_step_post_hook(_count_step)


@torch.compiler.disable
def _count_step(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(state := parameter.__dict__.get("_te_transform"), State):
                state.steps += 1


def forget_weights(parameters: Iterable[Tensor]) -> None:
    """Free the quantized weights that are kept for products which begin with one of these parameters."""
    for parameter in parameters:
        for kernel in state_of(parameter).kernels.values():
            kernel.forget_weights()
