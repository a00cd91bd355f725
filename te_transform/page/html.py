"""Write the HTML of a page: one self-contained file that loads nothing from the network.

Tables hold all content. When a block comes into view, page.js draws it from its data, with the layout of
dagre.js.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from importlib import resources

from te_transform.execution.timing import duration
from te_transform.page.bars import computes
from te_transform.page.blocks import Block, DrawnOperation
from te_transform.page.colors import hue_of
from te_transform.plan.rule import Outcome
from te_transform.report.places import Places

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_NUMBERS = ("fused", "refused", "active", "saves", "costs")  # columns
_HINT = "<p>Click an operation to see what it computes, and what it replaces.</p>"
_OTHERS = (
    "<span>dashed: a value from or for another block</span><span>round, solid: an input of the model</span>"
)
_MERGED = (
    "<b>join</b> holds the weights of several linears, which are adjacent in memory: one product computes "
    "all of them. <b>columns</b> is the part of its result that belongs to one linear, a view."
)


@cache
def _asset(name: str) -> str:
    return resources.files("te_transform.page").joinpath(name).read_text("utf-8")


def whole(title: str, body: str, blocks: Sequence[Block]) -> str:
    """Return a page with `body`, and the drawn blocks below it."""
    fitting = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    style = f"<style>{_asset('page.css')}</style>"
    head = f'<meta charset="utf-8">{policy}{fitting}<title>{escape(title)}</title>{style}'
    drawn = _model(blocks) if blocks else ""
    detail = f'<aside id="detail" aria-live="polite">{_HINT}</aside>'
    scripts = f"<script>{_asset('dagre.js')}</script><script>{_asset('page.js')}</script>" if blocks else ""
    main = f"<main>{body}{drawn}</main>{detail}"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{main}{scripts}</body></html>\n'


def in_frame(body: str, whole_page: str) -> str:
    """Return a summary with the whole page in a collapsed frame that isolates the page's style and script."""
    frame = f'<iframe srcdoc="{escape(whole_page)}" style="width: 100%; height: 45rem; border: 0"></iframe>'
    return f"{body}\n<details><summary>before and after, block by block</summary>{frame}</details>"


def heading(title: str) -> str:
    return f"<h1>{escape(title)}</h1>"


def facts(about: Mapping[str, str]) -> str:
    """Return what a report is about."""
    told = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in about.items() if text)
    return f"<dl>{told}</dl>"


def notes_of(notes: Iterable[str]) -> str:
    """Return sentences as a collapsed list."""
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<details class="notes"><summary>notes</summary><ul>{listed}</ul></details>' if listed else ""


def tables(fused: Sequence[Places], refused: Sequence[Places]) -> str:
    """Return the tables of refused and of fused sites."""
    found = [
        ("What would gain most", "refused", "costs", refused),
        ("What was fused", "fused", "saves", fused),
    ]
    return "\n".join(
        f"<h2>{title}</h2>{table(name, [_row(name, priced, places) for places in rows])}"
        for title, name, priced, rows in found
        if rows
    )


def table(name: str, rows: Sequence[Mapping[str, str]], numbers: Iterable[str] = _NUMBERS) -> str:
    """Return an HTML table; rows are cells of HTML by the names of their columns, without empty columns."""
    columns = [column for column in rows[0] if any(row[column] for row in rows)]
    styles = {column: " class=count" * (column in numbers) for column in columns}
    head = "".join(f'<th{styles[column]} scope="col">{column}</th>' for column in columns)
    lines = [
        "".join(f'<td{styles[column]} data-name="{column}">{row[column]}</td>' for column in columns)
        for row in rows
    ]
    body = "\n".join(f'<tr class="row">{line}</tr>' for line in lines)
    return f'<table class="sites {name}">\n<tr>{head}</tr>\n{body}\n</table>'


def _row(name: str, priced: str, places: Places) -> dict[str, str]:
    where = "<br>".join(f"<code>{_broken(path)}</code> x{count}" for path, count in places.patterns)
    why = "".join(f"<li>{escape(reason)}</li>" for reason in places.reasons)
    return {
        "rule": chip(places.rule),
        name: str(places.count),
        "active": str(places.active) if name == "fused" else "",
        priced: duration(places.saved) if places.saved else "",
        "where": where,
        "why not": f"<ul>{why}</ul>" if why else "",
    }


def _broken(path: str) -> str:
    """Return a path as HTML with line breaks allowed after its dots, except inside ranges such as {0..3}."""
    return re.sub(r"(?<!\.)\.(?!\.)", ".<wbr>", escape(path))


