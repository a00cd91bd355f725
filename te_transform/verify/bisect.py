"""Find the sites that a failure comes from, by running the others as they were captured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from torch import nn

from te_transform.execution.captured_graph import CapturedGraph, Observer
from te_transform.execution.runner import Runner, runner_of
from te_transform.execution.writes import unwritten
from te_transform.plan.match import Site


def bisect_failures(suspects: Sequence[str], fails: Callable[[Sequence[str]], bool]) -> list[str]:
    """Those of `suspects` that fail alone, else the smallest part that fails together, found by halving."""
    if len(suspects) <= 1:
        return list(suspects)
    middle = len(suspects) // 2
    halves = [half for half in (suspects[:middle], suspects[middle:]) if fails(half)]
    return [one for half in halves for one in bisect_failures(half, fails)] or list(suspects)


def conversions(model: nn.Module) -> list[Runner]:
    """What was converted in `model`: itself, or modules of it."""
    found = {id(c): c for c in map(runner_of, model.modules()) if c is not None}
    return list(found.values())


@contextlib.contextmanager
def watched(model: nn.Module, see: Callable[[CapturedGraph, Sequence[Any]], None] | None) -> Iterator[None]:
    """Run all that is fused in each captured graph, and tell `see` of its calls, with their arguments; if it
    is None, run them as outside of verify()."""
    before = [(converted, converted.observer) for converted in conversions(model)]
    with unwritten() as writes:

        def watch(graph: CapturedGraph, arguments: Sequence[Any]) -> None:
            writes.note_graph(graph.captured, arguments)
            see(graph, arguments)

        try:
            for converted, _ in before:
                converted.observer = None if see is None else Observer(watch)
            yield
        finally:
            for converted, was in before:
                converted.observer = was


class Called:
    """The graphs that were called, each with the path of the module that it was called for.

    Of several blocks that share a graph that is the first one, though a backward that repeats them, for a
    checkpoint, begins with the last.
    """

    def __init__(self, model: nn.Module):
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.order = {path: place for place, (path, _) in enumerate(model.named_modules())}
        self.paths: dict[CapturedGraph, str] = {}

    def note(self, graph: CapturedGraph, arguments: Sequence[Any]) -> None:
        """A call."""
        path = graph.path_in(self.names, arguments)
        first = self.paths.setdefault(graph, path)
        if self.order.get(path, 0) < self.order.get(first, 0):
            self.paths[graph] = path

    @property
    def sites(self) -> dict[str, list[tuple[CapturedGraph, Site]]]:
        """The sites of these graphs by their paths in the model: one for each size and mode."""
        found: dict[str, list[tuple[CapturedGraph, Site]]] = {}
        for graph, path in self.paths.items():
            for site in graph.plan.sites:
                found.setdefault(f"{path}.{site.path}".strip("."), []).append((graph, site))
        return found

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
