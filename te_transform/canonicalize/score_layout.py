"""Scores that lie otherwise than [batch, heads, queries, keys], and are turned back for the second product.

DeepSeek's own code has them as [batch, queries, heads, keys]. What is computed of them in between has the
same numbers in any order of dimensions, so that they are those of any attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from te_transform.canonicalize.attention import PRODUCTS
from te_transform.canonicalize.linears import TURNS
from te_transform.canonicalize.table import permuted
from te_transform.graph import edit, ops
from te_transform.graph.nodes import is_tensor_node, same_shape, shape_of

_BY_ELEMENT = (
    torch.mul, torch.div, torch.add, torch.sub, torch.masked_fill, torch.where, ops.cast, ops.dropout,
)  # fmt: skip


def leave_unturned(graph: fx.Graph) -> None:
    """Compute what is between two products as the first one has it, where it is turned for the softmax and
    back."""
    for product in [node for node in graph.nodes if node.target in PRODUCTS]:
        way = _way_to_the_next(product)
        if any(node.target is torch.softmax for node in way) and _ends_as_it_began(product, way):
            _leave_unturned(graph, product, way)


def _way_to_the_next(product: fx.Node) -> list[fx.Node]:
    """What is computed of a product, one after the other and read by nothing else, up to the next; empty
    where it is turned by nothing, or something stands there that sees in what order the dimensions are."""
    way, node = [], product
    while len(node.users) == 1:
        (user,) = node.users
        if user.target in PRODUCTS:
            return way if any(node.target in TURNS for node in way) else []
        if not _can_be_turned(node, user):
            return []
        way.append(user)
        node = user
    return []


def _can_be_turned(node: fx.Node, user: fx.Node) -> bool:
    """Whether a reader computes the same of a value that is turned, if all else that it reads is too."""
    plain = user.target in (*_BY_ELEMENT, *TURNS, torch.softmax) and not user.kwargs
    if not plain or user.meta.get("written") or user.meta["region"] != node.meta["region"]:
        return False
    once = sum(argument is node for argument in user.args) == 1
    return once and (user.target in TURNS or same_shape(shape_of(user), shape_of(node)))


def _ends_as_it_began(product: fx.Node, way: Sequence[fx.Node]) -> bool:
    order = tuple(range(len(shape_of(product))))
    for node in way:
        order = _turned(order, node)
    return order == tuple(range(len(order)))


def _turned(order: tuple[int, ...], node: fx.Node) -> tuple[int, ...]:
    """Which dimensions of the product those behind a node are, given those before it."""
    if node.target is torch.permute:
        return tuple(order[d] for d in node.args[1])
    after = list(order)
    if node.target is torch.transpose:
        one, other = node.args[1:]
        after[one], after[other] = after[other], after[one]
    return tuple(after)


def _leave_unturned(graph: fx.Graph, product: fx.Node, way: Sequence[fx.Node]) -> None:
    before, value, order = product, product, tuple(range(len(shape_of(product))))
    for node in way:
        order = _turned(order, node)
        if node.target not in TURNS:
            value = _computed(graph, node, before, value, order)
        before = node
    edit.bypass(graph, before, value)
    edit.erase_unread(graph, way[:-1])


def _computed(
    graph: fx.Graph, node: fx.Node, before: fx.Node, value: fx.Node, order: tuple[int, ...]
) -> fx.Node:
    """The call of a node of what has the value of `before`, with the dimensions of the product."""
    args = tuple(value if a is before else _as_the_product(graph, node, a, order) for a in node.args)
    if node.target is torch.softmax:
        args = (value, order[node.args[1]] - len(order), *node.args[2:])
    made = edit.insert(graph, [node], node.target, args)
    made.meta["spelled"] = edit.spelled([node])
    return made


def _as_the_product(graph: fx.Graph, node: fx.Node, argument: Any, order: tuple[int, ...]) -> Any:
    """What a call reads beside the scores, turned as they were not."""
    if not is_tensor_node(argument) or not shape_of(argument):
        return argument
    while len(shape_of(argument)) < len(order):  # dimensions of one, in front
        argument = edit.insert(graph, [node], torch.unsqueeze, (argument, -1 - len(shape_of(argument))))
    back = [order.index(d) for d in range(len(order))]
    return argument if back == sorted(back) else edit.insert(graph, [node], *permuted(argument, *back))
