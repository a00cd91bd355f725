"""Write graphs as text: a listing, or Graphviz text.

The model's own tensors have no line in a listing and no box in a drawing; the calls that read them name them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import fx

from te_transform.graph.grouped import grouped
from te_transform.graph.nodes import called, dtype_name, name_in_model, path_of, value

_ITEMS = 6  # shown items of a list or a dictionary
_CALL = 120  # shown characters of a call
_COLORS = ("#dbe9f6", "#fde8d3", "#e2f0d9", "#efe0f2", "#fbf3c4", "#d9f0ee", "#f8dede", "#e6e6ee")


@dataclass(frozen=True)
class Part:
    """A captured graph, before and after, with the paths of the modules that share it ("" is the model)."""

    paths: tuple[str, ...]
    before: fx.Graph
    after: fx.Graph


def listing(graph: fx.Graph) -> list[tuple[str, bool]]:
    """Return a line per node (name, dtype and shape, module path, operation), and True if it is fused."""
    nodes = [node for node in graph.nodes if not name_in_model(node)]
    rows = [(node.name, described(node), module_text(node), call_of(node)) for node in nodes]
    widths = [max(map(len, column), default=0) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return list(zip(lines, map(is_fused, nodes), strict=True))


def dot(graph: fx.Graph) -> str:
    """Return Graphviz text: a cluster and a color per block of the model, with a frame around fused nodes."""
    nodes = [node for node in graph.nodes if not name_in_model(node)]
    blocks = grouped((_block_of(module_text(node)), node) for node in nodes)
    lines = ["digraph model {", '  node [shape=box, style="rounded,filled", fontname="sans-serif"];']
    for number, (block, members) in enumerate(blocks.items()):
        boxes = [_box(node, _COLORS[number % len(_COLORS)] if block else "white") for node in members]
        label = f"label={_dot_string(block)}; color=gray;"
        lines += [f"  subgraph cluster_{number} {{ {label}", *boxes, "  }"] if block else boxes
    for node in nodes:
        sources = (source for source in node.all_input_nodes if not name_in_model(source))
        lines += [f"  {_dot_string(source.name)} -> {_dot_string(node.name)};" for source in sources]
    return "\n".join([*lines, "}"])


def module_text(node: fx.Node) -> str:
    """Return the path of the module that made the call, "" for inputs.

    Dynamo attributes an input to its first reader.
    """
    return "" if node.op == "placeholder" else path_of(node)


def _block_of(path: str) -> str:
    """Return the block that a path belongs to: `h.3` for h.3.mlp.fc1, `model` for model.norm."""
    parts = path.split(".")
    depth = next((depth for depth, part in enumerate(parts, 1) if part.isdecimal()), 1)
    return ".".join(parts[:depth])


def _box(node: fx.Node, color: str) -> str:
    label = _dot_string("\n".join(filter(None, (called(node), described(node)))))
    frame = ', penwidth=3, color="#76b900"' if is_fused(node) else ""
    return f'    {_dot_string(node.name)} [label={label}, fillcolor="{color}"{frame}];'


def _dot_string(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def is_fused(node: fx.Node) -> bool:
    """Return True if the node is the call of a fused op."""
    return "fused" in node.meta


def shape_and_dtype(node: fx.Node) -> tuple[tuple[int | str, ...] | None, str | None]:
    """Return the shape and dtype of a node's value, symbolic sizes as text; (None, None) if not a tensor."""
    result = value(node)
    if not isinstance(result, torch.Tensor):
        return None, None
    # str() of a SymInt is its expression; a comparison would add a guard
    return tuple(size if type(size) is int else str(size) for size in result.shape), dtype_name(result.dtype)


def described(node: fx.Node) -> str:
    """Return dtype and shape as text, "" if the value is not a tensor."""
    shape, dtype = shape_and_dtype(node)
    return "" if shape is None else f"{dtype}[{', '.join(map(str, shape))}]"


def call_of(node: fx.Node) -> str:
    """Return the call of a node as text of bounded length."""
    if node.op == "placeholder":
        return "input"
    path = path_of(node)
    args = [_shown(argument, path) for argument in node.args[:_ITEMS]]
    args += [f"{name}={_shown(argument, path)}" for name, argument in islice(node.kwargs.items(), _ITEMS)]
    args += ["..."] * (max(len(node.args), len(node.kwargs)) > _ITEMS)
    owner = f"{args.pop(0)}." if node.op == "call_method" and args else ""
    return _cut(f"{owner}{called(node)}({', '.join(args)})", _CALL)


def _shown(argument: Any, path: str, depth: int = 3) -> str:
    """Return any argument as text of bounded length; the model's tensors by their names below `path`."""
    if isinstance(argument, fx.Node):
        return name_in_model(argument).removeprefix(f"{path}.") or argument.name
    if isinstance(argument, torch.Tensor):
        return f"tensor[{', '.join(map(str, argument.shape))}]"
    if isinstance(argument, slice):
        bounds = (argument.start, argument.stop, argument.step)
        return ":".join("" if bound is None else _shown(bound, path, depth) for bound in bounds)
    if not isinstance(argument, (tuple, list, dict)):
        return _cut(" ".join(repr(argument).split()), 40)
    left, right = "{}" if isinstance(argument, dict) else "[]" if isinstance(argument, list) else "()"
    if depth == 0:
        return f"{left}...{right}"
    if isinstance(argument, dict):
        pairs = islice(argument.items(), _ITEMS)
        items = [f"{key!r}: {_shown(item, path, depth - 1)}" for key, item in pairs]
    else:
        items = [_shown(item, path, depth - 1) for item in argument[:_ITEMS]]
    return left + ", ".join([*items, "..."] if len(argument) > _ITEMS else items) + right


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
