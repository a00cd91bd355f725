"""The reasons why attention that a model computes step by step cannot be one fused kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import fx

from te_transform.canonicalize.attention import PRODUCTS
from te_transform.canonicalize.linears import TURNS
from te_transform.graph import ops
from te_transform.graph.nodes import (
    called,
    dtype_of,
    is_number,
    is_tensor_node,
    reached,
    reads_of,
    same_shape,
    shape_of,
    storages,
    users_of,
    writes,
)
from te_transform.plan.refusals import readers

# the operations that fused attention supports between its two products, including the products
PLAIN = {
    *PRODUCTS, torch.mul, torch.div, torch.add, torch.masked_fill, torch.where, torch.softmax, torch.reshape,
    ops.cast, ops.dropout,
}  # fmt: skip
_OF_SCORES = {torch.mul, torch.div, torch.add, torch.masked_fill, torch.where}  # what precedes the softmax
ENDS = {ops.linear, *ops.NORMS, ops.sdpa}


def obstacles(softmax: fx.Node) -> Iterator[str]:
    """Yield every reason why a softmax and the products around it cannot become fused attention.

    Each reason says what the model has, and what fused attention needs. Nothing is yielded if there is no
    product before or after the softmax.
    """
    before = towards(softmax, reads_of, False, _may_be_scores)
    behind = towards(softmax, users_of, True, _may_be_scores)
    if not before or not behind:
        return
    path = [*before, softmax, *behind]
    reasons = [*_einsums(path), *_reasons(path)]
    yield from reasons
    if not reasons:
        yield (
            "the attention has other shapes, dtypes or masks than scaled_dot_product_attention: use [batch, "
            "heads, length, width] of one dtype, and a mask that is added, or filled with -1e4 or less"
        )


def _einsums(path: list[fx.Node]) -> Iterator[str]:
    if any(map(_multiplies_several, path)):
        yield (
            "the attention multiplies several tensors in one einsum, but fused attention needs products of "
            "two tensors: write one einsum for each product"
        )


def _reasons(path: list[fx.Node]) -> Iterator[str]:
    unusual = [node for node in path if node.target not in PLAIN and not _multiplies_several(node)]
    computing = [node for node in unusual if node.target not in TURNS]
    others = list(dict.fromkeys(map(called, computing or unusual)))
    if others:
        yield (
            f"the attention has {', '.join(others)} between its two products, but fused attention has only a "
            "scale, a mask, a softmax and a dropout: compile=True joins the operations between "
            "the products"
        )
    dims = {node.args[1] for node in path if node.target is torch.softmax}
    if not others and dims != {-1}:
        yield (
            "the attention's softmax is over another dimension than the keys, but fused attention needs it "
            "over the keys: no kernel supports another dimension"
        )
    softmax = next(node for node in path if node.target is torch.softmax)
    yield from _of_scores([node for node in path if node < softmax])
    later = [called(node) for node in path if node > softmax and node.target in _OF_SCORES]
    if later:
        yield (
            f"the attention has {', '.join(dict.fromkeys(later))} after its softmax, but fused attention has "
            "only zeros for hidden keys and a dropout there: move the operations before the softmax or "
            "behind the product, if the math allows"
        )
    yield from _of_readers(path)


def _of_scores(scores: list[fx.Node]) -> Iterator[str]:
    factors = [node for node in scores if node.target in (torch.mul, torch.div)]
    if any(all(map(is_tensor_node, node.args)) for node in factors):
        yield (
            "the attention's scores are multiplied by a tensor, but fused attention needs a number: multiply "
            "the queries by it, or add it if it is a mask"
        )
    fills = [node for node in scores if node.target in (torch.masked_fill, torch.where)]
    if len({argument for node in fills for argument in filter(is_number, node.args)}) > 1:
        yield (
            "the attention's scores are filled with several numbers, but fused attention fills them with "
            "one: use the same number of -1e4 or less in both calls, or fill once by both masks"
        )


def _of_readers(path: list[fx.Node]) -> Iterator[str]:
    inner = [node for node in path if {*path}.intersection(node.users)]  # all nodes but the last product
    users = {user for node in inner for user in node.users} - {*path}
    if read := readers(user for user in users if user.op == "output" or is_tensor_node(user)):
        yield (
            f"the attention's scores or probabilities are also read by {', '.join(read)}, but fused "
            "attention does not return them: pass need_weights=False or output_attentions=False, or let "
            "nothing else read them"
        )
    if len({node.meta.get("region") for node in path}) > 1:
        yield from _written_in_between(path)


def _written_in_between(path: list[fx.Node]) -> Iterator[str]:
    """Yield why attention with writes between its operations cannot be fused."""
    products = [node for node in path if node.target in PRODUCTS]
    ours = {*storages(path), *storages(read for node in products for read in node.all_input_nodes)}
    first, last, written = path[0], path[-1], set()
    while (first := first.next) is not last:
        written.update(storages(first.all_input_nodes[:1]) if writes(first) else ())
    if written and ours.isdisjoint(written):
        yield (
            "the model fills another tensor, such as a mask, in the middle of the attention, but fused "
            "attention is one call: fill the tensor before the attention"
        )
    else:
        yield (
            "the model writes to a tensor in the middle of the attention, but fused attention is one call: "
            "make a new tensor there"
        )


def towards(
    start: fx.Node,
    following: Callable[[fx.Node], Iterable[fx.Node]],
    last: bool,
    where: Callable[[fx.Node], bool],
) -> list[fx.Node]:
    """Return the nodes on all paths from a node to the nearest products, including them, in graph order.

    Args:
        following: Return the next nodes of a path.
        last: True if paths lead towards the end of the graph.
        where: Return True for the nodes of a path.
    """
    nodes = reached(following(start), lambda node: () if _is_product(node) else following(node), where)
    leading: set[fx.Node] = set()
    for node in sorted(nodes, reverse=last):
        if _is_product(node) or leading.intersection(following(node)):
            leading.add(node)
    return sorted(leading)


def _is_product(node: fx.Node) -> bool:
    return node.target in PRODUCTS or _multiplies_several(node)


def _multiplies_several(node: fx.Node) -> bool:
    """Return True for an einsum of more than two tensors."""
    return node.target is torch.einsum and len(node.all_input_nodes) > 2


def _may_be_scores(node: fx.Node) -> bool:
    """Return True for a node that may lie between two products.

    The exceptions are norms, fused ops, boolean masks, and linears that do not mix heads.
    """
    is_call = node.op in ("call_function", "call_method")
    is_inside = node.target not in ENDS or _mixes_heads(node)
    return is_call and is_inside and is_tensor_node(node) and dtype_of(node).is_floating_point


def _mixes_heads(node: fx.Node) -> bool:
    """Return True for a linear across heads, which are the last of four dimensions before or after a move."""
    is_square = node.target is ops.linear and same_shape(shape_of(node), shape_of(node.args[0]))
    is_beside_move = any(beside.target in TURNS for beside in (node.args[0], *node.users))
    return is_square and len(shape_of(node)) == 4 and is_beside_move
