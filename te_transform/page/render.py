"""Render a report as HTML: the page, and a cell of a notebook."""

from __future__ import annotations

from html import escape

from te_transform.execution.timing import versions
from te_transform.graph.nodes import name_in_model
from te_transform.page.bars import bars_of_report
from te_transform.page.blocks import Block, blocks_of
from te_transform.page.details import argument_text
from te_transform.page.html import whole
from te_transform.page.tables import facts, heading, notes_of, tables
from te_transform.report.drawing import Part, described
from te_transform.report.report import Report


def page(report: Report) -> str:
    """Return the report as one self-contained page, with both graphs drawn block by block."""
    blocks = drawn_blocks(report)
    return whole(report.title, body_of(report, blocks), blocks)


def notebook(report: Report) -> str:
    """Return the overview and the tables of the report, with the page in a collapsed frame."""
    blocks = drawn_blocks(report)
    body = body_of(report, blocks)
    page_in_frame = escape(whole(report.title, body, blocks))  # a frame isolates the page's style and script
    frame = f'<iframe srcdoc="{page_in_frame}" style="width: 100%; height: 45rem; border: 0"></iframe>'
    return f"{body}\n<details><summary>before and after, block by block</summary>{frame}</details>"


def drawn_blocks(report: Report) -> list[Block]:
    """Return the blocks of the model; equal layers are one."""
    return blocks_of(report.parts or (Part(("",), report.before, report.after),), report.refused)


def body_of(report: Report, blocks: list[Block]) -> str:
    """Return the page above the drawing: title, overview, tables, and facts."""
    charts = f'<section class="charts">{"".join(bars_of_report(report.overview, blocks))}</section>'
    notes = notes_of(report.all_notes())
    shown = (heading(report.title), facts(_about(report)), charts, tables(report), notes)
    return "\n".join(filter(None, shown))


def _about(report: Report) -> dict[str, str]:
    nodes = [node for node in report.before.nodes if node.op == "placeholder" and not name_in_model(node)]
    read = "; ".join(f"{argument_text(node)} {described(node)}" for node in nodes)
    is_whole = [part.paths for part in report.parts] == [("",)]  # a partial graph reads intermediate values
    return {
        "inputs": read if is_whole or not report.inputs else report.inputs,
        "options": ", ".join(report.options),
        "versions": versions(),
    }
