"""Find norms and rotary embeddings that a model computes in a form that the canonical ops do not cover."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from te_transform.graph import ops
from te_transform.graph.nodes import (
    called,
    computed_from,
    dtype_of,
    is_model_tensor,
    is_parameter,
    is_tensor_node,
    may_be_view,
    reached,
    same_shape,
    shape_of,
    value,
)
from te_transform.graph.pattern import Match, Misses, Pattern
from te_transform.graph.pointwise import call_names, calls_towards, is_pointwise

_AFFINE = (torch.mul, torch.div, torch.add, torch.sub, torch.neg, ops.cast)
_NORMALIZING = (*ops.NORMS, F.normalize)
_OF_OTHER_VALUES = (F.group_norm, F.batch_norm, F.instance_norm)
_STATISTICS = frozenset(
    {
        "bmm", "einsum", "linalg_vecdot", "linalg_vector_norm", "matmul", "mean", "norm", "std", "sum", "var",
        "var_mean", "vecdot", "vector_norm",
    }
)  # fmt: skip
_SCORE_PRODUCTS = frozenset({"mul", "matmul", "bmm", "einsum", "addcmul"})


class Normalized(Pattern):
    """A pattern for a value [..., width] shifted and scaled by statistics of its rows; binds `role`.

    The width may be another dimension that a transpose puts last, such as the channels of an image.
    """

    depth = 2

    def __init__(self, role: str):
        self.role = role

    def __repr__(self) -> str:
        return "a norm that is written out"

    def match(self, value: Any, so_far: Match, misses: Misses) -> Iterator[Match]:
        """Yield the match if the value is a manual norm, or a norm that is none of rows in one dtype."""
        if other_norm(value) is not None or (is_tensor_node(value) and _calls_of_norm(value)):
            yield replace(so_far, bound={**so_far.bound, self.role: value})


class AfterNorm(Pattern):
    """A pattern for a value that calls compute from a norm, for linears; binds `role` to their names."""

    depth = 2

    def __init__(self, role: str):
        self.role = role

    def match(self, value: Any, so_far: Match, misses: Misses) -> Iterator[Match]:
        """Yield the match if calls other than matrix products lie between a norm and the value.

        A statistic of a value counts as its norm: k-diffusion multiplies it by a computed scale first.
        """
        nodes, sources = calls_towards(value, lambda node: _serves_linears(node) and not _is_norm(node))
        statistics = {node for node in nodes if any(_is_statistic(node, source) for source in sources)}
        norms = {source for source in filter(_is_norm, sources) if not _is_broadcast(source, value)}
        behind = statistics | norms
        for node in nodes:
            behind.update([node] if behind.intersection(node.all_input_nodes) else [])
        if calls := call_names([node for node in nodes if node in behind - statistics]):
            yield replace(so_far, bound=so_far.bound | {self.role: calls})


def _is_statistic(node: fx.Node, source: fx.Node) -> bool:
    """Return True if a node is a statistic of the rows of `source`."""
    if not (is_tensor_node(node) and is_tensor_node(source) and _is_column(node, -1)):
        return False
    is_of_rows = same_shape(shape_of(node)[:-1], shape_of(source)[:-1])
    return is_of_rows and bool(_calls_of_statistic(node, {source}))


def _is_norm(node: fx.Node) -> bool:
    return node.target in ops.NORMS or bool(_calls_of_norm(node))


def _is_broadcast(node: fx.Node, to: fx.Node) -> bool:
    """Return True if a value has one row for several rows of another, as ConvNeXt v2's norm of responses."""
    sizes = zip(shape_of(node), shape_of(to), strict=False)
    is_aligned = len(shape_of(node)) == len(shape_of(to))
    return is_aligned and any(
        same_shape((one,), (1,)) and not same_shape((all_,), (1,)) for one, all_ in sizes
    )


def is_normalized(value: fx.Node) -> bool:
    """Return True for a norm or a view of one, but not for the norm of a product, as of queries and keys."""
    norm = _without_views(value)
    product = _without_views(norm.args[0]) if norm.target in ops.NORMS else norm
    return norm is not product and product.target is not ops.linear and product.op != "call_module"


def _without_views(node: fx.Node) -> fx.Node:
    while may_be_view(node) or node.target is ops.columns:
        node = node.args[0]
    return node


def other_norm(value: Any) -> fx.Node | None:
    """Return the norm behind transposes, reshapes and casts if it is none of rows, or not in one dtype."""
    norm = _before_turns(value)[0] if is_tensor_node(value) else None
    while norm is not None and norm.target is ops.cast:
        norm = _before_turns(norm.args[0])[0]
    if norm is None or norm.target in _OF_OTHER_VALUES:
        return norm
    is_named = norm.target in (F.layer_norm, F.rms_norm)
    return norm if is_named and (len(norm.args[1]) > 1 or has_wide_scale(norm)) else None


def has_wide_scale(norm: fx.Node) -> bool:
    """Return True if the scale of F.layer_norm or F.rms_norm has another dtype than the input."""
    x, shape, scale, *_ = norm.args
    return len(shape) == 1 and is_tensor_node(scale) and dtype_of(scale) is not dtype_of(x)


def _serves_linears(node: fx.Node) -> bool:
    """Return True if a call reads one computed value, has one reader, or is read by linears alone."""
    computed = sum(map(_is_computed, node.all_input_nodes))
    return computed < 2 or len(node.users) < 2 or all(user.target is ops.linear for user in node.users)


def detaches_statistics(normalized: fx.Node) -> bool:
    """Return True if the statistics of a written-out norm have no gradient."""
    return any(node.target is torch.Tensor.detach for node in _calls_of_norm(normalized))


