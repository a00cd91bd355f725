"""Render a report as HTML: the page, and a cell of a notebook.

A page is one self-contained file that loads nothing from the network. Tables hold all content. When a block
comes into view, page.js draws it from its data, with the layout of dagre.js.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from html import escape
from importlib import resources

from te_transform.execution.timing import versions
from te_transform.graph.nodes import name_in_model
from te_transform.page.bars import bars_of_report
from te_transform.page.blocks import Block, blocks_of
from te_transform.page.details import argument_text
from te_transform.page.model import model
from te_transform.page.tables import facts, heading, notes_of, tables
from te_transform.report.drawing import Part, described
from te_transform.report.report import Report

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_DETAIL = (
    '<aside id="detail" aria-live="polite">'
    "<p>Click an operation to see what it computes, and what it replaces.</p></aside>"
)


def page(report: Report) -> str:
    """Return the report as one self-contained page, with both graphs drawn block by block."""
    blocks = drawn_blocks(report)
    return whole(report.title, _body_of(report, blocks), blocks)


def notebook(report: Report) -> str:
    """Return the overview and the tables of the report, with the page in a collapsed frame."""
    blocks = drawn_blocks(report)
    body = _body_of(report, blocks)
    page_in_frame = escape(whole(report.title, body, blocks))  # a frame isolates the page's style and script
    frame = f'<iframe srcdoc="{page_in_frame}" style="width: 100%; height: 45rem; border: 0"></iframe>'
    return f"{body}\n<details><summary>before and after, block by block</summary>{frame}</details>"


def drawn_blocks(report: Report) -> list[Block]:
    """Return the blocks of the model; equal layers are one."""
    return blocks_of(report.parts or (Part(("",), report.before, report.after),), report.refused)


def _body_of(report: Report, blocks: list[Block]) -> str:
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


def whole(title: str, body: str, blocks: Sequence[Block]) -> str:
    """Return a page with `body`, and the drawn blocks below it."""
    fitting = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    style = f"<style>{_asset('page.css')}</style>"
    head = f'<meta charset="utf-8">{policy}{fitting}<title>{escape(title)}</title>{style}'
    shown = f"<main>{body}</main>"
    if blocks:
        scripts = f"<script>{_asset('dagre.js')}</script><script>{_asset('page.js')}</script>"
        shown = f"<main>{body}{model(blocks)}</main>{_DETAIL}{scripts}"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{shown}</body></html>\n'


@cache
def _asset(name: str) -> str:
    return resources.files("te_transform.page").joinpath(name).read_text("utf-8")
