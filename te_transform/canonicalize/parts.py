"""Find the calls that select half of the columns of a value, in any spelling."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from te_transform.canonicalize.moves import item_of
from te_transform.graph import ops
from te_transform.graph.nodes import is_tensor_node, same_shape, shape_of


class ColumnHalf(NamedTuple):
    """A half of the columns of x: the first or second half, or the even or odd columns (`in_pairs`)."""

    x: fx.Node
    index: int
    in_pairs: bool


def are_both(first: ColumnHalf, second: ColumnHalf) -> bool:
    """Return True if two parts are the two parts of one value, in order."""
    return first == second._replace(index=0) and (first.index, second.index) == (0, 1)


def part_of(node: fx.Node) -> ColumnHalf | None:
    """Return the half of the columns of a value that a node selects, or None."""
    if node.target is ops.columns:
        return _half_of_columns(*node.args)
    if node.target is not operator.getitem:
        return None
    x, at = node.args
    if x.target is torch.unbind:
        return _half_of_pairs(x.args[0], at) if x.args[1] == -1 else None
    last = item_of(at, len(shape_of(x)), -1) if is_tensor_node(x) else None
    if isinstance(last, slice) and last.stop is None and last.step == 2 and last.start in (None, 0, 1):
        return ColumnHalf(x, last.start or 0, in_pairs=True)
    return _half_of_pairs(x, last)


def _half_of_columns(x: fx.Node, start: int, stop: int) -> ColumnHalf | None:
    width = shape_of(x)[-1]
    if type(width) is not int or width % 2:
        return None
    index = {(0, width // 2): 0, (width // 2, width): 1}.get((start, stop))
    return None if index is None else ColumnHalf(x, index, in_pairs=False)


def _half_of_pairs(pairs: fx.Node, index: Any) -> ColumnHalf | None:
    """Return the even or odd columns that an index selects from columns reshaped to [..., width / 2, 2]."""
    if type(index) is not int or index not in (0, 1) or pairs.target is not torch.reshape:
        return None
    *shape, half, two = (1, *shape_of(pairs))
    whole = two == 2 and same_shape((1, *shape_of(pairs.args[0])), (*shape, 2 * half))
    return ColumnHalf(pairs.args[0], index, in_pairs=True) if whole else None
