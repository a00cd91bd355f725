"""Write the HTML of a page: one self-contained file that loads nothing from the network.

The model is drawn block by block, as captured and as converted. A script in the page handles clicks, keys and
the search; without the script, all content is still readable.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from te_transform.execution.timing import duration
from te_transform.page.blocks import Block, DrawnOperation
from te_transform.plan.rule import Outcome
from te_transform.report.places import Places

_WIDE, _HIGH, _GAP = 130, 38, 14  # width and height of an operation's box, gap between boxes, in pixels
_LETTERS = 19  # letters that fit into a box

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 100rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 2rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem 1rem .3rem 0; border-bottom: 1px solid #8886; }
td { overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: .9rem; }
dd { margin: 0; overflow-wrap: anywhere; }
td:first-child, td code { overflow-wrap: normal; }
.count { text-align: right; white-space: nowrap; }
pre { overflow-x: auto; font-size: 12.5px; line-height: 1.4; }
mark { background: #76b90055; color: inherit; }
#search { font: inherit; width: min(24rem, 100%); padding: .3rem .6rem; }
.pair { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 1rem; }
figure { margin: 0 0 1rem; overflow-x: auto; border: 1px solid #8886; border-radius: .5rem; }
figcaption { position: sticky; left: 0; padding: .4rem .7rem; overflow-wrap: anywhere; }
svg { display: block; margin: 0 auto; font: 11.5px system-ui, sans-serif; }
svg text { fill: currentColor; text-anchor: middle; }
svg .value { opacity: .65; font-size: 10px; }
svg path { fill: none; stroke: #888; }
svg rect { fill: color-mix(in srgb, Canvas 88%, gray); stroke: #8888; }
.fused rect { --color: hsl(var(--hue) 70% 50%);
  fill: color-mix(in srgb, Canvas 65%, var(--color)); stroke: var(--color); }
.operation { cursor: pointer; }
.operation:focus { outline: none; }
.operation:focus rect, .operation.open rect { stroke: currentColor; stroke-width: 2.5; }
.searching .operation:not(.found), .searching tr.row:not(.found) { opacity: .2; }
.key i { background: hsl(var(--hue) 70% 50% / .6); display: inline-block; width: .8em; height: .8em; }
.key span { margin-right: 1.2rem; white-space: nowrap; }
#detail { position: fixed; right: 1rem; bottom: 1rem; max-width: min(44rem, 100% - 4rem); max-height: 45vh;
  overflow: auto; padding: .8rem 1rem; border: 1px solid #888; border-radius: .5rem; background: Canvas;
  white-space: pre-wrap; overflow-wrap: anywhere; font: 12.5px/1.5 ui-monospace, monospace; }
@media (max-width: 48rem) {
  .pair { grid-template-columns: minmax(0, 1fr); }
  table { font-size: .8rem; }
  th, td { padding-right: .5rem; }
  ul { padding-left: 1.2rem; }
}
td ul { margin: 0; padding-left: 1rem; }
"""

# The script inserts text only as text content: the name of a module cannot inject HTML.
_SCRIPT = """
const all = [...document.querySelectorAll(".operation, tr.row")];
const detail = document.getElementById("detail"), search = document.getElementById("search");
function close() {
  detail.hidden = true;
  document.querySelectorAll(".open").forEach(each => each.classList.remove("open"));
}
function open(operation) {
  close();
  operation.classList.add("open");
  detail.textContent = operation.dataset.detail;
  detail.hidden = false;
}
document.addEventListener("click", event => {
  const operation = event.target.closest(".operation");
  operation ? open(operation) : detail.contains(event.target) || close();
});
document.addEventListener("keydown", event => {
  if (event.key === "Escape") { close(); search.value = ""; find(); }
  else if (event.target === search) return;
  else if (event.key === "/") { search.focus(); event.preventDefault(); }
  else if ((event.key === "Enter" || event.key === " ") && event.target.matches(".operation")) {
    open(event.target);
    event.preventDefault();
  }
});
function find() {
  const words = search.value.toLowerCase().split(" ").filter(Boolean);
  document.body.classList.toggle("searching", words.length > 0);
  for (const each of all) {
    const text = (each.dataset.detail || each.textContent).toLowerCase();
    each.classList.toggle("found", words.every(word => text.includes(word)));
  }
}
search.addEventListener("input", find);
"""