def last_call(normalized: fx.Node) -> str:
    """Return the name of the call with which a written-out norm ends, before any transpose."""
    return called(max(_calls_of_norm(normalized)))


def _calls_of_norm(last: fx.Node) -> set[fx.Node]:
    """Return the calls of a written-out norm of rows, or an empty set if `last` is none.

    A norm is an affine function of one value and of statistics of the value's rows.
    """
    root, dim = _before_turns(last)
    calls = reached([root], lambda node: node.all_input_nodes if _is_affine(node, dim) else (), _is_computed)
    norms = [node for node in calls if node.target in _NORMALIZING and dim == -1]
    ends = [node for node in calls if node not in norms and not _is_affine(node, dim)]
    columns = [node for node in ends if _is_column(node, dim)]
    sources = {node.args[0] for node in norms} | {node for node in ends if node not in columns}
    if len(sources) != 1 or not (norms or columns) or root.target in ops.NORMS:
        return set()
    rows = _without(shape_of(*sources), dim)
    statistics = [_calls_of_statistic(node, sources) for node in columns]
    is_of_rows = all(statistics) and all(same_shape(_without(shape_of(node), dim), rows) for node in columns)
    return {*calls}.union(*statistics) - sources if is_of_rows else set()


def _before_turns(node: fx.Node) -> tuple[fx.Node, int]:
    """Return the value before transposes and flattened images, and its dimension that they put last."""
    dim = -1
    while node.target in (torch.t, torch.transpose, torch.permute, torch.reshape):
        shape, (read, *how) = shape_of(node), node.args
        if node.target is torch.reshape:
            # all dimensions up to this one are kept, or the last one alone
            kept = slice(len(shape) + dim + 1) if dim != -1 else slice(-1, None)
            if not same_shape(shape[kept], shape_of(read)[kept]):
                break
            dim += 0 if dim == -1 else len(shape) - len(shape_of(read))
        elif node.target is torch.permute:
            dim = how[0][dim] - len(shape)
        else:
            one, other = how or (-2, -1)
            dim = {one: other, other: one}.get(dim, dim)
        node = read
    return node, dim


def _is_affine(node: fx.Node, dim: int) -> bool:
    return node.target in _AFFINE and not _is_column(node, dim)


def _is_computed(node: fx.Node) -> bool:
    """Return True for a tensor that does not depend on parameters and buffers alone."""
    return is_tensor_node(node) and not _is_of_model(node)


def _is_column(node: fx.Node, dim: int) -> bool:
    return len(shape_of(node)) > max(1, -1 - dim) and same_shape(shape_of(node)[dim:][:1], (1,))


def _without(shape: torch.Size, dim: int) -> list[Any]:
    """Return the sizes of all other dimensions."""
    return [size for place, size in enumerate(shape, -len(shape)) if place != dim]


def _is_of_model(node: fx.Node) -> bool:
    """Return True if a value depends only on parameters and buffers."""
    if node.op == "placeholder":
        return is_model_tensor(node)
    return bool(node.all_input_nodes) and all(map(_is_of_model, node.all_input_nodes))


def _calls_of_statistic(column: fx.Node, sources: set[fx.Node]) -> set[fx.Node]:
    """Return the calls of a mean, a variance or a vector norm of the source's rows, or an empty set."""
    calls = reached(
        [column],
        lambda node: node.all_input_nodes if _is_of_statistic(node) else (),
        lambda node: node not in sources and _is_computed(node),
    )
    is_statistic = any(map(_reduces, calls)) and all(map(_is_of_statistic, calls))
    return {*calls} if is_statistic else set()


def _is_of_statistic(node: fx.Node) -> bool:
    return _reduces(node) or is_pointwise(node) or may_be_view(node)


def _reduces(node: fx.Node) -> bool:
    return called(node) in _STATISTICS and all(map(_is_computed, node.all_input_nodes))


def rotated_by(query: fx.Node) -> list[fx.Node]:
    """Return the calls between a projection and attention that multiply columns by cosines and sines.

    These factors do not depend on the projection and are not learned. ops.rope itself is not returned.
    """
    region = _computed_from_projections(query)
    moved: set[fx.Node] = set()
    for node in sorted(region):
        if any(read in moved or _ends_path(read) for read in node.all_input_nodes):
            moved.add(node)
    return [
        node
        for node in sorted(moved)
        if called(node).strip("_") in _SCORE_PRODUCTS and _column_factors(node, moved)
    ]


def _ends_path(node: fx.Node) -> bool:
    return node.target in (ops.linear, ops.sdpa, *ops.NORMS)


def _computed_from_projections(query: fx.Node) -> set[fx.Node]:
    """Return the nodes that `query` depends on, up to projections, norms and ops.rope."""

    def following(node: fx.Node) -> list[fx.Node]:
        fills = [u for u in node.users if u.target is operator.setitem and u.args[0] is node]
        return [*node.all_input_nodes, *fills]

    return {*reached([query], following, lambda node: not _ends_path(node) and node.target is not ops.rope)}


def _column_factors(node: fx.Node, moved: set[fx.Node]) -> list[fx.Node]:
    return [
        read
        for read in node.all_input_nodes
        if read not in moved and not _ends_path(read) and is_tensor_node(read) and _varies_by_column(read)
    ]


def _varies_by_column(factor: fx.Node) -> bool:
    """Return True if a factor differs between columns and does not depend on a parameter."""
    if any(map(is_parameter, computed_from([factor]))):
        return False
    shape = shape_of(factor)
    floats = value(factor).is_floating_point() or value(factor).is_complex()
    return floats and len(shape) > 1 and shape[-1] != 1
