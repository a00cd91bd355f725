"""A captured graph of a converted model, and the executors that run it."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import fx, nn

from te_transform.backends import limits
from te_transform.execution.call_context import CallContext
from te_transform.execution.division import RankGroup
from te_transform.execution.executors import Executor
from te_transform.execution.executors.captured import Captured
from te_transform.execution.executors.cuda_graph import CudaGraph
from te_transform.execution.executors.fused import Fused
from te_transform.execution.executors.inductor import Inductor
from te_transform.execution.extension import Extension
from te_transform.execution.gathered import note_graph
from te_transform.execution.graph_version import GraphVersion
from te_transform.execution.lower import ScatteredGroups
from te_transform.execution.modes import put_back
from te_transform.execution.writes import unwritten
from te_transform.graph.nodes import name_in_model
from te_transform.plan.match import Plan, Site
from te_transform.plan.options import Options


@dataclass(frozen=True)
class Observer:
    """An observer of the calls of captured graphs: the conversion itself, or verify().

    Attributes:
        see: receives each graph and its arguments before the call.
        runs_captured: True runs the calls as captured, False with all sites fused.
    """

    see: Callable[[CapturedGraph, Sequence[Any]], None]
    runs_captured: bool = False


class GraphOwner(Protocol):
    """The services of a runner for its captured graphs."""

    scattered: ScatteredGroups  # see execution/lower.py
    observer: Observer | None
    extension: Extension | None

    def options_now(self) -> Options:
        """Return the options of the conversion that fit the model's current state."""

    @property
    def ranks(self) -> RankGroup | None:
        """The ranks of a divided model."""

    def tell(self, why: str) -> None:
        """Add a sentence to the report, once."""

    def check(self, graph: CapturedGraph, arguments: Sequence[Any]) -> dict[Site, str]:
        """Return the sites that compute wrong values in the first call of the graph, with the reasons."""


class CallCounts(NamedTuple):
    """The calls of a graph so far.

    Attributes:
        captured: calls that ran as captured.
        fused: calls that ran fused.
        plain: for each op with a kernel, the calls that ran in plain PyTorch.
    """

    captured: int
    fused: int
    plain: list[int]


