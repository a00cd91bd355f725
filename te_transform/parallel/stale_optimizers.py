"""Optimizers of parameters that parallelize() has replaced: their steps would train nothing."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from te_transform.backends.tensor_registry import TensorRegistry
from te_transform.parallel.divided import ParallelError

_NAMES_OF_REPLACED: TensorRegistry[str] = TensorRegistry()  # the names of replaced parameters
_CHECKED: WeakSet[Optimizer] = WeakSet()  # since the last parallelize()


def note_replaced(parameters: Mapping[str, nn.Parameter]) -> None:
    """Make steps of optimizers that hold these parameters raise ParallelError."""
    for name, parameter in parameters.items():
        _NAMES_OF_REPLACED.set(parameter, name)
    _CHECKED.clear()
    _watch_steps()


@cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_check_step)


@torch.compiler.disable
def _check_step(optimizer: Optimizer, *_: Any) -> None:
    if optimizer in _CHECKED:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (name := _NAMES_OF_REPLACED.get(parameter)) is not None:
                raise ParallelError(
                    f"expected an optimizer of the divided parameters, got one made before parallelize(), "
                    f"whose {name} the model no longer has; make the optimizer after parallelize()"
                )
    _CHECKED.add(optimizer)
