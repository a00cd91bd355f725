"""The result of a profile: data, text and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from te_transform.execution.console import as_text
from te_transform.execution.timing import duration
from te_transform.report.as_json import as_json
from te_transform.report.report import Report, table_of, with_reasons

_LEAST_PRINTED_SHARE = 0.005  # share of the step that a part needs for a line of its own in the text
_WIDEST = 10_000  # columns, more than any table has
# Columns of the table of parts: the most that leave space for whole paths.
_COLUMNS = (
    ("part", "class", ">time", ">share", ">backward", "mostly"),
    ("part", ">time", ">share", ">backward", "mostly"),
    ("part", ">time", ">share", ">backward"),
    ("part", ">time", ">share"),
)


@dataclass(frozen=True)
class PartTime:
    """A part of the model, or several equal layers.

    Attributes:
        path: of the modules, such as h.{0..11}.attn.
        kind: the name of the modules' class.
        count: the number of modules.
        seconds: per step, without the time of modules inside.
        backward: the seconds of these in the backward.
        classes: the seconds by class of operations.
        rule: the rule of a fused site of a converted model, or "".
    """

    path: str
    kind: str
    count: int
    seconds: float
    backward: float
    classes: Mapping[str, float]
    rule: str = ""


@dataclass(frozen=True)
class Finding:
    """A slow fallback, and what a change would gain.

    Attributes:
        what: a name, such as "written-out attention".
        where: the paths of the modules.
        count: the number of modules.
        evidence: what ran.
        advice: what to change.
        seconds: per timed step of the operations that the change affects.
        gain: in seconds per step.
        basis: "measured" if the change was timed on tensors of the same shapes, else "upper bound".
    """

    what: str
    where: str
    count: int
    evidence: str
    advice: str
    seconds: float
    gain: float
    basis: Literal["measured", "upper bound"]

    @property
    def gain_told(self) -> str:
        """The gain as text."""
        if self.basis == "measured":
            return f"{duration(self.gain)}, measured" if self.gain else "nothing on this device, measured"
        return f"at most {duration(self.gain)}" if self.gain else "nothing on this device"


@dataclass(frozen=True)
class SiteTime:
    """Sites of one rule that convert() fuses or refuses, with the time of their modules now.

    Attributes:
        rule, status, reasons, inactive: of the report.
        path: of the sites, such as h.{0..11}.mlp.
        count: the number of sites.
        seconds: per step of the modules at these paths and inside them, at most the time of the sites.
    """

    rule: str
    status: str
    path: str
    count: int
    seconds: float
    reasons: tuple[str, ...] = ()
    inactive: str = ""


@dataclass(frozen=True)
class RankTime:
    """The step of one rank: its seconds, and the seconds of communication without overlap."""

    rank: int
    seconds: float
    exposed: float


@dataclass(frozen=True, repr=False)
class Profile:
    """The profile of a step: what each part costs, and what slows it down. Times are in seconds.

    Attributes:
        model: the name of the model's class.
        device: the name of the device that ran the step.
        mode: "forward and backward" or "forward".
        inputs: a description of the batch.
        seconds: of a step, the median of several without the profiler.
        profiled: of the step under the profiler, which `parts` and `classes` divide.
        cost: of the whole profile, without `report`.
        parts: of the model, the most expensive first; their seconds add up to `profiled`.
        classes: seconds by class of operations, which add up to `profiled` too.
        findings: the largest gain first.
        sites: what convert() fuses and refuses, with times.
        report: of te_transform.inspect(), or of te_transform.report() for a converted model.
        ranks: the steps of all ranks, if there are several.
        notes: sentences on the profile as a whole.
    """

    model: str
    device: str
    mode: str
    inputs: str
    seconds: float
    profiled: float
    cost: float
    parts: tuple[PartTime, ...]
    classes: Mapping[str, float]
    findings: tuple[Finding, ...] = ()
    sites: tuple[SiteTime, ...] = ()
    report: Report | None = field(default=None, compare=False)
    ranks: tuple[RankTime, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """One line: the model, and the time of a step."""
        return f"{self.model}: {duration(self.seconds)} a step ({self.mode}) on {self.device}"

    def to_json(self) -> str:
        """Return the profile as JSON, without the report's graphs; "schema" is the version of its fields."""
        fields = asdict(replace(self, report=None))
        del fields["report"]
        return as_json(fields)

    def to_html(self, path: str | PathLike[str]) -> None:
        """Write the profile to `path` as one self-contained HTML page."""
        from te_transform.page.profiled import page_of_profile

        Path(path).write_text(page_of_profile(self), encoding="utf-8")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts = self._widest_parts(console, options)
        shown: list[Any] = [Text(self.title, style="bold"), Text(), parts, Text(), self._classes()]
        shown += [Text(), self._ranks()] if self.ranks else []
        shown += [Text(), self._findings()] if self.findings else []
        shown += [Text(), self._sites()] if self.sites else []
        shown += [Text(), *(Text(f"note: {note}") for note in self.notes)] if self.notes else []
        yield Group(*shown)

    def __str__(self) -> str:
        return as_text(self)

    def __repr__(self) -> str:
        return f"Profile({self.title})"

    def _share(self, seconds: float) -> str:
        return f"{seconds / self.profiled:.1%}" if self.profiled else ""

    def _widest_parts(self, console: Console, options: ConsoleOptions) -> Table:
        """Return the table of parts with as many columns as fit beside whole paths."""
        wide = options.update(max_width=_WIDEST)
        for columns in _COLUMNS:
            table = self._parts(columns)
            if Measurement.get(console, wide, table).maximum <= options.max_width:
                break
        return table

    def _parts(self, columns: Sequence[str]) -> Table:
        """Return the table of parts with these columns. Small parts share the last line."""
        table = table_of(*columns)
        small = [part for part in self.parts if part.seconds < _LEAST_PRINTED_SHARE * self.profiled]
        shown = [(part, None) for part in self.parts if part not in small]
        if small:
            name = f"{len(small)} smaller {'part' if len(small) == 1 else 'parts'}"
            seconds, backward = sum(part.seconds for part in small), sum(part.backward for part in small)
            shown.append((PartTime(name, "", 1, seconds, backward, {}), "dim"))
        for part, style in shown:
            name = f"{part.path} x{part.count}" if part.count > 1 else part.path
            cells = {
                "part": f"{name}: {part.rule}" if part.rule and "class" not in columns else name,
                "class": f"fused: {part.rule}" if part.rule else part.kind,
                ">time": duration(part.seconds),
                ">share": self._share(part.seconds),
                ">backward": duration(part.backward),
                "mostly": max(part.classes, key=lambda kind: part.classes[kind], default=""),
            }
            table.add_row(*(Text(cells[column]) for column in columns), style=style)
        return table

    def _classes(self) -> Table:
        table = table_of("operations", ">time", ">share")
        for kind, seconds in sorted(self.classes.items(), key=lambda item: -item[1]):
            table.add_row(kind, duration(seconds), self._share(seconds))
        return table

    def _ranks(self) -> Table:
        table = table_of("rank", ">step", ">exposed communication")
        for rank in self.ranks:
            table.add_row(str(rank.rank), duration(rank.seconds), duration(rank.exposed))
        return table

    def _findings(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        for number, finding in enumerate(self.findings, 1):
            if number > 1:
                grid.add_row()
            where = f"{finding.where} x{finding.count}" if finding.count > 1 else finding.where
            title = Text(f"{finding.what} in {where}: gains {finding.gain_told}", style="yellow")
            evidence = Text(f"{finding.evidence} ({duration(finding.seconds)} a step)")
            grid.add_row(f"{number}.", Group(title, evidence, Text(finding.advice)))
        return grid

    def _sites(self) -> Table:
        table = table_of("convert()", ">sites", ">modules take", "where, and why not")
        for site in self.sites:
            reasons = (*site.reasons, site.inactive) if site.inactive else site.reasons
            name = Text(f"{site.rule}, {'inactive' if site.inactive else site.status}")
            where = Text(site.path.replace(", ", "\n"))
            cells = Text(str(site.count)), Text(duration(site.seconds)), with_reasons(where, reasons)
            table.add_row(name, *cells)
        return table
