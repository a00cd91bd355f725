"""Remove transposes of attention scores between the two matrix products.

DeepSeek's own code transposes scores to [batch, queries, heads, keys] for the softmax and back for the second
product. Operations in between give the same numbers in any order of dimensions. Without the transposes, the
scores match the usual attention patterns, [batch, heads, queries, keys].
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


def drop_score_transposes(graph: fx.Graph) -> None:
    """Remove the transposes between two products around a softmax if they cancel each other."""
    for product in [node for node in graph.nodes if node.target in PRODUCTS]:
        chain = _chain_to_next_product(product)
        if any(node.target is torch.softmax for node in chain) and _restores_order(product, chain):
            _drop_transposes(product, chain)


def _chain_to_next_product(product: fx.Node) -> list[fx.Node]:
    """Return the calls between a product and the next one, each read only by the following call.

    The list is empty if none of the calls transposes, or if one of them depends on the order of dimensions.
    """
    chain, node = [], product
    while len(node.users) == 1:
        (user,) = node.users
        if user.target in PRODUCTS:
            return chain if any(node.target in TURNS for node in chain) else []
        if not _commutes_with_transpose(node, user):
            return []
        chain.append(user)
        node = user
    return []


def _commutes_with_transpose(node: fx.Node, user: fx.Node) -> bool:
    """Return True if transposing all inputs of a reader only transposes its result."""
    plain = user.target in (*_BY_ELEMENT, *TURNS, torch.softmax) and not user.kwargs
    if not plain or user.meta.get("written") or user.meta["region"] != node.meta["region"]:
        return False
    once = sum(argument is node for argument in user.args) == 1
    return once and (user.target in TURNS or same_shape(shape_of(user), shape_of(node)))


def _restores_order(product: fx.Node, chain: Sequence[fx.Node]) -> bool:
    order = tuple(range(len(shape_of(product))))
    for node in chain:
        order = _order_after(order, node)
    return order == tuple(range(len(order)))


def _order_after(order: tuple[int, ...], node: fx.Node) -> tuple[int, ...]:
    """Return the product's dimensions in their order after a node, given `order` before the node."""
    if node.target is torch.permute:
        return tuple(order[d] for d in node.args[1])
    after = list(order)
    if node.target is torch.transpose:
        one, other = node.args[1:]
        after[one], after[other] = after[other], after[one]
    return tuple(after)


def _drop_transposes(product: fx.Node, chain: Sequence[fx.Node]) -> None:
    before, value, order = product, product, tuple(range(len(shape_of(product))))
    for node in chain:
        order = _order_after(order, node)
        if node.target not in TURNS:
            value = _insert_in_product_order(node, before, value, order)
        before = node
    edit.bypass(before, value)
    edit.erase_unread(chain[:-1])


def _insert_in_product_order(
    node: fx.Node, before: fx.Node, value: fx.Node, order: tuple[int, ...]
) -> fx.Node:
    """Insert the call of `node` in the product's order of dimensions, with `value` in place of `before`."""
    args = tuple(value if a is before else _in_product_order(node, a, order) for a in node.args)
    if node.target is torch.softmax:
        args = (value, order[node.args[1]] - len(order), *node.args[2:])
    call = edit.insert([node], node.target, args)
    call.meta["spelled"] = edit.spelled([node])
    return call


def _in_product_order(node: fx.Node, argument: Any, order: tuple[int, ...]) -> Any:
    """Permute another argument of a call to the product's order of dimensions."""
    if not is_tensor_node(argument) or not shape_of(argument):
        return argument
    while len(shape_of(argument)) < len(order):  # add leading dimensions of size 1
        argument = edit.insert([node], torch.unsqueeze, (argument, -1 - len(shape_of(argument))))
    back = [order.index(d) for d in range(len(order))]
    return argument if back == sorted(back) else edit.insert([node], *permuted(argument, *back))
