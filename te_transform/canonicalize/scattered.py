"""Compute new cosines and sines where a model writes columns of one tensor into another (mrope)."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from te_transform.canonicalize.inplace import storage_of
from te_transform.canonicalize.moves import item_of
from te_transform.graph import edit
from te_transform.graph.nodes import called, is_number, is_tensor_node, same_shape, shape_of, value


def scatter_columns(graph: fx.Graph) -> None:
    """Rewrite `x[..., start:stop:step] = values` as a new tensor if x is cosines or sines.

    Multimodal models compute cosines for the positions in time, height and width, as [3, batch, length,
    width / 2]. They write columns of the second and third into the first. Angles can be joined in the same
    way only if nothing is written. Copies of the small tables cost less than the writes.
    """
    writes = [node for node in graph.nodes if node.target is operator.setitem]
    for write in writes:
        if (call := _scattered(write)) is not None:
            x = write.args[0]
            edit.set_target(write, torch.slice_scatter, call)
            write.meta["example_value"] = edit.evaluate(write)
            edit.replace_later_uses(x, write)


def _scattered(write: fx.Node) -> tuple | None:
    """Return the arguments of slice_scatter for a write, or None if it must stay.

    Autograd must not have saved the tensor, whose backward would raise after the write.
    """
    x, index, values = write.args
    if not all(is_tensor_node(each) and not value(each).requires_grad for each in (x, values)):
        return None
    part = _of_last(index, len(shape_of(x)))
    if part is None or value(x).dtype is not value(values).dtype or not _is_turn(x):
        return None
    columns = len(range(*part.indices(shape_of(x)[-1])))
    if not same_shape(shape_of(values), (*shape_of(x)[:-1], columns)) or _is_read_later(x, write):
        return None
    return x, values, -1, *part.indices(shape_of(x)[-1])


def _of_last(index: Any, rank: int) -> slice | None:
    """Return the slice of the last dimension if an index of constants takes all of the others, or None."""
    last = item_of(index, rank, -1)
    if not isinstance(last, slice):
        return None
    numbers = (last.start, last.stop, last.step)
    return last if all(each is None or (type(each) is int and each >= 0) for each in numbers) else None


def _is_turn(x: fx.Node) -> bool:
    """Return True for cosines or sines, for a product of them with a number, and for an item of either."""
    while x.target in (operator.getitem, torch.slice_scatter) or (
        called(x) == "mul" and len(x.args) == 2 and is_number(x.args[1])
    ):
        x = x.args[0]
    return called(x) in ("cos", "sin")


def _is_read_later(x: fx.Node, write: fx.Node) -> bool:
    """Return True if a later node may read the written numbers other than through `x`."""
    storage = storage_of(x.graph)
    others = {node for node, owners in storage.items() if owners & storage[x]} - {x, write}
    apart = {node for node in others if _is_another_item(node, x)}
    for node in sorted(others - apart):  # in graph order: views of other items are apart as well
        if node.args and node.args[0] in apart:
            apart.add(node)
    seen = {reader for node in others - apart for reader in node.users if reader > write}
    return any(not _is_another_item(reader, x) for reader in seen)


def _is_another_item(node: fx.Node, x: fx.Node) -> bool:
    """Return True if `node` and `x` are two items of the first dimension of one tensor."""
    if not node.target is x.target is operator.getitem or node.args[0] is not x.args[0]:
        return False
    own, other = (index[0] if isinstance(index, tuple) else index for index in (x.args[1], node.args[1]))
    return type(own) is type(other) is int and own != other and min(own, other) >= 0