class CapturedGraph:
    """A graph from dynamo, with the executors that may run it.

    Attributes:
        executors: in the order in which they are asked; the last one runs any call.
        fallbacks: refusals by executor and reason.
        is_extended: True if an extension of the model is asked first.
    """

    def __init__(self, plan: Plan, owner: GraphOwner, is_extended: bool = True):
        self.plan, self.owner, self.options, self.unchecked = plan, owner, owner.options_now(), True
        self.is_extended = is_extended
        self.fallbacks: Counter[tuple[str, str]] = Counter()
        self.disabled: frozenset[Site] = frozenset()
        self.disable(())

    def disable(self, sites: Collection[Site]) -> None:
        """Run these sites as captured, and all others fused."""
        self.disabled = frozenset(sites)
        owner = self.owner
        version = GraphVersion(
            self.plan, self.disabled, self.options, owner.scattered, owner.tell, owner.ranks
        )
        self.fused, self.as_captured = Fused(version), Captured(version)
        self.executors: tuple[Executor, ...] = (self.fused, self.as_captured)
        if self.options.graphs:  # with `compile`, CUDA graphs record the compiled graph
            self.executors = (CudaGraph(version), *self.executors)
        elif self.options.compile:
            self.executors = (Inductor(version), *self.executors)

    def forget_recordings(self) -> None:
        """Free the recordings of calls that run all layers. They hold the memory of a training step."""
        for executor in self.executors:
            if isinstance(executor, CudaGraph):
                executor.specializations.lowered.clear()

    def release(self) -> None:
        """Free compiled code and recordings."""
        self.executors = (self.fused, self.as_captured)

    def __call__(self, *arguments: Any) -> Any:
        owner = self.owner
        if self.options.recipe is not None:
            note_graph()
        if self.unchecked:
            self._check(arguments)
        observer = owner.observer
        if observer is not None:
            observer.see(self, arguments)
        observe_only = observer is not None and observer.runs_captured
        call = CallContext(arguments, observer is not None, observe_only)
        with put_back():
            if not self.options.in_cuda_graphs:
                return self._run(call)
            with limits.replayed:
                return self._run(call)

    def _run(self, call: CallContext) -> Any:
        if self.is_extended and (extension := self.owner.extension) is not None:
            executor = extension.executor(self)
            if executor.refuse(call) is None:
                return executor.run(call)
        *executors, last = self.executors
        for executor in executors:
            if (why := executor.refuse(call)) is None:
                return executor.run(call)
            self.fallbacks[executor.name, why] += 1
        return last.run(call)

    def fallback_sentences(self) -> Counter[str]:
        """Return the fallbacks as sentences, except for those from fused to captured, which ops count."""
        counted = ((name, why, n) for (name, why), n in self.fallbacks.items() if name != Fused.name)
        return Counter({f"did not run {name}: {why}": n for name, why, n in counted})

    def calls(self) -> CallCounts:
        """Return the calls so far."""
        plain = [op.plain_calls.total() for op in self.as_captured.kernel_ops]
        return CallCounts(self.as_captured.calls, self.fused.calls, plain)

    def has_gained(self, before: CallCounts) -> bool:
        """Return True if a call since `before` ran differently from the captured graph."""
        now = self.calls()
        if now[:2] == before[:2]:
            return False
        has_products = bool(self.fused.small_batch.products)
        if not self.as_captured.changes_nothing or (has_products and now.fused > before.fused):
            return True
        return any(map(operator.eq, now.plain, before.plain))

    def _check(self, arguments: Sequence[Any]) -> None:
        """Roll back the sites that are wrong on the values of this call."""
        self.unchecked = False
        self.plan.forget_tensors()
        with unwritten() as writes:
            writes.note_graph(self.plan.captured, arguments)
            wrong = self.owner.check(self, arguments)
        if wrong:
            self.plan.roll_back(wrong)
            self.disable(self.disabled - wrong.keys())
        self.count_anew()

    def count_anew(self) -> None:
        """Reset the counts of fallbacks and calls in plain PyTorch. Earlier calls were not the user's."""
        self.fallbacks.clear()
        for site in self.plan.sites:
            site.fused.plain_calls.clear()

    def values(self, arguments: Sequence[Any]) -> dict[str, Any]:
        """Return the arguments of a call by the names of the placeholders."""
        return {node.name: argument for node, argument in self.placeholders(arguments)}

    def placeholders(self, arguments: Sequence[Any]) -> Iterator[tuple[fx.Node, Any]]:
        """Return the placeholders, each with its argument in a call."""
        return zip(self.captured.graph.find_nodes(op="placeholder"), arguments, strict=True)

    def groups(self, arguments: Sequence[Any]) -> Iterator[tuple[nn.Parameter, ...]]:
        """Yield the groups of parameters that the graph joins in a call with these arguments.

        Groups with zeros between parameters are left out, because they are copied in each call.
        """
        parameters = self.values(arguments)
        for node in self.plan.joins():
            if len(node.all_input_nodes) == len(node.args):
                yield tuple(parameters[source.name] for source in node.args)

    def path_in(self, names: Mapping[int, str], arguments: Sequence[Any]) -> str:
        """Return the path of the module whose forward was captured, in a call with these arguments.

        Args:
            names: the model's parameter names by id. Equal layers share a graph, but not their parameters.
            arguments: of the call.
        """
        for node, argument in self.placeholders(arguments):
            own, name = name_in_model(node), names.get(id(argument), "")
            if own and name.endswith(own):
                return name.removesuffix(own).rstrip(".")
        return ""

    @property
    def captured(self) -> fx.GraphModule:
        """The graph from dynamo."""
        return self.plan.captured
