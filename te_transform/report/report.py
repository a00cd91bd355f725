"""What convert() did, where, and why not elsewhere: to read, to test against, and to draw."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from torch import fx

from te_transform.execution.timing import Timing, duration
from te_transform.graph.keywords import did_you_mean
from te_transform.graph.nodes import called, name_in_model, path_of
from te_transform.passes import PIPELINE
from te_transform.plan.memory import Memory
from te_transform.plan.precision_plan import PrecisionPlan
from te_transform.plan.rule import Outcome
from te_transform.report import drawing, page
from te_transform.report.drawing import Part
from te_transform.report.places import Places, gather, listed, most_valuable_first

if TYPE_CHECKING:
    import networkx

Which = Literal["before", "after"]

_CATALOGUE = tuple(rule.name for rule in PIPELINE)
_WIDTH = 110  # columns of str(report)


class ExpectationError(AssertionError):
    """The model was not fused as Report.expect() was told it would be."""


@dataclass(frozen=True, repr=False)
class Report:
    """Every place where a rule applied or nearly did, and the graphs of the model before and after.

    `before` is the canonical graph of the forward, or of its largest part where it was captured in parts; in
    `after` each fusion is one call_module. `parts` are all of them, which the page draws. `notes` are
    sentences on the conversion as a whole, `breaks` on what was not captured, `precision` says what runs in
    FP8, `plain_calls` why and how often fused ops ran in plain PyTorch, and `memory` what a training step is
    predicted to take, on TE. With compile="auto", `timings` are what a call took in each way to run the
    model, and `chosen` is the name of the one that it runs in. `options` are those of the conversion,
    `inputs` its example inputs in words. `fallbacks` count the calls of captured graphs that did not run
    compiled or as CUDA graphs though that was asked for, by sentences that say why.
    """

    model: str
    sites: tuple[Outcome, ...]
    before: fx.Graph
    after: fx.Graph
    notes: tuple[str, ...] = ()
    breaks: tuple[str, ...] = ()
    precision: PrecisionPlan | None = None
    plain_calls: Mapping[str, int] = field(default_factory=dict)
    memory: Memory | None = None
    timings: tuple[Timing, ...] = ()
    chosen: str = ""
    options: tuple[str, ...] = ()
    inputs: str = ""
    parts: tuple[Part, ...] = ()
    rules: tuple[str, ...] = ()  # the names of those that were run
    fallbacks: Mapping[str, int] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict) -> Report:
        return self  # frozen: copies of a converted model share it

    def __getstate__(self) -> dict:
        # graphs hold functions that cannot be pickled: a model saved whole keeps the words of its report
        return {**self.__dict__, "before": fx.Graph(), "after": fx.Graph(), "parts": ()}

    @property
    def fused(self) -> tuple[Outcome, ...]:
        """The places that were fused, in the order they were."""
        return tuple(site for site in self.sites if site.status == "fused")

    @property
    def refused(self) -> tuple[Outcome, ...]:
        """The places that were not fused, each with every reason."""
        return tuple(site for site in self.sites if site.status == "refused")

    @property
    def counts(self) -> dict[str, int]:
        """How many places each rule fused; a rule that fused none counts 0."""
        return Counter(site.rule for site in self.fused)

    def expect(self, **counts: int) -> None:
        """Check that each rule named fused exactly as many places as given; other rules are not looked at.

        Raises:
            ExpectationError: for each rule that differs, what was expected, what found, and the reasons.
            TypeError: a rule has a name that is not known, or what is expected is no number of places.
        """
        known = dict.fromkeys((*self.rules, *(site.rule for site in self.sites), *_CATALOGUE))
        for rule, expected in counts.items():
            if rule not in known:
                raise TypeError(
                    f"expected the name of a rule, got {rule!r}, one of {', '.join(known)} is needed"
                    f"{did_you_mean(rule, known)}"
                )
            if not isinstance(expected, int):
                raise TypeError(f"{rule} is expected {expected!r} times, a whole number is needed")
        found = self.counts
        differing = [rule for rule, expected in counts.items() if found[rule] != expected]
        if differing:
            lines = [line for rule in differing for line in self._difference(rule, counts[rule])]
            raise ExpectationError("\n".join([f"{self.model} was not fused as expected", *lines]))

    def _difference(self, rule: str, expected: int) -> Iterator[str]:
        yield f"  {rule}: expected {expected}, found {self.counts[rule]}"
        own = [site for site in self.sites if site.rule == rule]
        if not own:
            rules = ", ".join(dict.fromkeys(site.rule for site in self.sites)) or "none"
            yield f"    no place resembles its pattern, or the rule was not run (in this report: {rules})"
        for status in ("fused", "refused"):
            for places in gather(site for site in own if site.status == status):
                yield from (f"    {status}: {line}" for line in places.lines)
                yield from (f"      {reason}" for reason in places.reasons)

    @property
    def title(self) -> str:
        """One line: how many sites of which model were fused and refused."""
        if not self.sites:
            return f"{self.model}: nothing was fused and nothing refused, no rule found a place in this model"
        fused, refused = (f"{n} site{'' if n == 1 else 's'}" for n in (len(self.fused), len(self.refused)))
        active = sum(not site.inactive for site in self.fused)
        told = "" if active == len(self.fused) else f" ({active} active in this call)"
        return f"{self.model}: {fused} fused{told}, {refused} refused"

    def all_notes(self) -> tuple[str, ...]:
        """The notes, and what is to be said of precision and of calls in plain PyTorch, in sentences."""
        precise = () if self.precision is None else _precise(self.precision)
        plain = (f"{count} calls ran in plain PyTorch: {why}" for why, count in self.plain_calls.items())
        memory = () if self.memory is None else (f"a training step is predicted to take {self.memory}",)
        fell_back = (f"{count} calls of graphs {why}" for why, count in self.fallbacks.items())
        return (*self.notes, *self.breaks, *precise, *memory, *plain, *fell_back, *self.all_timings())

    def all_timings(self) -> tuple[str, ...]:
        """What a call takes in each way to run the model, and which one was chosen."""
        return tuple(f"{each}{', chosen' if each.name == self.chosen else ''}" for each in self.timings)

    def __rich__(self) -> Group:
        rows = [*gather(self.fused), *most_valuable_first(gather(self.refused))]
        shown = [Text(), _table(rows)] if rows else []
        notes = [Text(f"note: {note}") for note in self.all_notes()]
        return Group(Text(self.title, style="bold"), *shown, *([Text(), *notes] if notes else []))

    def __str__(self) -> str:
        # neither the terminal nor a notebook around us may change what goes into a log
        plain = {"width": _WIDTH, "color_system": None, "force_terminal": False, "force_jupyter": False}
        console = Console(file=io.StringIO(), legacy_windows=False, **plain)
        console.print(self)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())

    def __repr__(self) -> str:
        return f"Report({self.title})"

    def _repr_html_(self) -> str:
        return page.in_notebook(self._summary(), self._page())

    def to_html(self, path: str | PathLike[str]) -> None:
        """Write the report and both graphs, drawn block by block, to `path`, as one page that needs nothing
        else.

        Raises:
            TypeError: `path` is no path.
        """
        if not isinstance(path, (str, PathLike)):
            raise TypeError(f"path is {path!r}, the path of a file is needed, such as 'report.html'")
        Path(path).write_text(self._page(), encoding="utf-8")

    def _summary(self) -> str:
        inputs = [node for node in self.before.nodes if node.op == "placeholder" and not name_in_model(node)]
        read = "; ".join(f"{drawing.argument(node)} {drawing.described(node)}" for node in inputs)
        is_whole = [part.paths for part in self.parts] == [("",)]  # else it reads values of in between
        about = {
            "inputs": read if is_whole or not self.inputs else self.inputs,
            "options": ", ".join(self.options),
            "versions": page.versions(),
        }
        refused = most_valuable_first(gather(self.refused))
        return page.summary(self.title, about, gather(self.fused), refused, self.all_notes())

    def _page(self) -> str:
        from te_transform.report.blocks import blocks_of  # networkx takes a while to import

        parts = self.parts or (Part(("",), self.before, self.after),)
        listings = [
            (f"the graph {which}{part.name and f', of {part.name}'}", drawing.listing(graph))
            for part in parts
            for which, graph in (("before", part.before), ("after", part.after))
        ]
        return page.whole(self.title, self._summary(), blocks_of(parts, self.refused), listings)

    def graph_text(self, which: Which = "after") -> str:
        """The graph line by line: name, dtype and shape, path of the module, operation with its arguments."""
        return "\n".join(line for line, _ in drawing.listing(self._graph(which)))

    def to_dot(self, which: Which = "after") -> str:
        """The graph as Graphviz text, for `dot -Tsvg`: blocks are colored clusters, fused nodes are framed.

        The model's own tensors are left out; to_networkx() has them.
        """
        return drawing.dot(self._graph(which))

    def to_networkx(self, which: Which = "after") -> networkx.DiGraph[str]:
        """The graph for analysis: nodes by fx name, with op, target, path, shape, dtype; edges are the data.

        `shape` is a tuple of ints, of text where a size is symbolic; it and `dtype` are None where unknown.
        """
        import networkx

        graph = networkx.DiGraph()
        for node in self._graph(which).nodes:
            shape, dtype = drawing.shape_and_dtype(node)
            known = {"op": node.op, "target": name_in_model(node) or called(node), "path": path_of(node)}
            graph.add_node(node.name, **known, shape=shape, dtype=dtype)
            graph.add_edges_from((source.name, node.name) for source in node.all_input_nodes)
        return graph

    def _graph(self, which: Which) -> fx.Graph:
        if which not in ("before", "after"):
            raise ValueError(f"which is {which!r}, 'before' or 'after' is needed")
        return getattr(self, which)


def _precise(plan: PrecisionPlan) -> Iterator[str]:
    by_reason: dict[str | None, list[str]] = {}
    for path, why in plan.sites.items():
        by_reason.setdefault(why, []).append(path)
    for why, paths in by_reason.items():
        told = f"in {plan.name}: {listed(paths)}"
        yield told if why is None else f"not {told}, because {why}"


def _table(rows: Sequence[Places]) -> Table:
    """Return the table of fused and refused places: how many are fused, how many active, and why not."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    refused = [places for places in rows if not places.is_fused]
    priced = any(places.saved for places in refused)
    table.add_column("rule", overflow="fold")
    for name in ("fused", "active", *["refused"] * bool(refused), *["costs"] * priced):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("where, and why not", overflow="fold")
    for places in rows:
        style = "yellow" if not places.is_fused else "green" if places.active else "cyan"
        # Text, not str: brackets in a shape are not markup
        reasons = [Padding(Text(f"- {reason}", style="dim"), (0, 0, 0, 2)) for reason in places.reasons]
        cell = Group(Text("\n".join(places.lines), overflow="fold"), *reasons)
        if places.is_fused:
            counts = [str(places.count), str(places.active)]
        else:
            counts = ["", "", str(places.count), *[duration(places.saved) if places.saved else ""] * priced]
        counts += [""] * (len(table.columns) - 2 - len(counts))
        table.add_row(Text(places.rule, style=style), *map(Text, counts), cell)
    return table