def summary(
    title: str, about: Mapping[str, str], fused: list[Places], refused: list[Places], notes: Iterable[str]
) -> str:
    """Return the subject, the tables and the notes of a report as an HTML fragment."""
    told = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in about.items() if text)
    why = ("why not",) * any(places.reasons for places in fused)
    tables = [_table("fused", ("rule", "fused", "active", "where", *why), fused)] if fused else []
    tables += [_table("refused", ("rule", "refused", "where", "why not"), refused)] if refused else []
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    head = [f"<h1>{escape(title)}</h1>", f"<dl>{told}</dl>"]
    return "\n".join([*head, *tables, *([f"<ul>{listed}</ul>"] if listed else [])])


def in_frame(body: str, whole_page: str) -> str:
    """Return a summary with the whole page in a collapsed frame that isolates the page's style and script."""
    frame = f'<iframe srcdoc="{escape(whole_page)}" style="width: 100%; height: 45rem; border: 0"></iframe>'
    return f"{body}\n<details><summary>before and after, block by block</summary>{frame}</details>"


def _broken(path: str) -> str:
    """Return a path as HTML with line breaks allowed after its dots, except inside ranges such as {0..3}."""
    return re.sub(r"(?<!\.)\.(?!\.)", ".<wbr>", escape(path))


def _table(name: str, head: tuple[str, ...], rows: list[Places]) -> str:
    """Return the HTML table of fused or refused sites, with predicted times if they are known."""
    priced = "saves" if name == "fused" else "costs"
    place = head.index("where")
    head = (*head[:place], *[priced] * any(places.saved for places in rows), *head[place:])
    numbers = (name, "active", priced)
    named = (f"<th{' class=count' * (text in numbers)}>{text}</th>" for text in head)
    lines = [f'<table class="{name}">', f"<tr>{''.join(named)}</tr>"]
    for places in rows:
        where = "<br>".join(f"<code>{_broken(path)}</code> x{count}" for path, count in places.patterns)
        cells = f'<td>{escape(places.rule)}</td><td class="count">{places.count}</td>'
        cells += f'<td class="count">{places.active}</td>' if "active" in head else ""
        if priced in head:
            cells += f'<td class="count">{duration(places.saved) if places.saved else ""}</td>'
        why = "".join(f"<li>{escape(reason)}</li>" for reason in places.reasons)
        why = f"<td><ul>{why}</ul></td>" if "why not" in head else ""
        lines.append(f'<tr class="row">{cells}<td>{where}</td>{why}</tr>')
    return "\n".join([*lines, "</table>"])


def whole(
    title: str,
    body: str,
    drawn: Sequence[Block],
    listings: Sequence[tuple[str, list[tuple[str, bool]]]],
) -> str:
    """Return a page with `body`, the drawn blocks, and the listings of report/drawing.py, collapsed.

    The marked lines of a listing are highlighted.
    """
    parts = [body, *_drawing(drawn)]
    for name, lines in listings:
        text = "\n".join(f"<mark>{escape(line)}</mark>" if marked else escape(line) for line, marked in lines)
        parts.append(f"<details><summary>{escape(name)}</summary><pre><code>{text}</code></pre></details>")
    named = f'<meta charset="utf-8"><title>{escape(title)}</title>'
    fitting = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f"{named}{fitting}<style>{_STYLE}</style>"
    opening = f'<!doctype html>\n<html lang="en"><head>{head}</head><body>'
    return "\n".join([opening, *parts, f"<script>{_SCRIPT}</script></body></html>\n"])