def chip(rule: str) -> str:
    """Return the name of a rule in its color."""
    return f'<span class="chip" style="--hue: {hue_of(rule)}">{escape(rule)}</span>'


def _model(blocks: Sequence[Block]) -> str:
    """Return the color key, the controls, the blocks, and their data for page.js."""
    rules = dict.fromkeys(each.rule for block in blocks for each in block.after if each.rule)
    has_merged = any(each.kind == "merged" for block in blocks for each in block.after)
    key = "".join(map(chip, rules)) + _OTHERS
    merged = f'<p class="key">{chip("merge_siblings")} {_MERGED}</p>' if has_merged else ""
    asked = '<input id="search" type="search" placeholder="search ( / )" aria-label="search the operations">'
    minor = '<label><input id="minor" type="checkbox"> views and bookkeeping</label>'
    every = '<button id="every" type="button">open all</button>'
    bar = f'<p class="controls">{asked} {minor} {every} <output id="found"></output></p>'
    drawn = "".join(_block(number, block) for number, block in enumerate(blocks))
    data = json.dumps([_data(block) for block in blocks], separators=(",", ":")).replace("<", "\\u003c")
    head = f'<h2>The model, before and after</h2><p class="key">{key}</p>{merged}{bar}'
    script = f'<script type="application/json" id="data">{data}</script>'
    return f'<section id="model">{head}<div id="blocks">{drawn}</div>{script}</section>'


def _data(block: Block) -> dict:
    """Return a block for page.js; _listing() has the texts of its operations."""
    sides = [
        [[each.title, each.value, each.rule, each.kind, each.pair, each.reads] for each in side]
        for side in (block.before, block.after)
    ]
    hues = {each.rule: hue_of(each.rule) for each in block.after if each.rule}
    return {"sides": sides, "sources": block.sources, "hues": hues}


def _block(number: int, block: Block) -> str:
    """Return a block, open if something is fused or refused in it."""
    rules = dict.fromkeys(each.rule for each in block.after if each.rule)
    counts = [sum(map(computes, side)) for side in (block.before, block.after)]
    told = f"{_operations(counts[0])}, {f'after: {_operations(counts[1])}' if rules else 'unchanged'}"
    several = f' <b class="times">&times; {block.count}</b>' if block.count > 1 else ""
    refusals = f'<span class="chip refusal">{len(block.refused)} refused</span>' if block.refused else ""
    name = f"<code>{_broken(block.name)}</code>{several}"
    summary = f'{name} <span class="told">{told}</span> {"".join(map(chip, rules))}{refusals}'
    is_open = " open" if rules or block.refused else ""
    minor = "" if any(counts) else " minor"
    return (
        f'<details class="block{minor}" data-block="{number}"{is_open}><summary>{summary}</summary>'
        f"{''.join(map(_refusal, block.refused))}"
        f'<div class="drawing"></div>{_equal(block)}{_listing(block)}</details>'
    )


def _equal(block: Block) -> str:
    """Return the list of equal layers, which page.js draws one by one when they are opened."""
    if block.count == 1:
        return ""
    names = "".join(f"<li><code>{_broken(path)}</code></li>" for path in block.paths)
    summary = f"<summary>show each of the {block.count}</summary>"
    return f'<details class="equal">{summary}<ol>{names}</ol></details>'


def _operations(count: int) -> str:
    return f"{count} operation{'' if count == 1 else 's'}"


def _listing(block: Block) -> str:
    """Return all operations of a block as a table, a row for each pair."""
    pairs: dict[int, tuple[list[str], list[str]]] = {}
    for place, side in enumerate((block.before, block.after)):
        for number, each in enumerate(side):
            pairs.setdefault(each.pair, ([], []))[place].append(_entry(place, number, each))
    rows = "".join(
        f"<tr><td>{''.join(before)}</td><td>{''.join(after)}</td></tr>" for before, after in pairs.values()
    )
    head = "<tr><th>before</th><th>after</th></tr>"
    return f'<details class="listing" open><summary>as a table</summary><table>{head}{rows}</table></details>'


def _entry(side: int, number: int, operation: DrawnOperation) -> str:
    name = chip(operation.rule) if operation.rule else f"<b>{escape(operation.title)}</b>"
    return f'<div data-operation="{side}-{number}">{name}<pre>{escape(operation.detail)}</pre></div>'


def _refusal(site: Outcome) -> str:
    where = f" at <code>{escape(site.path)}</code>" if site.path else ""
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in site.reasons)
    costs = f", costs {duration(site.saved)}" if site.saved else ""
    return (
        f"<details><summary>refused: {escape(site.rule)}{where}{costs}</summary><ul>{reasons}</ul></details>"
    )
