"""Find the sites that a failure comes from, by running the others as they were captured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from torch import nn

from te_transform.graph.nodes import name_in_model
from te_transform.plan.match import Site
from te_transform.runtime.captured import CapturedGraph
from te_transform.runtime.converted import Converted, converted_of


def bisect_failures(suspects: Sequence[str], fails: Callable[[Sequence[str]], bool]) -> list[str]:
    """Those of `suspects` that fail alone, else the smallest part that fails together, found by halving."""
    if len(suspects) <= 1:
        return list(suspects)
    middle = len(suspects) // 2
    halves = [half for half in (suspects[:middle], suspects[middle:]) if fails(half)]
    return [one for half in halves for one in bisect_failures(half, fails)] or list(suspects)


def conversions(model: nn.Module) -> list[Converted]:
    """What was converted in `model`: itself, or modules of it."""
    found = {id(c): c for c in map(converted_of, model.modules()) if c is not None}
    return list(found.values())


@contextlib.contextmanager
def watched(model: nn.Module, see: Callable[[CapturedGraph, Sequence[Any]], None]) -> Iterator[None]:
    """Tell `see` of each call of a captured graph, with its arguments."""
    before = [(converted, converted.watch) for converted in conversions(model)]
    try:
        for converted, _ in before:
            converted.watch = see
        yield
    finally:
        for converted, watch in before:
            converted.watch = watch


class Called:
    """The sites of the graphs that were called, by their paths in the model."""

    def __init__(self, model: nn.Module):
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.sites: dict[str, dict[tuple[CapturedGraph, Site], None]] = {}

    def note(self, graph: CapturedGraph, arguments: Sequence[Any]) -> None:
        """A call; of a graph that several blocks share, the first block gives the paths."""
        prefix = self._prefix(graph, arguments)
        known = {pair for pairs in self.sites.values() for pair in pairs}
        for site in graph.plan.sites:
            if (graph, site) not in known:
                path = f"{prefix}.{site.path}".strip(".")
                self.sites.setdefault(path, {})[graph, site] = None

    @contextlib.contextmanager
    def only(self, paths: Collection[str]) -> Iterator[None]:
        """Let the sites at these paths run fused, and all others as they were captured."""
        off: dict[CapturedGraph, set[Site]] = {}
        for path, pairs in self.sites.items():
            for graph, site in pairs:
                off.setdefault(graph, set()).update(() if path in paths else (site,))
        before = [(graph, graph.disabled) for graph in off]
        try:
            for graph, disabled in before:
                graph.disable(disabled | off[graph])
            yield
        finally:
            for graph, disabled in before:
                graph.disable(disabled)

    def _prefix(self, graph: CapturedGraph, arguments: Sequence[Any]) -> str:
        """The path of the module that was called, by the name that one of its parameters has in the model."""
        placeholders = (node for node in graph.plan.captured.graph.nodes if node.op == "placeholder")
        for node, argument in zip(placeholders, arguments, strict=True):
            own, name = name_in_model(node), self.names.get(id(argument), "")
            if own and name.endswith(own):
                return name.removesuffix(own).rstrip(".")
        return ""