def _drawing(blocks: Sequence[Block]) -> list[str]:
    """Return the color key, the search field, and each block before and after, side by side."""
    rules = sorted({each.rule for block in blocks for each in block.after} - {""})
    hues = {rule: 360 * number // len(rules) for number, rule in enumerate(rules)}
    key = "".join(f'<span style="--hue:{hues[rule]}"><i></i> {escape(rule)}</span>' for rule in rules)
    asked = '<input id="search" type="search" placeholder="search: / " aria-label="search the operations">'
    pairs = [f'<div class="pair">{_figures(block, hues)}</div>' for block in blocks]
    detail = '<div id="detail" role="status" hidden></div>'
    return [f'<p class="key">{key}</p>', f"<p>{asked}</p>", *pairs, detail]


def _figures(block: Block, hues: dict[str, int]) -> str:
    name = f"<code>{escape(block.name)}</code>{f' x{block.count}' if block.count > 1 else ''}"
    refused = "".join(map(_refusal, block.refused))
    before = _figure(f"{name}, before: {_counted(block.before)}", block.before, hues)
    after = _figure(f"{name}, after: {_counted(block.after)}{refused}", block.after, hues)
    return before + after


def _counted(operations: Sequence[DrawnOperation]) -> str:
    return f"{len(operations)} operation{'' if len(operations) == 1 else 's'}"


def _figure(caption: str, operations: Sequence[DrawnOperation], hues: dict[str, int]) -> str:
    if not operations:
        return f"<figure><figcaption>{caption}</figcaption></figure>"
    left = -min(each.column for each in operations)
    right = max(each.column for each in operations)
    width = round((left + right + 1) * (_WIDE + _GAP))
    height = (max(each.row for each in operations) + 1) * (_HIGH + _GAP) + _GAP
    places = [
        (round((each.column + left) * (_WIDE + _GAP)) + _GAP // 2, each.row * (_HIGH + _GAP) + _GAP)
        for each in operations
    ]
    lines = [
        _line(places[source], place)
        for each, place in zip(operations, places, strict=True)
        for source in each.reads
    ]
    boxes = [_box(each, *place, hues) for each, place in zip(operations, places, strict=True)]
    sizes = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    drawn = f"<svg {sizes}>{''.join(lines + boxes)}</svg>"
    return f"<figure><figcaption>{caption}</figcaption>{drawn}</figure>"


def _refusal(site: Outcome) -> str:
    where = f" at <code>{escape(site.path)}</code>" if site.path else ""
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in site.reasons)
    costs = f", costs {duration(site.saved)}" if site.saved else ""
    return (
        f"<details><summary>refused: {escape(site.rule)}{where}{costs}</summary><ul>{reasons}</ul></details>"
    )


def _line(source: tuple[int, int], target: tuple[int, int]) -> str:
    (x, y), (to_x, to_y) = source, target
    x, y, to_x = x + _WIDE // 2, y + _HIGH, to_x + _WIDE // 2
    return f'<path d="M{x} {y}C{x} {y + _GAP} {to_x} {to_y - _GAP} {to_x} {to_y}"></path>'


def _box(operation: DrawnOperation, x: int, y: int, hues: dict[str, int]) -> str:
    fused = f' fused" style="--hue:{hues[operation.rule]}' if operation.rule else ""
    told = f'class="operation{fused}" tabindex="0" role="button" data-detail="{escape(operation.detail)}"'
    middle = x + _WIDE // 2
    return (
        f'<g {told}><rect x="{x}" y="{y}" width="{_WIDE}" height="{_HIGH}" rx="6"></rect>'
        f'<text x="{middle}" y="{y + 16}">{escape(_cut(operation.title))}</text>'
        f'<text class="value" x="{middle}" y="{y + 30}">{escape(_cut(operation.value, 4))}</text></g>'
    )


def _cut(text: str, more: int = 0) -> str:
    return text if len(text) <= _LETTERS + more else f"{text[: _LETTERS + more - 1]}\u2026"
