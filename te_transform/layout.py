"""How a fused projection holds queries, keys and values: read off the graph, which has no use for names."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from te_transform import vocabulary
from te_transform.pattern import shape_of

# what only moves values; a rotation, a norm or a scale leaves every value at its place
_MOVES = (
    torch.reshape, torch.transpose, torch.permute, torch.unsqueeze, torch.squeeze, torch.cat, torch.chunk,
    torch.split, torch.unbind, torch.flatten, torch.movedim, torch.t, operator.getitem, vocabulary.columns,
    torch.Tensor.contiguous,
)  # fmt: skip
_STAYS = (
    vocabulary.rope,
    vocabulary.rms_norm,
    vocabulary.layer_norm,
    vocabulary.zero_hidden,
    vocabulary.cast,
    torch.mul,
)


@dataclass(frozen=True)
class QKV:
    """The rows of one projection's weight that make the queries, keys and values: index tensors [heads,
    width]."""

    projection: fx.Node
    query: Tensor
    key: Tensor
    value: Tensor

    @property
    def order(self) -> tuple[int, ...]:
        """The permutation that puts all query rows first, then all keys, then all values, heads in order."""
        return tuple(torch.cat([part.flatten() for part in (self.query, self.key, self.value)]).tolist())

    @property
    def name(self) -> str:
        """ "[q|k|v]": three blocks; "interleaved": query, key and value of a head (or a group of heads)
        together."""
        if self.order == tuple(range(len(self.order))):
            return "[q|k|v]"
        groups = self.key.shape[0]
        together = torch.cat([self.query.reshape(groups, -1), self.key, self.value], dim=1)
        return (
            "interleaved" if torch.equal(together.flatten(), torch.arange(together.numel())) else "permuted"
        )


def qkv_layout(attention: fx.Node) -> QKV | None:
    """The layout of the projection that an sdpa's three operands come from; None where that is not one
    linear.

    Every row's number is pushed through the graph's own slicing, so any way to write it gives the same
    answer.
    """
    sources = [_source(operand) for operand in attention.args[:3]]
    if sources[0] is None or len(set(sources)) > 1:
        return None
    (projection,) = set(sources)
    rows = torch.arange(shape_of(projection)[-1]).expand(shape_of(projection))
    try:
        parts = [_pushed(operand, projection, rows)[0, :, 0, :] for operand in attention.args[:3]]
    except (RuntimeError, IndexError, TypeError):
        return None
    return QKV(projection, *parts)


def _source(node: Any) -> fx.Node | None:
    """The linear that all of the node's values come from."""
    while isinstance(node, fx.Node) and node.target is not vocabulary.linear:
        if node.target not in (*_MOVES, *_STAYS):
            return None
        inputs = node.args[0]
        node = inputs[0] if isinstance(inputs, (tuple, list)) else inputs
    return node if isinstance(node, fx.Node) else None


def _pushed(node: Any, projection: fx.Node, rows: Tensor) -> Any:
    if node is projection:
        return rows
    if isinstance(node, (tuple, list)):
        return type(node)(_pushed(item, projection, rows) for item in node)
    if not isinstance(node, fx.Node):
        return node
    if node.target in _STAYS:
        return _pushed(node.args[0], projection, rows)
    return node.target(*(_pushed(argument, projection, rows) for argument in node.args), **node.kwargs)
