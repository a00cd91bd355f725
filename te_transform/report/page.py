"""How a report and its graphs are written down: HTML, a listing, Graphviz text."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from te_transform.weights import dtype_name

if TYPE_CHECKING:
    from te_transform.report import Places

_ITEMS = 6  # of a list or a dictionary that are shown
_CALL = 120  # characters of one call that are shown
_COLOURS = ("#dbe9f6", "#fde8d3", "#e2f0d9", "#efe0f2", "#fbf3c4", "#d9f0ee", "#f8dede", "#e6e6ee")
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
    """A page of `body` and of listings, as `listing` makes them, that unfold; the marked lines stand out."""
    parts = [body]
    for name, lines in listings.items():
        text = "\n".join(f"<mark>{escape(line)}</mark>" if marked else escape(line) for line, marked in lines)
        parts.append(f"<details><summary>{escape(name)}</summary><pre><code>{text}</code></pre></details>")
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    opening = f'<!doctype html>\n<html lang="en"><head>{head}</head><body>'
    return "\n".join([opening, *parts, "</body></html>\n"])


def listing(graph: fx.Graph) -> list[tuple[str, bool]]:
    """A line for each node (name, dtype and shape, module path, operation), and whether it is a fusion."""
    rows = [(n.name, _described(n), str(n.meta.get("path", "")), _call(n)) for n in graph.nodes]
    widths = [max(map(len, column), default=0) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return list(zip(lines, map(is_fused, graph.nodes), strict=True))


def dot(graph: fx.Graph) -> str:
    """Graphviz text: a cluster and a colour for each block of the model, fusions framed, no get_attr."""
    nodes = [node for node in graph.nodes if node.op != "get_attr"]
    blocks: dict[str, list[fx.Node]] = {}
    for node in nodes:
        blocks.setdefault(_block(str(node.meta.get("path", ""))), []).append(node)
    lines = ["digraph model {", '  node [shape=box, style="rounded,filled", fontname="sans-serif"];']
    for number, (block, members) in enumerate(blocks.items()):
        boxes = [_box(node, _COLOURS[number % len(_COLOURS)] if block else "white") for node in members]
        label = f"label={_quoted(block)}; color=gray;"
        lines += [f"  subgraph cluster_{number} {{ {label}", *boxes, "  }"] if block else boxes
    for node in nodes:
        sources = (source for source in node.all_input_nodes if source.op != "get_attr")
        lines += [f"  {_quoted(source.name)} -> {_quoted(node.name)};" for source in sources]
    return "\n".join([*lines, "}"])


def _block(path: str) -> str:
    """The part of the model a path belongs to: `h.3` of h.3.mlp.fc1, `model` of model.norm."""
    parts = path.split(".")
    depth = next((depth for depth, part in enumerate(parts, 1) if part.isdecimal()), 1)
    return ".".join(parts[:depth])


def _box(node: fx.Node, colour: str) -> str:
    label = _quoted("\n".join(filter(None, (target(node), _described(node)))))
    frame = ', penwidth=3, color="#76b900"' if is_fused(node) else ""
    return f'    {_quoted(node.name)} [label={label}, fillcolor="{colour}"{frame}];'


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def is_fused(node: fx.Node) -> bool:
    """Whether the node is what a fusion left: a call of a fused module, or a linear merged of several."""
    return "merged" in node.meta or (node.op == "call_module" and str(node.target).split(".")[-1] == "fused")


def target(node: fx.Node) -> str:
    """What the node calls or names."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def shape_and_dtype(node: fx.Node) -> tuple[tuple[int | str, ...] | None, str | None]:
    """What was recorded of the node's value, symbolic sizes as text; None where that is no tensor."""
    meta = node.meta.get("tensor_meta")
    if not hasattr(meta, "shape"):
        return None, None
    # str() of a SymInt is its expression; comparing one would add a guard
    shape = tuple(size if type(size) is int else str(size) for size in meta.shape)
    return shape, dtype_name(meta.dtype)


def _described(node: fx.Node) -> str:
    shape, dtype = shape_and_dtype(node)
    return "" if shape is None else f"{dtype}[{', '.join(map(str, shape))}]"


def _call(node: fx.Node) -> str:
    if node.op == "placeholder":
        return "input"
    if node.op == "get_attr":
        return f"the model's {node.target}"
    args = [_shown(value) for value in node.args[:_ITEMS]]
    args += [f"{name}={_shown(value)}" for name, value in islice(node.kwargs.items(), _ITEMS)]
    args += ["..."] * (max(len(node.args), len(node.kwargs)) > _ITEMS)
    owner = f"{args.pop(0)}." if node.op == "call_method" and args else ""
    return _cut(f"{owner}{target(node)}({', '.join(args)})", _CALL)


def _shown(value: Any, depth: int = 3) -> str:
    """`value` in bounded space, whatever it is."""
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, torch.Tensor):
        return f"tensor[{', '.join(map(str, value.shape))}]"
    if isinstance(value, slice):
        return ":".join("" if v is None else _shown(v, depth) for v in (value.start, value.stop, value.step))
    if not isinstance(value, (tuple, list, dict)):
        return _cut(" ".join(repr(value).split()), 40)
    left, right = "{}" if isinstance(value, dict) else "[]" if isinstance(value, list) else "()"
    if depth == 0:
        return f"{left}...{right}"
    if isinstance(value, dict):
        items = [f"{key!r}: {_shown(item, depth - 1)}" for key, item in islice(value.items(), _ITEMS)]
    else:
        items = [_shown(item, depth - 1) for item in value[:_ITEMS]]
    return left + ", ".join([*items, "..."] if len(value) > _ITEMS else items) + right


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
