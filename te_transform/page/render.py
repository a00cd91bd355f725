"""Render a report as HTML: the page, and a cell of a notebook."""

from __future__ import annotations

from te_transform.execution.timing import versions
from te_transform.graph.nodes import name_in_model
from te_transform.page.blocks import blocks_of
from te_transform.page.details import argument_text
from te_transform.page.html import in_frame, summary, whole
from te_transform.report.drawing import Part, described, listing
from te_transform.report.places import gather, most_valuable_first
from te_transform.report.report import Report


def page(report: Report) -> str:
    """Return the report as one self-contained page, with both graphs drawn block by block."""
    parts = report.parts or (Part(("",), report.before, report.after),)
    listings = [
        (f"the graph {which}{part.name and f', of {part.name}'}", listing(graph))
        for part in parts
        for which, graph in (("before", part.before), ("after", part.after))
    ]
    return whole(report.title, _summary(report), blocks_of(parts, report.refused), listings)


def notebook(report: Report) -> str:
    """Return the tables of the report, with the page in a collapsed frame."""
    return in_frame(_summary(report), page(report))


def _summary(report: Report) -> str:
    nodes = [node for node in report.before.nodes if node.op == "placeholder" and not name_in_model(node)]
    read = "; ".join(f"{argument_text(node)} {described(node)}" for node in nodes)
    is_whole = [part.paths for part in report.parts] == [("",)]  # a partial graph reads intermediate values
    about = {
        "inputs": read if is_whole or not report.inputs else report.inputs,
        "options": ", ".join(report.options),
        "versions": versions(),
    }
    refused = most_valuable_first(gather(report.refused))
    return summary(report.title, about, gather(report.fused), refused, report.all_notes())
