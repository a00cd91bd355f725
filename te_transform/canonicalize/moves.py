"""Canonical calls that depend on a call's result: a cast's dtype, flatten's shape, a chunk's columns."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from te_transform.graph import ops
from te_transform.graph.nodes import dtype_of, is_tensor_node, same_shape, shape_of, value

ALL = slice(None)


def _as_cast(node: fx.Node) -> tuple | None:
    """Return a cast that keeps the value up to rounding, or None for any other conversion.

    Calls that change the device or the memory format are not casts. Casts to integers and 8-bit formats
    are not accepted, because models quantize by them.
    """
    x = node.args[0] if node.args else None
    if not is_tensor_node(x) or value(x).device != value(node).device:
        return None
    rounds = dtype_of(node).is_floating_point and dtype_of(node).itemsize > 1
    if not rounds and dtype_of(node) is not dtype_of(x):
        return None
    moves = node.kwargs.get("copy") or True in node.args[2:] or node.kwargs.get("memory_format") is not None
    return None if moves else (ops.cast, (x, dtype_of(node)))


def _as_reshape(node: fx.Node) -> tuple | None:
    x = node.args[0] if node.args else None
    sizes = reshape_sizes(x, shape_of(node)) if is_tensor_node(x) else None
    return (torch.reshape, (x, sizes)) if sizes is not None else None


def reshape_sizes(x: fx.Node, shape: torch.Size) -> tuple | None:
    """Return `shape` as arguments of a reshape of `x`, with -1 for a symbolic size that `x` does not have.

    Return None if several sizes are computed, because an fx graph needs a node for each.
    """
    own = [size for size in shape_of(x) if isinstance(size, torch.SymInt)]
    computed = [
        d
        for d, size in enumerate(shape)
        if isinstance(size, torch.SymInt) and not any(same_shape((size,), (o,)) for o in own)
    ]
    if len(computed) > 1:
        return None
    return tuple(-1 if d in computed else size for d, size in enumerate(shape))


def columns_of_split(part: fx.Node) -> tuple | None:
    """Return the columns that an item selects from a split or a chunk."""
    pieces, index = part.args
    if pieces.target not in (torch.split, torch.chunk) or type(index) is not int:
        return None
    x, sections, dim = pieces.args
    width = shape_of(x)[-1]
    counts = sections if isinstance(sections, (tuple, list)) else (sections,)
    if dim != -1 or not all(type(count) is int for count in (width, *counts)):
        return None
    if counts is sections:
        start = (0, *accumulate(sections))[index % len(sections)]
    else:
        step = sections if pieces.target is torch.split else -(-width // sections)
        start = index % -(-width // step) * step
    return ops.columns, (x, start, start + shape_of(part)[-1])


def columns_of_rows(part: fx.Node) -> tuple | None:
    """Return the columns of x.view(..., n, width)[..., i, :], or of the same view with unbind(-2)."""
    rows, index = part.args
    if rows.target is torch.unbind and rows.args[1] == -2:
        rows = rows.args[0]
    elif is_tensor_node(rows):
        index = item_of(index, len(shape_of(rows)), -2)
    if rows.target is not torch.reshape or type(index) is not int or rows.meta.get("written"):
        return None
    x, (*leading, count, width) = rows.args[0], shape_of(rows)
    parts_last = type(count) is type(width) is int and same_shape(shape_of(x), (*leading, count * width))
    if not parts_last or rows.meta["region"] != part.meta["region"]:
        return None
    start = index % count * width
    return ops.columns, (x, start, start + width)


def spread_index(index: Any, rank: int) -> list[Any]:
    """Return the parts of an index, with a slice for each dimension that it omits or that `...` covers."""
    parts = [*index] if isinstance(index, tuple) else [index]
    parts += [Ellipsis] * (not any(part is Ellipsis for part in parts))
    missing = [ALL] * (rank + 1 + sum(part is None for part in parts) - len(parts))
    return [each for part in parts for each in (missing if part is Ellipsis else [part])]


def item_of(index: Any, rank: int, dim: int) -> Any:
    """Return the part of an index for `dim`, such as -1, if the index takes all of the others, or None."""
    parts = spread_index(index, rank)
    others = [part for place, part in enumerate(parts, -len(parts)) if place != dim]
    is_one = len(parts) == rank >= -dim and all(isinstance(part, slice) and part == ALL for part in others)
    return parts[dim] if is_one else None


# name -> function that returns the canonical call of a node with this name, or None to leave it unchanged
MOVES: dict[str, Callable[[fx.Node], tuple | None]] = {
    **dict.fromkeys(("to", "type", "type_as", "float", "half", "bfloat16", "double"), _as_cast),
    **dict.fromkeys(("flatten", "unflatten", "view_as", "reshape_as"), _as_reshape),
}
