"""One captured graph of a converted model, and what runs in its place."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import fx, nn

from te_transform.backends.collectives import Ranks
from te_transform.backends.tracing import transformed
from te_transform.graph.nodes import name_in_model
from te_transform.plan.match import Plan, Site
from te_transform.plan.options import Options
from te_transform.runtime.compiled import CompiledGraph
from te_transform.runtime.few_tokens import FewTokens
from te_transform.runtime.layered import Layered, LayersNow, layered_plan
from te_transform.runtime.lower import Apart, lower
from te_transform.runtime.modes import is_dispatch_mode_on, put_back
from te_transform.runtime.pieces import in_pieces
from te_transform.runtime.writes import unwritten


class Owner(Protocol):
    """What a captured graph asks of the converted model that it belongs to."""

    apart: Apart  # see runtime/lower.py
    failures: list[str]  # sentences for the report
    dry: bool  # whether calls only find out what there is, and run what was captured
    watch: Callable[[CapturedGraph, Sequence[Any]], None] | None  # is told of each call

    def options_now(self) -> Options:
        """Those of the conversion, without what the model as it is now does not go with."""

    @property
    def ranks(self) -> Ranks | None:
        """Those that the model is divided among."""

    def layers_now(self) -> LayersNow | None:
        """Return what decides on the layers of this call, or None if all of them run as captured."""

    def tell(self, why: str) -> None:
        """Add a sentence to the report, once."""

    def check(self, graph: CapturedGraph, arguments: Sequence[Any]) -> dict[Site, str]:
        """What is wrong with sites of the graph on the values of its first call."""


class Calls(NamedTuple):
    """How many calls of a graph ran as it was captured, and with its products fused, and how many of each op
    that kernels may take ran in plain PyTorch."""

    captured: int
    fused: int
    plain: list[int]


class CapturedGraph:
    """What dynamo calls in the place of a graph: the graph with its sites fused."""

    def __init__(self, plan: Plan, owner: Owner):
        self.plan, self.owner, self.options, self.unchecked = plan, owner, owner.options_now(), True
        self.ran = {True: 0, False: 0}  # calls, by whether they ran as it was captured
        self.disabled: frozenset[Site] = frozenset()
        self.layered: tuple[Layered | None] | None = None  # the graph in layers; None before it is made
        self.disable(())

    def disable(self, sites: Collection[Site]) -> None:
        """Let these sites run as they were captured, and all others fused."""
        self.disabled = frozenset(sites)
        apart, options, failures = self.owner.apart, self.options, self.owner.failures
        self.run: Callable[..., Any] = in_pieces(lower(self.plan, apart, self.disabled))
        self.few_tokens = FewTokens(self.plan, apart, self.disabled, options, failures)
        self.compiled: CompiledGraph | None = None
        if options.compile or options.graphs:
            self.compiled = CompiledGraph(
                self.plan, apart, self.disabled, options, self.run, failures, self.owner.ranks
            )

    def __call__(self, *arguments: Any) -> Any:
        owner = self.owner
        if self.unchecked:
            self._check(arguments)
        if owner.watch is not None:
            owner.watch(self, arguments)
            run = self.plan.captured.forward if owner.dry else self.run
            with put_back():
                return run(*arguments)
        if (layers := owner.layers_now()) is not None and (layered := self._in_layers()) is not None:
            return layered(layers, arguments)
        with put_back() as in_modes:
            if transformed():
                return self.run(*arguments)
            if self.compiled is not None:
                # modes see torch calls, of which a compiled graph makes none
                sees = in_modes or is_dispatch_mode_on()
                return self.run(*arguments) if sees else self.compiled(*arguments)
            takes = self.few_tokens.takes(arguments)
            self.ran[takes] += 1
            return self.few_tokens.run(*arguments) if takes else self.run(*arguments)

    def _in_layers(self) -> Layered | None:
        """Return the graph in layers that a call may leave out, or None if it has none."""
        if self.layered is None:
            made = layered_plan(self.plan, self.options, self.owner.tell)
            if made is not None:
                run = CapturedGraph(made[0], self.owner)
                run.layered = (None,)  # which runs in layers
                made = Layered(*made, run, self.path_in)
                if self.compiled is not None and self.options.graphs:
                    self.compiled.lowered.clear()  # recordings of all layers hold the memory of a step
            self.layered = (made,)
        return self.layered[0]

    def calls(self) -> Calls:
        """Those up to now."""
        in_kernels = self.few_tokens.in_kernels
        return Calls(self.ran[True], self.ran[False], [op.plain_calls.total() for op in in_kernels])

    def has_gained(self, before: Calls) -> bool:
        """Whether anything ran otherwise than it was captured in the calls since then."""
        now, few_tokens = self.calls(), self.few_tokens
        if now[:2] == before[:2]:
            return False
        if not few_tokens.changes_nothing or (few_tokens.products and now.fused > before.fused):
            return True
        return any(map(operator.eq, now.plain, before.plain))

    def _check(self, arguments: Sequence[Any]) -> None:
        """Take back the sites that are wrong on the values of this call."""
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
        """Count the calls in plain PyTorch from here on: those before were not the user's."""
        for site in self.plan.sites:
            site.fused.plain_calls.clear()

    def values(self, arguments: Sequence[Any]) -> dict[str, Any]:
        """The arguments of a call by the names of the graph's placeholders."""
        return {node.name: argument for node, argument in self.placeholders(arguments)}

    def placeholders(self, arguments: Sequence[Any]) -> Iterator[tuple[fx.Node, Any]]:
        """The graph's placeholders, each with its argument in a call."""
        nodes = (node for node in self.plan.captured.graph.nodes if node.op == "placeholder")
        return zip(nodes, arguments, strict=True)

    def groups(self, arguments: Sequence[Any]) -> Iterator[tuple[nn.Parameter, ...]]:
        """The parameters that the graph joins in a call with these arguments.

        Without those that have zeros between them: they are copied together wherever they lie.
        """
        held = self.values(arguments)
        for node in self.plan.joins():
            if len(node.all_input_nodes) == len(node.args):
                yield tuple(held[source.name] for source in node.args)

    def path_in(self, names: Mapping[int, str], arguments: Sequence[Any]) -> str:
        """Where in a model the module lies whose forward was captured, in a call with these arguments.

        Args:
            names: of the model's parameters, by their ids; layers that are alike share a graph, not their
                parameters.
        """
        for node, argument in self.placeholders(arguments):
            own, name = name_in_model(node), names.get(id(argument), "")
            if own and name.endswith(own):
                return name.removesuffix(own).rstrip(".")
        return ""

    @property
    def captured(self) -> fx.GraphModule:
        """The graph as dynamo gave it."""
        return self.plan.captured
