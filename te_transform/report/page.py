"""A report as a page of HTML."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from te_transform.report.places import Places

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 2rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem 1rem .3rem 0; border-bottom: 1px solid #8886; }
td { overflow-wrap: anywhere; }
.count { text-align: right; white-space: nowrap; }
pre { overflow-x: auto; font-size: 12.5px; line-height: 1.4; }
mark { background: #76b90055; color: inherit; }
"""


def summary(title: str, fused: list[Places], refused: list[Places], notes: Iterable[str]) -> str:
    """The tables and the notes, as a piece of HTML."""
    tables = [_table("fused", ("rule", "fused", "where"), fused)] if fused else []
    tables += [_table("refused", ("rule", "refused", "where", "why not"), refused)] if refused else []
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return "\n".join([f"<h1>{escape(title)}</h1>", *tables, *([f"<ul>{listed}</ul>"] if listed else [])])


def _table(name: str, head: tuple[str, ...], rows: list[Places]) -> str:
    lines = [f'<table class="{name}">', "<tr>" + "".join(f"<th>{text}</th>" for text in head) + "</tr>"]
    for places in rows:
        where = "<br>".join(f"<code>{escape(path)}</code> x{count}" for path, count in places.patterns)
        cells = f'<td>{escape(places.rule)}</td><td class="count">{places.count}</td><td>{where}</td>'
        why = "<br>".join(map(escape, places.reasons))
        lines.append(f"<tr>{cells}<td>{why}</td></tr>" if "why not" in head else f"<tr>{cells}</tr>")
    return "\n".join([*lines, "</table>"])


def whole(title: str, body: str, listings: dict[str, list[tuple[str, bool]]]) -> str:
    """A page of `body` and of drawing's listings, which unfold; the marked lines stand out."""
    parts = [body]
    for name, lines in listings.items():
        text = "\n".join(f"<mark>{escape(line)}</mark>" if marked else escape(line) for line, marked in lines)
        parts.append(f"<details><summary>{escape(name)}</summary><pre><code>{text}</code></pre></details>")
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    opening = f'<!doctype html>\n<html lang="en"><head>{head}</head><body>'
    return "\n".join([opening, *parts, "</body></html>\n"])
