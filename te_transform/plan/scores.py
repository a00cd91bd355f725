"""Attention that a model writes out in a way of its own: what keeps it from being one fused core."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import fx

from te_transform.canonicalize.attention import PRODUCTS
from te_transform.graph import ops
from te_transform.graph.nodes import called, dtype_of, is_tensor_node, storages, writes
from te_transform.plan.refusals import readers

# what may stand between the two products of fused attention, with them
PLAIN = {
    *PRODUCTS, torch.mul, torch.div, torch.add, torch.masked_fill, torch.where, torch.softmax, torch.reshape,
    ops.cast, ops.dropout,
}  # fmt: skip
ENDS = {ops.linear, *ops.NORMS, ops.sdpa}


def obstacles(softmax: fx.Node) -> Iterator[str]:
    """Every reason why a softmax and the products around it are no fused attention, as a clause of what the
    model has, a comma, and one of what is needed; none where there is no product before it or behind it."""
    before = _towards(softmax, lambda node: node.all_input_nodes, last=False)
    behind = _towards(softmax, lambda node: node.users, last=True)
    if not before or not behind:
        return
    reasons = [*_reasons([*before, softmax, *behind])]
    yield from reasons
    if not reasons:
        yield (
            "the attention's shapes, dtypes or mask are not those of scaled_dot_product_attention: give it "
            "[batch, heads, length, width] of one dtype and a mask that is added, or filled with -1e4 or less"
        )


def _reasons(path: list[fx.Node]) -> Iterator[str]:
    others = list(dict.fromkeys(called(node) for node in path if node.target not in PLAIN))
    if others:
        yield (
            f"the attention has {', '.join(others)} between its two products, fused attention has a scale, a "
            "mask that is added or filled in, a softmax and a dropout there: no kernel has more"
        )
    dims = {node.args[1] for node in path if node.target is torch.softmax}
    if not others and dims != {-1}:
        yield (
            "the attention's softmax goes over another dimension than the keys, fused attention's goes over "
            "these: no kernel has another"
        )
    factors = [node for node in path if node.target in (torch.mul, torch.div)]
    if any(all(map(is_tensor_node, node.args)) for node in factors):
        yield (
            "the attention's scores are multiplied by a tensor, fused attention's scale is a number: "
            "multiply the queries by it, or add it if it is a mask"
        )
    inner = [node for node in path if {*path}.intersection(node.users)]  # all but the last products
    users = {user for node in inner for user in node.users} - {*path}
    if read := readers(user for user in users if user.op == "output" or is_tensor_node(user)):
        yield (
            f"the attention's scores or probabilities are also read by {', '.join(read)}, fused "
            "attention keeps them inside: let nothing else read them, as with need_weights=False or "
            "output_attentions=False"
        )
    if len({node.meta.get("region") for node in path}) > 1:
        yield from _written_in_between(path)


def _written_in_between(path: list[fx.Node]) -> Iterator[str]:
    """Why operations with writes between them are not one: what is written to is theirs, or a mask."""
    products = [node for node in path if node.target in PRODUCTS]
    ours = {*storages(path), *storages(read for node in products for read in node.all_input_nodes)}
    first, last, written = path[0], path[-1], set()
    while (first := first.next) is not last:
        written.update(storages(first.all_input_nodes[:1]) if writes(first) else ())
    if written and ours.isdisjoint(written):
        yield (
            "the model fills another tensor in the middle of the attention, as a mask that it makes there, "
            "the fused one is computed at once: fill it before"
        )
    else:
        yield (
            "the model writes to a tensor in the middle of the attention, the fused one is computed at once: "
            "make a new tensor there"
        )


def _towards(start: fx.Node, following: Callable[[fx.Node], Iterable[fx.Node]], last: bool) -> list[fx.Node]:
    """The nodes on the ways from a node to the nearest products, these too, in the order of the graph.

    `following` are those that a way goes on with; `last`: whether they come later in the graph.
    """
    reached, waiting = set(), [*following(start)]
    while waiting:
        node = waiting.pop()
        if node not in reached and _may_be_scores(node):
            reached.add(node)
            waiting += [] if node.target in PRODUCTS else following(node)
    leading: set[fx.Node] = set()
    for node in sorted(reached, reverse=last):
        if node.target in PRODUCTS or leading.intersection(following(node)):
            leading.add(node)
    return sorted(leading)


def _may_be_scores(node: fx.Node) -> bool:
    """Whether it may lie between two products: no linear, no norm, no fused op, no mask of booleans."""
    is_call = node.op in ("call_function", "call_method") and node.target not in ENDS
    return is_call and is_tensor_node(node) and dtype_of(node).is_floating_point
