"""The overview of a page: bars of time, memory and operations, before and after, by class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape

from te_transform.execution.timing import duration
from te_transform.page.blocks import Block
from te_transform.page.colors import color_of
from te_transform.page.sketch import DrawnOperation
from te_transform.plan.memory import size_text
from te_transform.plan.overview import Overview

Bar = tuple[str, Mapping[str, float]]  # its name, and its parts by class

_UNCHANGED = "as captured"


def bars_of_report(overview: Overview | None, blocks: Iterable[Block]) -> Iterator[str]:
    """Yield the charts of a report: predicted time and memory, if known, and the number of operations."""
    if overview is not None and overview.seconds is not None:
        before, after = overview.seconds
        basis = f"predicted for an H100, {overview.mode}"
        yield chart("Time of a call", basis, [("before", before), ("after", after)], duration)
    if overview is not None and overview.memory is not None:
        rows = [
            (name, {"weights": step.weights, "AdamW's state": step.optimizer, **step.classes})
            for name, step in zip(("before", "after"), overview.memory, strict=True)
        ]
        yield chart("Memory of a training step", "predicted, at its peak", rows, size_text)
    yield chart("Operations", "without views and bookkeeping", _operation_bars(blocks), "{:,.0f}".format)


def _operation_bars(blocks: Iterable[Block]) -> list[Bar]:
    """Return the number of operations by the rule that fuses them."""
    counts: tuple[Counter[str], Counter[str]] = Counter(), Counter()
    for block in blocks:
        rules = {each.pair: each.rule for each in block.after if each.rule and not each.is_inactive}
        for count, side in zip(counts, operations_of_call(block), strict=True):
            count.update(dict.fromkeys(rules.values(), 0))
            for each in side:
                count[rules.get(each.pair, _UNCHANGED)] += block.count
    return [("before", counts[0]), ("after", counts[1])]


def operations_of_call(block: Block) -> tuple[list[DrawnOperation], list[DrawnOperation]]:
    """Return the operations of a call, before and after, without bookkeeping, inputs and ports.

    An inactive site runs what it replaces.
    """
    inactive = {each.pair for each in block.after if each.is_inactive}
    after = [
        *(each for each in block.after if each.pair not in inactive),
        *(each for each in block.before if each.pair in inactive),
    ]
    return [*filter(_is_counted, block.before)], [*filter(_is_counted, after)]


def _is_counted(operation: DrawnOperation) -> bool:
    return operation.kind == "" or bool(operation.rule)


def chart(title: str, basis: str, bars: Sequence[Bar], shown: Callable[[float], str]) -> str:
    """Return bars with a table of their parts as HTML; colors are inline, for a cell of a notebook.

    Args:
        basis: a text that says how the numbers were found.
        shown: a function that formats a number.
    """
    sizes: Counter[str] = Counter()
    for _, parts in bars:
        sizes.update(parts)
    kinds = [kind for kind, size in sizes.most_common() if size]  # the largest first
    totals = [sum(parts.values()) for _, parts in bars]
    longest = max(totals, default=0) or 1
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td class="track">{_bar(kinds, parts, longest, shown)}</td>'
        f'<td class="count"><b>{shown(total)}</b></td></tr>'
        for (name, parts), total in zip(bars, totals, strict=True)
    )
    named = f"<b>{escape(title)}</b>{_change(totals)}<br><small>{escape(basis)}</small>"
    table = f'<table class="bars">{rows}</table>{_classes(kinds, bars, shown)}'
    return f'<figure class="chart"><figcaption>{named}</figcaption>{table}</figure>'


def _change(totals: Sequence[float]) -> str:
    if len(totals) != 2 or not totals[0]:
        return ""
    change = f"{(totals[1] - totals[0]) / totals[0]:+.0%}"
    return f' <span class="change">{"unchanged" if totals[0] == totals[1] else change}</span>'


def _bar(
    kinds: Iterable[str], parts: Mapping[str, float], longest: float, shown: Callable[[float], str]
) -> str:
    pieces = "".join(
        f'<i title="{escape(kind)}: {shown(parts[kind])}" '
        f'style="width: {parts[kind] / longest:.2%}; background: {color_of(kind)}"></i>'
        for kind in kinds
        if parts.get(kind)
    )
    return f'<div style="display: flex; height: 1.3em; min-width: 6em">{pieces}</div>'


def _classes(kinds: Iterable[str], bars: Sequence[Bar], shown: Callable[[float], str]) -> str:
    head = "".join(f'<th class="count" scope="col">{escape(name)}</th>' for name, _ in bars)
    rows = []
    for kind in kinds:
        numbers = (shown(parts[kind]) if parts.get(kind) else "" for _, parts in bars)
        cells = "".join(f'<td class="count">{number}</td>' for number in numbers)
        swatch = f'<span style="color: {color_of(kind)}">&#9632;</span>'
        rows.append(f'<tr><th scope="row">{swatch} {escape(kind)}</th>{cells}</tr>')
    return f'<table class="classes"><tr><td></td>{head}</tr>{"".join(rows)}</table>'
