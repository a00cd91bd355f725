"""Attach a runner to a model, find the runners of models, and detach them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from torch import nn

from te_transform.execution.blocks import parts
from te_transform.execution.classes import ModuleRole, Role, restore_class, swap_class
from te_transform.execution.gathered import gather_again
from te_transform.execution.runner import Runner
from te_transform.plan.model import CONVERTED, ModelError


def attach(model: nn.Module, runner: Runner) -> None:
    """Make `model` and its parts run their captured forward."""
    swap_class(model, ModuleRole(runner, Role.MODEL))
    for part in parts(model):
        with suppress(ModelError):  # a direct call of the part runs the user's own code
            swap_class(part, ModuleRole(runner, Role.PART))


def detach(model: nn.Module) -> None:
    """Restore the class and forward of every module in `model`. Nothing else was changed."""
    if (runner := runner_of(model)) is not None:
        runner.release()
        if runner.division is not None:
            runner.division.collect()
            runner.division = None
    for module in model.modules():
        gather_again(module)
        restore_class(module)
    for parameter in model.parameters():
        parameter.__dict__.pop(CONVERTED, None)


def is_divided(model: nn.Module) -> bool:
    """Return True if te_transform.parallelize() has divided the model, or a part of it, among ranks."""
    return any(runner.division is not None for runner in runners(model))


def runner_of(model: nn.Module) -> Runner | None:
    """Return the runner of a converted model, or None."""
    role = vars(model).get(CONVERTED)
    return role.runner if role is not None else None


def without_extensions(model: nn.Module) -> AbstractContextManager[None]:
    """Run the converted models in `model` without their extensions."""
    return with_setting(runners(model), "extension", None)


def original_forward(model: nn.Module) -> AbstractContextManager[None]:
    """Run the user's own code of all converted models in `model`."""
    return with_setting([runner.policy for runner in runners(model)], "run_original", True)


@contextmanager
def with_setting(holders: Sequence[Any], name: str, value: Any) -> Iterator[None]:
    """Set an attribute of all holders inside of the context."""
    before = [(holder, getattr(holder, name)) for holder in holders]
    try:
        for holder in holders:
            setattr(holder, name, value)
        yield
    finally:
        for holder, old in before:
            setattr(holder, name, old)


def runners(model: nn.Module) -> list[Runner]:
    """Return the runners of all converted models in `model`: the model itself, or modules of it."""
    return [*{id(r): r for r in map(runner_of, model.modules()) if r is not None}.values()]
