"""Drop calls that do not change a value, and calls that nothing reads."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from te_transform.canonicalize.inplace import written
from te_transform.graph import edit, ops
from te_transform.graph.nodes import dtype_of, is_number, is_tensor_node, same_shape, shape_of


def drop_noise(graph: fx.Graph) -> None:
    """Make the readers of a value-preserving call read its argument, and drop calls that nothing reads."""
    shared = written(graph)  # these stay: a copy with the same values protects them from a write
    for node in graph.nodes:
        if node in shared or node.op != "call_function" or node.kwargs:
            continue
        value = _NOISE[node.target](*node.args, node) if node.target in _NOISE else None
        if value is not None and not _is_apart(node):
            edit.bypass(node, value)
    edit.eliminate_dead_code(graph)


def _is_apart(node: fx.Node) -> bool:
    """Return True if the call makes a copy that is read after an in-place write.

    The model may have written to the copied tensor, even if this graph has a new value instead of the write.
    """
    return node.target in _COPYING_OPS and any(
        user.meta["region"] != node.meta["region"] for user in node.users
    )


def _if(condition: Callable[..., bool]) -> Callable[..., fx.Node | None]:
    return lambda x, *rest: x if condition(x, *rest) else None


def _operand_is(number: int) -> Callable[..., fx.Node | None]:
    """Return `x` for an operation of `x` and this number."""
    return _if(lambda x, other, node: _is_number(other, number) and _same_dtype(x, node))


def _has_no_limits(x: fx.Node, least: Any, most: Any, node: fx.Node) -> bool:
    """Return True if a clamp keeps every number. Some models clamp to infinity if a limit is not set."""
    return least in (None, -math.inf) and most in (None, math.inf) and _same_dtype(x, node)


def _is_number(value: Any, number: int) -> bool:
    return is_number(value) and value == number


def _same_dtype(x: Any, node: fx.Node) -> bool:
    return is_tensor_node(x) and dtype_of(x) is dtype_of(node)


def _keeps_shape(x: fx.Node, sizes: Any, node: fx.Node) -> bool:
    return same_shape(shape_of(x), shape_of(node))


def _is_broadcast_anyway(x: fx.Node, sizes: Any, node: fx.Node) -> bool:
    """Return True if `x` has the expanded shape, or if every reader broadcasts it to that shape.

    Scalars are not accepted, because a tensor without dimensions has lower priority in dtype promotion.
    """
    return _keeps_shape(x, sizes, node) or all(
        len(shape_of(x)) > 0
        and user.target in _BROADCAST
        and any(
            is_tensor_node(other) and other is not node and same_shape(shape_of(other), shape_of(user))
            for other in user.args
        )
        for user in node.users
    )


def _is_contiguous_for_nobody(x: fx.Node, node: fx.Node) -> bool:
    """Return True if the argument is already contiguous, or if all readers accept any layout."""
    accepting = (user.target in _ANY_LAYOUT or ops.is_op(user.target) for user in node.users)
    return x.target is torch.Tensor.contiguous or all(accepting)


def _takes_all(x: fx.Node, index: Any, node: fx.Node) -> bool:
    """Return True if an index such as x[:, 0:] takes all of x."""
    parts = index if isinstance(index, tuple) else (index,)
    whole = all(part is Ellipsis or isinstance(part, slice) for part in parts)
    return whole and is_tensor_node(x) and same_shape(shape_of(x), shape_of(node))


def _before_reshapes(x: fx.Node, sizes: Any, node: fx.Node) -> fx.Node | None:
    """Return `x`, or the value before its reshape, if it has the shape of `node` already."""
    for before in (x, x.args[0] if x.target is torch.reshape else None):
        if before is not None and same_shape(shape_of(before), shape_of(node)):
            return before
    return None


def _only_part(parts: tuple, dim: int, node: fx.Node) -> fx.Node | None:
    """Return the only non-empty tensor among `parts`: transformers' caches start as torch.tensor([])."""
    full = [part for part in parts if not same_shape(shape_of(part), (0,))]
    return full[0] if len(full) == 1 and _same_dtype(full[0], node) else None


def _turned_back(x: fx.Node, *dims: Any) -> fx.Node | None:
    """Return the value whose dimensions two transposes swap and swap back."""
    *dims, node = dims
    return x.args[0] if x.target is node.target and [*x.args[1:]] == dims else None


_ANY_LAYOUT = {
    torch.reshape, torch.transpose, torch.t, operator.getitem, torch.matmul, torch.bmm, F.linear
}  # fmt: skip
_BROADCAST = (torch.add, torch.sub, torch.mul, torch.div, torch.masked_fill, torch.where)

_COPYING_OPS = (torch.add, torch.sub, torch.mul, torch.div, torch.cat)

# target -> function that returns the argument that a call passes through, or None if the call changes it
_NOISE: dict[Any, Callable[..., fx.Node | None]] = {
    ops.cast: _if(lambda x, dtype, node: _same_dtype(x, node)),
    ops.dropout: _if(lambda x, p, training, node: training is False or _is_number(p, 0)),
    torch.Tensor.contiguous: _if(_is_contiguous_for_nobody),
    torch.Tensor.expand: _if(_is_broadcast_anyway),
    torch.Tensor.expand_as: _if(_is_broadcast_anyway),
    torch.reshape: _before_reshapes,
    torch.transpose: _turned_back,
    torch.t: _turned_back,
    torch.permute: _if(lambda x, dims, node: list(dims) == list(range(len(dims)))),
    torch.add: _operand_is(0),
    torch.sub: _operand_is(0),
    torch.mul: _operand_is(1),
    torch.div: _operand_is(1),
    torch.clamp: _if(_has_no_limits),
    torch.cat: _only_part,
    operator.getitem: _if(_takes_all),
    operator.pos: _if(lambda x, node: True),
}
