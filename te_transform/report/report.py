"""The report of convert(): what was fused, what was refused and why, for reading, testing and drawing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich import box
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from torch import fx

from te_transform.execution.console import as_text
from te_transform.execution.timing import Timing, duration
from te_transform.graph.grouped import grouped
from te_transform.graph.keywords import did_you_mean
from te_transform.graph.nodes import called, name_in_model, path_of
from te_transform.passes import CATALOGUE
from te_transform.plan.memory import Memory
from te_transform.plan.overview import Overview
from te_transform.plan.precision_plan import PrecisionPlan
from te_transform.plan.rule import Outcome
from te_transform.report import drawing
from te_transform.report.as_json import as_json
from te_transform.report.drawing import Part
from te_transform.report.places import Places, gather, listed, most_valuable_first
from te_transform.report.renderer import renderer

if TYPE_CHECKING:
    import networkx

Which = Literal["before", "after"]

_CATALOGUE = tuple(rule.name for rule in CATALOGUE)


class ExpectationError(AssertionError):
    """The error of Report.expect() if the model was not fused as expected."""


@dataclass(frozen=True, repr=False)
class Report:
    """A conversion report: every site that a rule fused or refused, and the graphs before and after.

    Attributes:
        model: the name of the model's class.
        sites: all operations that resemble the pattern of a rule, fused or refused.
        before: the canonical graph of the forward, or of its largest part if it was captured in parts.
        after: the same graph with each fusion as one call_module.
        notes: sentences on the conversion as a whole.
        breaks: sentences on code that was not captured.
        precision: the plan of what runs in FP8.
        plain_calls: the number of calls in which fused ops or the whole model ran in plain PyTorch, by
            reason.
        memory: the predicted memory of a training step on TE.
        timings: with compile="auto", the time of a call under each setting.
        chosen: with compile="auto", the name of the setting that the model runs with.
        options: the options of the conversion.
        inputs: a description of the example inputs.
        parts: all captured graphs; the HTML page draws them.
        rules: the names of the rules that ran.
        fallbacks: the number of calls of captured graphs that did not run compiled or as CUDA graphs as
            requested, by reason.
        overview: the predicted time and memory of a call by class of operations, before and after.
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
    rules: tuple[str, ...] = ()
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    overview: Overview | None = None

    def __deepcopy__(self, memo: dict) -> Report:
        return self  # frozen: copies of a converted model share it

    def __getstate__(self) -> dict:
        # graphs hold functions that cannot be pickled: a model saved whole keeps only the report's text
        return {**self.__dict__, "before": fx.Graph(), "after": fx.Graph(), "parts": ()}

    @property
    def fused(self) -> tuple[Outcome, ...]:
        """The fused sites, in the order of fusion."""
        return tuple(site for site in self.sites if site.status == "fused")

    @property
    def refused(self) -> tuple[Outcome, ...]:
        """The refused sites, each with every reason."""
        return tuple(site for site in self.sites if site.status == "refused")

    @property
    def counts(self) -> dict[str, int]:
        """The number of sites that each rule fused; 0 for a rule that fused none."""
        return Counter(site.rule for site in self.fused)

    def expect(self, **counts: int) -> None:
        """Check that each named rule fused exactly the given number of sites; other rules are not checked.

        Raises:
            ExpectationError: a count differs; the message has the expected count, the found count and the
                reasons for each such rule.
            TypeError: a rule is unknown, or an expected count is not an integer.
        """
        known = dict.fromkeys((*self.rules, *(site.rule for site in self.sites), *_CATALOGUE))
        for rule, expected in counts.items():
            if rule not in known:
                raise TypeError(
                    f"expected the name of a rule, got {rule!r}; use one of {', '.join(known)}"
                    f"{did_you_mean(rule, known)}"
                )
            if not isinstance(expected, int):
                raise TypeError(f"expected an integer for {rule}, got {expected!r}; pass the number of sites")
        fused = self.counts
        differing = [rule for rule, expected in counts.items() if fused[rule] != expected]
        if differing:
            lines = [line for rule in differing for line in self._difference(rule, counts[rule])]
            raise ExpectationError("\n".join([f"{self.model} was not fused as expected", *lines]))

    def _difference(self, rule: str, expected: int) -> Iterator[str]:
        yield f"  {rule}: expected {expected}, found {self.counts[rule]}"
        own = [site for site in self.sites if site.rule == rule]
        if not own:
            rules = ", ".join(dict.fromkeys(site.rule for site in self.sites)) or "none"
            yield f"    no site resembles its pattern, or the rule did not run (in this report: {rules})"
        for status in ("fused", "refused"):
            for places in gather(site for site in own if site.status == status):
                yield from (f"    {status}: {line}" for line in places.lines)
                yield from (f"      {reason}" for reason in places.reasons)

    @property
    def title(self) -> str:
        """One line: the model, and its numbers of fused and refused sites."""
        if not self.sites:
            return f"{self.model}: nothing fused and nothing refused, because no rule found a site"
        fused, refused = (f"{n} site{'' if n == 1 else 's'}" for n in (len(self.fused), len(self.refused)))
        active = sum(not site.inactive for site in self.fused)
        activity = "" if active == len(self.fused) else f" ({active} active in this call)"
        return f"{self.model}: {fused} fused{activity}, {refused} refused"

    def all_notes(self) -> tuple[str, ...]:
        """Return all sentences: notes, breaks, precision, memory, plain PyTorch calls, fallbacks, timings."""
        precise = () if self.precision is None else _precise(self.precision)
        plain = (f"{_calls(n)} ran in plain PyTorch: {why}" for why, n in self.plain_calls.items())
        memory = () if self.memory is None else (f"a training step is predicted to take {self.memory}",)
        fallbacks = fallback_notes(self.fallbacks)
        return (*self.notes, *self.breaks, *precise, *memory, *plain, *fallbacks, *self.all_timings())

    def all_timings(self) -> tuple[str, ...]:
        """Return the time of a call under each setting, with a mark at the chosen setting."""
        return tuple(f"{each}{', chosen' if each.name == self.chosen else ''}" for each in self.timings)

    def __rich__(self) -> Group:
        rows = [*gather(self.fused), *most_valuable_first(gather(self.refused))]
        shown = [Text(), _site_table(rows)] if rows else []
        notes = [Text(f"note: {note}") for note in self.all_notes()]
        return Group(Text(self.title, style="bold"), *shown, *([Text(), *notes] if notes else []))

    def __str__(self) -> str:
        return as_text(self)

    def __repr__(self) -> str:
        return f"Report({self.title})"

    def _repr_html_(self) -> str:
        return renderer().notebook(self)

    def to_html(self, path: str | PathLike[str]) -> None:
        """Write the report to `path` as one self-contained HTML page, with both graphs drawn block by block.

        Raises:
            TypeError: `path` is not a path.
            RuntimeError: no renderer is registered; te_transform registers its own.
        """
        if not isinstance(path, (str, PathLike)):
            raise TypeError(f"expected the path of a file, got {path!r}; pass a path such as 'report.html'")
        Path(path).write_text(renderer().page(self), encoding="utf-8")

    def as_data(self) -> dict[str, Any]:
        """Return the report without its graphs, as numbers, strings, tuples and dicts; see docs/json.md."""
        precision = self.precision
        sites = [asdict(site) for site in self.sites]
        return {
            "model": self.model,
            "inputs": self.inputs,
            "options": self.options,
            "fused": dict(self.counts),
            "sites": [{name: each for name, each in site.items() if name != "inside"} for site in sites],
            "notes": self.all_notes(),
            "precision": None if precision is None else dict(precision.sites),
            "memory": None if self.memory is None else asdict(self.memory),
            "times": [asdict(each) for each in self.timings],
            "chosen": self.chosen,
        }

    def to_json(self) -> str:
        """Return as_data() as JSON; "schema" is the version of its fields."""
        return as_json(self.as_data())

    def graph_text(self, which: Which = "after") -> str:
        """Return the graph as text, one line per node: name, dtype and shape, module path, call."""
        return "\n".join(line for line, _ in drawing.listing(self._graph(which)))

    def to_dot(self, which: Which = "after") -> str:
        """Return the graph as Graphviz text for `dot -Tsvg`: blocks are colored clusters, fused nodes framed.

        The model's own tensors are left out; to_networkx() includes them.
        """
        return drawing.dot(self._graph(which))

    def to_networkx(self, which: Which = "after") -> networkx.DiGraph[str]:
        """Return the graph for analysis: nodes by fx name, edges from each value to its readers.

        Each node has the attributes op, target, path, shape and dtype. `shape` is a tuple of ints, with text
        for symbolic sizes. `shape` and `dtype` are None if unknown.
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
            raise ValueError(f"expected which='before' or 'after', got {which!r}; choose one of the two")
        return getattr(self, which)


def fallback_notes(fallbacks: Mapping[str, int]) -> Iterator[str]:
    """Yield a sentence for each reason why calls of graphs did not run as asked."""
    return (f"{_calls(n)} of graphs {why}" for why, n in fallbacks.items())


def _calls(count: int) -> str:
    return f"{count} call{'s' * (count != 1)}"


def _precise(plan: PrecisionPlan) -> Iterator[str]:
    for why, paths in grouped((why, path) for path, why in plan.sites.items()).items():
        sentence = f"in {plan.name}: {listed(paths)}"
        yield sentence if why is None else f"not {sentence}, because {why}"


def _site_table(rows: Sequence[Places]) -> Table:
    """Return the table of fused and refused sites, with counts, active counts and reasons."""
    refused = [places for places in rows if not places.is_fused]
    priced = any(places.saved for places in refused)
    numbers = (">fused", ">active", *[">refused"] * bool(refused), *[">costs"] * priced)
    table = table_of("rule", *numbers, "where, and why not")
    for places in rows:
        style = "yellow" if not places.is_fused else "green" if places.active else "cyan"
        where = Text("\n".join(places.lines), overflow="fold")
        if places.is_fused:
            counts = [str(places.count), str(places.active)]
        else:
            counts = ["", "", str(places.count), *[duration(places.saved) if places.saved else ""] * priced]
        counts += [""] * (len(numbers) - len(counts))
        table.add_row(Text(places.rule, style=style), *map(Text, counts), with_reasons(where, places.reasons))
    return table


def with_reasons(where: Text, reasons: Iterable[str]) -> Group:
    """Return the cell of places with a line for each reason."""
    # Text, not str: brackets in a shape are not markup
    return Group(where, *(Padding(Text(f"- {reason}", style="dim"), (0, 0, 0, 2)) for reason in reasons))


def table_of(*names: str) -> Table:
    """Return a table with these columns; ">" before a name aligns its numbers at the right."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    for name in names:
        if name.startswith(">"):
            table.add_column(name[1:], justify="right", no_wrap=True)
        else:
            table.add_column(name, overflow="fold")
    return table
