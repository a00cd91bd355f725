"""Drop the calls that do nothing to a value, and those that nothing reads."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from te_transform import rewrite, vocabulary
from te_transform.normalise.inplace import written
from te_transform.pattern import dtype_of, is_tensor_node, same_shape, shape_of
from te_transform.trace import Recording


def drop_noise(recording: Recording) -> None:
    """Let the readers of a value-preserving call read its argument; x[:] stays, it touches the tensor."""
    shared = written(recording.graph)  # a copy that does nothing to the values does keep a write off them
    for node in recording.graph.nodes:
        if node in shared or node.op != "call_function" or node.kwargs:
            continue
        if node.target in _NOISE and _NOISE[node.target](*node.args, node):
            rewrite.bypass(recording, node, node.args[0])
        elif node.target is torch.reshape and _undoes(node):
            rewrite.bypass(recording, node, node.args[0].args[0])
    drop_unread(recording)


def drop_unread(recording: Recording) -> None:
    """Drop what nothing reads; writes in place stay."""
    rewrite.erase_unread(recording, [n for n in recording.graph.nodes if n.op == "call_function"])


def _adds_nothing(x: Any, other: Any, node: fx.Node) -> bool:
    return _is_number(other, 0) and _same_dtype(x, node)


def _scales_by_one(x: Any, other: Any, node: fx.Node) -> bool:
    return _is_number(other, 1) and _same_dtype(x, node)


def _is_number(value: Any, number: int) -> bool:
    return type(value) in (int, float) and value == number


def _same_dtype(x: Any, node: fx.Node) -> bool:
    return is_tensor_node(x) and dtype_of(x) is dtype_of(node)


def _keeps_shape(x: fx.Node, sizes: Any, node: fx.Node) -> bool:
    return same_shape(shape_of(x), shape_of(node))


def _is_contiguous_for_nobody(x: fx.Node, node: fx.Node) -> bool:
    """Its argument is laid out so, or its readers take any layout."""
    return x.target is torch.Tensor.contiguous or all(user.target in _ANY_LAYOUT for user in node.users)


_WORDS = {
    word for word in vars(vocabulary).values() if getattr(word, "__module__", "") == vocabulary.__name__
}
_ANY_LAYOUT = _WORDS | {torch.reshape, torch.transpose, operator.getitem, torch.matmul, torch.bmm, F.linear}

# target -> whether a call of it, given its arguments and the node, hands on its first argument
_NOISE: dict[Any, Any] = {
    vocabulary.cast: lambda x, dtype, node: _same_dtype(x, node),
    vocabulary.dropout: lambda x, p, training, node: not training or _is_number(p, 0),
    torch.Tensor.contiguous: _is_contiguous_for_nobody,
    torch.Tensor.expand: _keeps_shape,
    torch.reshape: _keeps_shape,
    torch.permute: lambda x, dims, node: list(dims) == list(range(len(dims))),
    torch.add: _adds_nothing,
    torch.sub: _adds_nothing,
    torch.mul: _scales_by_one,
    torch.div: _scales_by_one,
    operator.pos: lambda x, node: True,
}


def _undoes(node: fx.Node) -> bool:
    """A reshape back to the shape before the last reshape."""
    before = node.args[0]
    return before.target is torch.reshape and same_shape(shape_of(before.args[0]), shape_of(node))
