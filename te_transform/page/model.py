"""Write the blocks of a model: tables of their operations, and the data that page.js draws."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from te_transform.execution.timing import duration
from te_transform.page.bars import operations_of_call
from te_transform.page.blocks import Block
from te_transform.page.colors import hue_of
from te_transform.page.sketch import DrawnOperation
from te_transform.page.tables import breakable, chip
from te_transform.plan.rule import Outcome

_PORT = '<span class="port">a value from or for another block</span>'
_INPUT = '<span class="input">an input of the model</span>'
_INACTIVE = '<span class="inactive">inactive in this call: a click shows why</span>'
_MERGED = (
    "<b>join</b> holds the weights of several linears, which are adjacent in memory: one product computes "
    "all of them. <b>columns</b> is the part of its result that belongs to one linear, a view."
)


def model(blocks: Sequence[Block]) -> str:
    """Return the color key, the controls, the blocks, and their data for page.js."""
    rules = dict.fromkeys(each.rule for block in blocks for each in block.after if each.rule)
    has_merged = any(each.kind == "merged" for block in blocks for each in block.after)
    has_inactive = any(each.is_inactive for block in blocks for each in block.after)
    key = "".join(map(chip, rules)) + _INACTIVE * has_inactive + _PORT + _INPUT
    merged = f'<p class="key">{chip("merge_siblings")} {_MERGED}</p>' if has_merged else ""
    asked = '<input id="search" type="search" placeholder="search ( / )" aria-label="search the operations">'
    minor = '<label><input id="minor" type="checkbox"> views and bookkeeping</label>'
    every = '<button id="every" type="button">open all</button>'
    bar = f'<p class="controls">{asked} {minor} {every} <output id="found"></output></p>'
    drawn = "".join(_block(number, block) for number, block in enumerate(blocks))
    data = json.dumps([_block_data(block) for block in blocks], separators=(",", ":")).replace("<", "\\u003c")
    head = f'<h2>The model, before and after</h2><p class="key">{key}</p>{merged}{bar}'
    script = f'<script type="application/json" id="data">{data}</script>'
    return f'<section id="model">{head}<div id="blocks">{drawn}</div>{script}</section>'


def _block_data(block: Block) -> dict:
    """Return a block for page.js; _listing() has the texts of its operations."""
    sides = [
        [
            [each.title, each.value, each.rule, each.kind, each.pair, each.reads, each.is_inactive]
            for each in side
        ]
        for side in (block.before, block.after)
    ]
    hues = {rule: hue_of(rule) for rule in ("merge_siblings", *(each.rule for each in block.after)) if rule}
    return {"sides": sides, "sources": block.sources, "hues": hues}


def _block(number: int, block: Block) -> str:
    """Return a block, open if something is fused or refused in it."""
    rules = dict.fromkeys(each.rule for each in block.after if each.rule)
    active = {each.rule for each in block.after if not each.is_inactive}
    counts = [len(side) for side in operations_of_call(block)]
    unchanged = "unchanged in this call" if rules else "unchanged"
    after = f"after: {_operation_count(counts[1])}" if active.intersection(rules) else unchanged
    text = f"{_operation_count(counts[0])}, {after}"
    several = f' <b class="times">&times; {block.count}</b>' if block.count > 1 else ""
    refusals = f'<span class="chip refusal">{len(block.refused)} refused</span>' if block.refused else ""
    name = f"<code>{breakable(block.name)}</code>{several}"
    chips = "".join(chip(rule, is_inactive=rule not in active) for rule in rules)
    summary = f'{name} <span class="told">{text}</span> {chips}{refusals}'
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
    names = "".join(f"<li><code>{breakable(path)}</code></li>" for path in block.paths)
    summary = f"<summary>show each of the {block.count}</summary>"
    return f'<details class="equal">{summary}<ol>{names}</ol></details>'


def _operation_count(count: int) -> str:
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
    rule, is_inactive = operation.rule, operation.is_inactive
    name = chip(rule, is_inactive) if rule else f"<b>{escape(operation.title)}</b>"
    return f'<div data-operation="{side}-{number}">{name}<pre>{escape(operation.detail)}</pre></div>'


def _refusal(site: Outcome) -> str:
    where = f" at <code>{escape(site.path)}</code>" if site.path else ""
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in site.reasons)
    costs = f", costs {duration(site.saved)}" if site.saved else ""
    return (
        f"<details><summary>refused: {escape(site.rule)}{where}{costs}</summary><ul>{reasons}</ul></details>"
    )
