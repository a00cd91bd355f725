"""Find the sites that cause a failure, by running the others unfused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from typing import Any

from torch import nn

from te_transform.execution.attach import runners, with_setting
from te_transform.execution.captured_graph import CapturedGraph, Observer
from te_transform.execution.writes import unwritten
from te_transform.graph.grouped import grouped
from te_transform.graph.nodes import path_below
from te_transform.plan.match import Site


def bisect_failures(suspects: Sequence[str], fails: Callable[[Sequence[str]], bool]) -> list[str]:
    """Return the `suspects` that fail alone, else the smallest failing half found by bisection."""
    if len(suspects) <= 1:
        return list(suspects)
    middle = len(suspects) // 2
    halves = [half for half in (suspects[:middle], suspects[middle:]) if fails(half)]
    return [one for half in halves for one in bisect_failures(half, fails)] or list(suspects)


@contextlib.contextmanager
def with_observer(model: nn.Module, see: Callable[[CapturedGraph, Sequence[Any]], None]) -> Iterator[None]:
    """Run every captured graph fused, and call `see` with each called graph and its arguments."""
    with unwritten() as writes:

        def watch(graph: CapturedGraph, arguments: Sequence[Any]) -> None:
            writes.note_graph(graph.captured, arguments)
            see(graph, arguments)

        with with_setting(runners(model), "observer", Observer(watch)):
            yield


class Called:
    """The called graphs, each with the path of the module that called it.

    If several blocks share a graph, the path is that of the first block in the model. Call order does not
    matter: a checkpoint reruns the blocks in the backward, last block first.
    """

    def __init__(self, model: nn.Module):
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.order = {path: place for place, (path, _) in enumerate(model.named_modules())}
        self.paths: dict[CapturedGraph, str] = {}

    def note(self, graph: CapturedGraph, arguments: Sequence[Any]) -> None:
        """Record a call."""
        path = graph.path_in(self.names, arguments)
        first = self.paths.setdefault(graph, path)
        if self.order.get(path, 0) < self.order.get(first, 0):
            self.paths[graph] = path

    @property
    def sites(self) -> dict[str, list[tuple[CapturedGraph, Site]]]:
        """The sites of these graphs by path in the model; a path has one site per size and mode."""
        return grouped(
            (path_below(path, site.path), (graph, site))
            for graph, path in self.paths.items()
            for site in graph.plan.sites
        )

    @contextlib.contextmanager
    def only(self, paths: Collection[str]) -> Iterator[None]:
        """Run only the sites at these paths fused, and all others as captured."""
        others = (pairs for path, pairs in self.sites.items() if path not in paths)
        off = grouped(chain.from_iterable(others))
        before = [(graph, graph.disabled) for graph in off]
        try:
            for graph, disabled in before:
                graph.disable(disabled | {*off[graph]})
            yield
        finally:
            for graph, disabled in before:
                graph.disable(disabled)
