"""A captured graph in layers that a call may leave out, for whoever decides on that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from te_transform.graph import edit
from te_transform.plan.assign import put_in_recipe
from te_transform.plan.match import Plan, plan
from te_transform.plan.options import Options
from te_transform.plan.residual import Layer, residual
from te_transform.runtime.pieces import dropped

log = logging.getLogger(__name__)


class LayerPolicy(Protocol):
    """What decides on the layers of a converted model in its training calls."""

    def is_on(self) -> bool:
        """Return True if a layer may be left out, or scaled, in this step."""

    def factor(self, path: str) -> float | None:
        """Return the factor of the branches of a layer in this step, or None if the layer is left out."""


@dataclass(frozen=True)
class LayersNow:
    """What decides on the layers in a call of the module at `path`, whose layers are named below it."""

    policy: LayerPolicy
    path: str

    def factor(self, layer: Layer) -> float | None:
        """Return the factor of a layer's branches, or None if the call leaves the layer out."""
        return self.policy.factor(f"{self.path}.{layer.path}".strip("."))


def layered_plan(
    plan_: Plan, options: Options, tell: Callable[[str], None]
) -> tuple[Plan, tuple[Layer, ...]] | None:
    """Plan a captured graph with its layers marked; None if it has no layers that can be left out."""
    found = residual(plan_)
    for reason in dict.fromkeys(found.refused.values()):
        paths = [path for path, why in found.refused.items() if why == reason]
        tell(sentence := f"{_never(paths)} never dropped: {reason}")
        log.warning(sentence)
    if not found.layers:
        return None
    made = plan(edit.with_layers(plan_.captured, found.layers), options, plan_.modules)
    if options.recipe is not None:
        put_in_recipe(made, options)
    return made, found.layers


def _never(paths: Sequence[str]) -> str:
    return f"{paths[0]} is" if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more layers are"


class Layered:
    """A graph whose last arguments are the factors of its layers.

    Args:
        plan_: of the graph.
        layers: in the order of the factors.
        run: runs the graph.
    """

    def __init__(self, plan_: Plan, layers: Sequence[Layer], run: Callable[..., Any]):
        self.plan, self.layers, self.run = plan_, layers, run
        self.kept: dict[tuple[float, torch.device], Tensor] = {}

    def __call__(self, now: LayersNow, arguments: Sequence[Any]) -> Any:
        device = next(held.device for held in arguments if isinstance(held, Tensor))
        factors = [now.factor(layer) for layer in self.layers]
        left_out = frozenset(number for number, factor in enumerate(factors) if factor is None)
        tensors = self._tensors([1.0 if factor is None else factor for factor in factors], device)
        token = dropped.set(left_out)
        try:
            return self.run(*arguments, *tensors)
        finally:
            dropped.reset(token)

    def _tensors(self, factors: Sequence[float], device: torch.device) -> list[Tensor]:
        """The factors as tensors; those of the last call, if they are the same."""
        keys = [(factor, device) for factor in factors]
        self.kept = {
            key: self.kept[key]
            if key in self.kept
            else torch.full((), key[0], dtype=torch.float32, device=device)
            for key in keys
        }
        return [self.kept[key] for key in keys]
