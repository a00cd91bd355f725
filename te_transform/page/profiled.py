"""Render a profile as HTML."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from te_transform.execution.timing import duration, versions
from te_transform.page.bars import bars_of_report, chart
from te_transform.page.render import drawn_blocks, whole
from te_transform.page.tables import breakable, facts, heading, notes_of, table, tables

_SHOWN_PARTS = 12


def page_of_profile(profile: Any) -> str:
    """Return a te_transform.Profile as one self-contained page, with the graphs of its report."""
    report = profile.report
    blocks = [] if report is None else drawn_blocks(report)
    basis = f"measured on {profile.device}, {profile.mode}, under the profiler"
    charts = [chart("Time of a step", basis, [("now", profile.classes)], duration)]
    sites = ""
    if report is not None:
        charts += bars_of_report(report.overview, blocks)
        sites = tables(report)
    text = f"<details><summary>as text</summary><pre>{escape(str(profile))}</pre></details>"
    shown = [
        heading(profile.title),
        facts({"inputs": profile.inputs, "versions": versions()}),
        f'<section class="charts">{"".join(charts)}</section>',
        _findings(profile.findings),
        _parts_table(profile),
        _ranks_table(profile.ranks),
        sites,
        notes_of(profile.notes),
        text,
    ]
    return whole(profile.title, "\n".join(filter(None, shown)), blocks)


def _findings(findings: Iterable[Any]) -> str:
    """Return what slows the step down, the largest gain first."""
    rows = [
        {
            "gain": escape(each.gain_told),
            "what": f"<b>{escape(each.what)}</b>",
            "where": f"<code>{escape(each.where)}</code> x{each.count}",
            "evidence": escape(each.evidence),
            "advice": escape(each.advice),
        }
        for each in findings
    ]
    return f"<h2>What to change</h2>{table('findings', rows)}" if rows else ""


def _parts_table(profile: Any) -> str:
    """Return the most expensive parts of the model."""
    rows = [
        {
            "part": f"<code>{breakable(part.path)}</code>{f' x{part.count}' * (part.count > 1)}",
            "class": escape(f"fused: {part.rule}" if part.rule else part.kind),
            "time": duration(part.seconds),
            "share": f"{part.seconds / profile.profiled:.1%}",
            "backward": duration(part.backward),
            "mostly": escape(max(part.classes, key=lambda kind: part.classes[kind])),
        }
        for part in profile.parts[:_SHOWN_PARTS]
    ]
    return f"<h2>What each part takes</h2>{table('parts', rows)}" if rows else ""


def _ranks_table(ranks: Iterable[Any]) -> str:
    """Return the step of each rank, or nothing for one process."""
    rows = [
        {
            "rank": str(each.rank),
            "step": duration(each.seconds),
            "exposed communication": duration(each.exposed),
        }
        for each in ranks
    ]
    return f"<h2>Ranks</h2>{table('ranks', rows)}" if rows else ""
