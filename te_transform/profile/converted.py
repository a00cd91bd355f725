"""Label the operations of a converted model's graphs with their modules and sites."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import fx, nn

from te_transform.execution.attach import runners
from te_transform.execution.call_context import CallContext
from te_transform.execution.captured_graph import CapturedGraph
from te_transform.execution.executors import Executor
from te_transform.execution.executors.captured import Captured
from te_transform.execution.executors.fused import Fused
from te_transform.execution.lower import lower, lower_unfused
from te_transform.graph.nodes import path_below, path_of
from te_transform.profile.ranges import Label, Ranges


class Labeled:
    """The executor that runs a graph node by node, in ranges of the nodes' modules and sites."""

    name = "with labels"

    def __init__(self, graph: CapturedGraph, names: dict[int, str], ranges: Ranges):
        self.graph, self.ranges = graph, ranges
        self.names = names  # of the parameters, by id
        self.others: Sequence[Executor] = graph.executors
        self.sites = {id(site.fused): site.rules[-1] for site in graph.plan.sites}
        self.lowered = {each: self._lowered(each) for each in (graph.fused, graph.as_captured) if each.calls}

    def refuse(self, call: CallContext) -> str | None:
        """Return why the graph runs unlabeled: it is compiled, recorded, or observed."""
        chosen = next(executor for executor in self.others if executor.refuse(call) is None)
        call.prepared = None
        if call.is_observed or not isinstance(chosen, (Fused, Captured)):
            return "the call runs compiled code"
        call.prepared = chosen
        return None

    def run(self, call: CallContext) -> Any:
        """Run the graph of the executor that would run the call."""
        root = self.graph.path_in(self.names, call.args)
        lowered = self.lowered.get(call.prepared) or self._lowered(call.prepared)
        return _Interpreter(lowered, self.ranges, root, self.sites).run(*call.args)

    def _lowered(self, executor: Executor) -> fx.GraphModule:
        version = self.graph.as_captured.version
        arguments = version.plan, version.scattered, version.disabled
        if isinstance(executor, Fused):
            return lower(*arguments)
        return lower_unfused(*arguments, rotations=self.graph.as_captured.fuses_rotations)


class _Interpreter(fx.Interpreter):
    """An interpreter that begins a range whenever the module or site changes."""

    def __init__(self, graph: fx.GraphModule, ranges: Ranges, root: str, sites: dict[int, tuple[str, str]]):
        super().__init__(graph)
        self.ranges, self.root, self.sites = ranges, root, sites
        self.number: int | None = None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().run(*args, **kwargs)
        finally:
            if self.number is not None:
                self.ranges.leave()

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in ("placeholder", "output") and (number := self._number(n)) != self.number:
            if self.number is not None:
                self.ranges.leave()
            self.ranges.enter(number)
            self.number = number
        return super().run_node(n)

    def _number(self, node: fx.Node) -> int:
        rule, path = "", path_of(node)
        if node.op == "call_module":
            rule, path = self.sites.get(id(self.module.get_submodule(node.target)), (rule, path))
        path = path_below(self.root, path)
        try:
            kind = type(self.ranges.model.get_submodule(path)).__name__
        except AttributeError:  # a path below a wrapper
            kind = ""
        return self.ranges.number(Label(path, kind, rule))


@contextmanager
def labeled_graphs(model: nn.Module, ranges: Ranges) -> Iterator[None]:
    """Label the operations of all graphs of the converted models in `model`."""
    graphs = [graph for runner in runners(model) for graph in runner.graphs]
    names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    before = [(graph, graph.executors, graph.fallbacks.copy()) for graph in graphs]
    try:
        for graph in graphs:
            graph.executors = (Labeled(graph, names, ranges), *graph.executors)
        yield
    finally:
        for graph, executors, fallbacks in before:
            graph.executors, graph.fallbacks = executors, fallbacks
