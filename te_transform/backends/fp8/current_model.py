"""The converted model that is running, for the ops of its graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from te_transform.backends.fp8.registry import PARAMETERS, read_state, state_of
from te_transform.backends.joined import parameters_of
from te_transform.backends.repeated_forwards import ForwardNodes
from te_transform.backends.tensor_version import TensorVersion
from te_transform.graph.context import set_to


@dataclass
class _Model:
    weights_stay: bool = False
    token: Any = None
    name_parameters: Callable[[], None] | None = None
    forget_changed: Callable[[], None] | None = None  # None after its call
    forward: ForwardNodes | None = None


_NO_MODEL = _Model()
_running: ContextVar[_Model] = ContextVar("_running", default=_NO_MODEL)


@contextlib.contextmanager
def running(
    weights_stay: bool,
    name_parameters: Callable[[], None],
    forget_changed: Callable[[], None] | None = None,
    token: Any = None,
    number: int = 0,
) -> Iterator[ForwardNodes]:
    """Tell ops which model runs, and return the numbers of the nodes of its forward.

    Args:
        weights_stay: True if the weights are those of the last call unless their versions differ.
        name_parameters: writes into the states of the parameters which products run in FP8. It is called if a
            state has another token, because the parameter is new or belongs to another model too.
        forget_changed: frees outdated quantized weights, whatever their versions are. It is called once,
            before the first quantized weight is used.
        token: what `name_parameters` writes into the states.
        number: of the forward among those of the model in training; 0 if TE updates no scales after it.
    """
    _count_steps()
    forward = ForwardNodes(number=number)
    model = _Model(weights_stay, token, name_parameters, forget_changed, forward)
    try:
        with set_to(_running, model):
            yield forward
    finally:
        forward.close()


def is_evaluating() -> bool:
    """Return True in a forward in evaluation mode without gradients."""
    return _running.get().weights_stay and not torch.is_grad_enabled()


def running_forward() -> ForwardNodes | None:
    """Return the running forward, or None if none runs, as in a backward."""
    return _running.get().forward


def in_recipe(weight: Tensor, default: bool) -> bool:
    """Return True if a product that begins with this weight runs in the active recipe."""
    model = _running.get()
    if read_state(weight).model is not model.token and model.name_parameters is not None:
        model.name_parameters()
    in_fp8 = read_state(weight).in_fp8
    return default if in_fp8 is None else in_fp8


def stamp_of(weights: Sequence[Tensor]) -> Any:
    """Return what must be equal for a later call to reuse the quantized weights of this call.

    The result is None if they cannot be reused. They can be within one accumulation, and in evaluation mode.
    """
    gradients = read_state(weights[0]).gradients
    if gradients is None and not is_evaluating():
        return None
    parameters = [parameter for weight in weights for parameter in parameters_of(weight)]
    if any(p.is_inference() or "_fsdp_flattened" in p.__dict__ for p in parameters):
        return None
    model = _running.get()
    if is_evaluating() and model.forget_changed is not None:
        forget_changed, model.forget_changed = model.forget_changed, None
        forget_changed()
    written = [(TensorVersion.of(parameter), state_of(parameter).steps) for parameter in parameters]
    return gradients, torch.is_grad_enabled(), *written


def sample_of(parameters: Iterable[Tensor]) -> Tensor:
    """Return about one element of each row of the parameters, each in another column.

    A write through `.data` changes no version. These elements reveal it unless it changes few others: merged
    adapters and averaged weights change nearly all.
    """
    with torch.no_grad():
        return torch.cat([*map(_diagonal, parameters)])


def _diagonal(parameter: Tensor) -> Tensor:
    step = parameter.shape[-1] + 1
    if not parameter.is_contiguous():
        return parameter.reshape(-1)[::step]
    return parameter.as_strided((-(-parameter.numel() // step),), (step,))  # a third of the CPU time


@cache
def _count_steps() -> None:
    """Count optimizer steps in the states of parameters from now on."""
    register_optimizer_step_post_hook(_count_step)


@torch.compiler.disable
def _count_step(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (state := PARAMETERS.get(parameter)) is not None:
                state.steps += 1
