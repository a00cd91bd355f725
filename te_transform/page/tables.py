"""Write the tables of a page: what was fused and refused, with reasons, and facts on the report."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from te_transform.execution.timing import duration
from te_transform.page.colors import hue_of
from te_transform.report.places import Places, gather, most_valuable_first
from te_transform.report.report import Report

_NUMBER_COLUMNS = (
    "fused", "refused", "active", "saves", "costs", "time", "share", "backward", "step",
    "exposed communication",
)  # fmt: skip


def heading(title: str) -> str:
    """Return the first heading of a page."""
    return f"<h1>{escape(title)}</h1>"


def facts(about: Mapping[str, str]) -> str:
    """Return what a report is about."""
    rows = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in about.items() if text)
    return f"<dl>{rows}</dl>"


def notes_of(notes: Iterable[str]) -> str:
    """Return sentences as a collapsed list."""
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<details class="notes"><summary>notes</summary><ul>{listed}</ul></details>' if listed else ""


def tables(report: Report) -> str:
    """Return the tables of refused and of fused sites."""
    groups = [
        ("What would gain most", "refused", "costs", most_valuable_first(gather(report.refused))),
        ("What was fused", "fused", "saves", gather(report.fused)),
    ]
    return "\n".join(
        f"<h2>{title}</h2>{table(name, [_table_row(name, priced, places) for places in rows])}"
        for title, name, priced, rows in groups
        if rows
    )


def table(name: str, rows: Sequence[Mapping[str, str]]) -> str:
    """Return an HTML table without empty columns. Each row maps names of columns to HTML cells."""
    columns = [column for column in rows[0] if any(row[column] for row in rows)]
    styles = {column: " class=count" * (column in _NUMBER_COLUMNS) for column in columns}
    head = "".join(f'<th{styles[column]} scope="col">{column}</th>' for column in columns)
    lines = [
        "".join(f'<td{styles[column]} data-name="{column}">{row[column]}</td>' for column in columns)
        for row in rows
    ]
    body = "\n".join(f'<tr class="row">{line}</tr>' for line in lines)
    return f'<table class="sites {name}">\n<tr>{head}</tr>\n{body}\n</table>'


def _table_row(name: str, priced: str, places: Places) -> dict[str, str]:
    where = "<br>".join(f"<code>{breakable(path)}</code> x{count}" for path, count in places.patterns)
    why = "".join(f"<li>{escape(reason)}</li>" for reason in places.reasons)
    return {
        "rule": chip(places.rule),
        name: str(places.count),
        "active": str(places.active) if name == "fused" else "",
        priced: duration(places.saved) if places.saved else "",
        "where": where,
        "why not": f"<ul>{why}</ul>" if why else "",
    }


def breakable(path: str) -> str:
    """Return a path as HTML with line breaks allowed after its dots, except inside ranges such as {0..3}."""
    return re.sub(r"(?<!\.)\.(?!\.)", ".<wbr>", escape(path))


def chip(rule: str, is_inactive: bool = False) -> str:
    """Return the name of a rule in its color, outlined if its sites are inactive."""
    classes = "chip inactive" if is_inactive else "chip"
    return f'<span class="{classes}" style="--hue: {hue_of(rule)}">{escape(rule)}</span>'
