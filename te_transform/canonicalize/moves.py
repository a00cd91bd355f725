"""What only a call's result tells: a cast's dtype, the shape of flatten, the columns of a chunk."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import fx

from te_transform.graph import ops
from te_transform.graph.nodes import dtype_of, is_tensor_node, same_shape, shape_of, value


def _cast(node: fx.Node) -> tuple | None:
    """A cast that keeps the value up to rounding, unless it moves the tensor to another device or lays it out
    anew. Casts to integers and to formats of eight bits change it: models quantize by them.
    """
    x = node.args[0] if node.args else None
    if not is_tensor_node(x) or value(x).device != value(node).device:
        return None
    rounds = dtype_of(node).is_floating_point and dtype_of(node).itemsize > 1
    if not rounds and dtype_of(node) is not dtype_of(x):
        return None
    moves = node.kwargs.get("copy") or True in node.args[2:] or node.kwargs.get("memory_format") is not None
    return None if moves else (ops.cast, (x, dtype_of(node)))


def _reshape(node: fx.Node) -> tuple | None:
    x = node.args[0] if node.args else None
    sizes = reshape_sizes(x, shape_of(node)) if is_tensor_node(x) else None
    return (torch.reshape, (x, sizes)) if sizes is not None else None


def reshape_sizes(x: fx.Node, shape: torch.Size) -> tuple | None:
    """`shape` as arguments of a reshape of `x`: -1 in the place of the one size that is none of its own.

    None where more than one is computed: an fx graph needs a node for each.
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


def piece_of(part: fx.Node) -> tuple | None:
    """The columns that this item of a split or chunk of the last dimension is."""
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


# name -> the call that stands for a node of this name; None: it stays as it is
MOVES: dict[str, Callable[[fx.Node], tuple | None]] = {
    **dict.fromkeys(("to", "type", "type_as", "float", "half", "bfloat16", "double"), _cast),
    **dict.fromkeys(("flatten", "unflatten", "view_as", "reshape_as"), _reshape),
}
