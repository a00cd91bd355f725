"""Render a profile as HTML."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from te_transform.execution.timing import duration
from te_transform.page.bars import bars_of_report, chart
from te_transform.page.html import whole
from te_transform.page.render import drawn_blocks
from te_transform.page.tables import heading, table, tables
from te_transform.report.places import gather, most_valuable_first


def page_of_profile(profile: Any) -> str:
    """Return a te_transform.Profile as one self-contained page, with the graphs of its report."""
    report = profile.report
    blocks = [] if report is None else drawn_blocks(report)
    basis = f"measured on {profile.device}, {profile.mode}, under the profiler"
    charts = [chart("Time of a step", basis, [("now", profile.classes)], duration)]
    sites = ""
    if report is not None:
        charts += bars_of_report(report.overview, blocks)
        sites = tables(gather(report.fused), most_valuable_first(gather(report.refused)))
    text = f"<details><summary>as text</summary><pre>{escape(str(profile))}</pre></details>"
    shown = [heading(profile.title), f'<section class="charts">{"".join(charts)}</section>']
    return whole(profile.title, "\n".join([*shown, _findings(profile.findings), sites, text]), blocks)


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
