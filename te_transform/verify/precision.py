"""The recipes of a converted model, and the emulation of its FP8 products, for verify()."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from te_transform.backends.fp8.registry import read_state, state_of
from te_transform.execution.attach import runners
from te_transform.execution.captured_graph import CapturedGraph
from te_transform.graph.inputs import Inputs
from te_transform.graph.preserve import same_state
from te_transform.plan.match import Site
from te_transform.verify.bisect import with_observer
from te_transform.verify.emulate import emulated, formats_of


class Recipes:
    """The recipes of a converted model, and the weights of its products in these recipes.

    Raises:
        ValueError: a recipe cannot be emulated.
    """

    def __init__(self, converted: nn.Module):
        self.converted = converted
        self.names = {id(parameter): name for name, parameter in converted.named_parameters()}
        self.by_runner = {id(c): c.precision.recipe for c in runners(converted) if c.precision is not None}
        self.formats = {key: formats_of(recipe) for key, recipe in self.by_runner.items()}
        self.weights: dict[int, set[str]] = {key: set() for key in self.by_runner}

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(type(recipe).__name__ for recipe in self.by_runner.values()))

    @property
    def delayed(self) -> bool:
        return any(recipe.delayed() for recipe in self.by_runner.values())

    def learn(self, sample: Inputs) -> None:
        """Record the weights of the products that run in FP8, in a call in each mode."""
        for training in (True, False) if self.by_runner else ():
            self.converted.train(training)
            args, kwargs = sample.clone()
            observed = with_observer(self.converted, self._note)
            with same_state(self.converted), self.fresh_scales(), observed, torch.set_grad_enabled(training):
                self.converted(*args, **kwargs)

    def _note(self, graph: CapturedGraph, arguments: Sequence[Any]) -> None:
        names = self.weights.get(id(graph.owner))
        values = graph.values(arguments)
        for site in graph.plan.sites if names is not None else ():
            weights = [values[node.meta["origin"]] for product in site.weights for node in product]
            if weights and _runs_in_fp8(site, weights[0]):
                names.update(self.names[id(weight)] for weight in weights)

    @contextlib.contextmanager
    def emulation(self, model: nn.Module, seed: int | None) -> Iterator[None]:
        """Emulate the recorded FP8 products in `model`, which runs its original forward.

        A `seed` makes the scales random, for other errors of the same size.
        """
        with contextlib.ExitStack() as stack:
            for key, formats in self.formats.items():
                weights = [p for name, p in model.named_parameters() if name in self.weights[key]]
                drawn = formats if seed is None else formats.at_random(seed)
                stack.enter_context(emulated(weights, drawn))
            yield

    @contextlib.contextmanager
    def fresh_scales(self) -> Iterator[None]:
        """Reset the scales of delayed scaling, and restore them afterwards."""
        if not self.delayed:
            yield
            return
        from te_transform.backends import te

        states = [state_of(parameter) for parameter in self.converted.parameters()]
        before = [(state, state.kernels) for state in states]
        try:
            for state in states:
                state.kernels = {}
            with te.forgetting_scales():
                yield
        finally:
            for state, kernels in before:
                state.kernels = kernels


def _runs_in_fp8(site: Site, first: Tensor) -> bool:
    own = read_state(first).in_fp8
    return site.fused.in_fp8 if own is None else own
