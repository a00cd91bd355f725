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
    is_model_tensor,
    is_parameter,
    is_tensor_node,
    reached,
    shape_of,
    value,
)
from te_transform.graph.pattern import Match, Misses, Pattern
from te_transform.graph.pointwise import is_pointwise

_AFFINE = (torch.mul, torch.div, torch.add, torch.sub, torch.neg, ops.cast)
_NORMALIZING = (*ops.NORMS, F.normalize)
_STATISTICS = frozenset({"mean", "var", "std", "sum", "norm", "vector_norm", "linalg_vector_norm"})
_SCORE_PRODUCTS = frozenset({"mul", "matmul", "bmm", "einsum", "addcmul"})


class Normalized(Pattern):
    """A pattern for a value [..., width] shifted and scaled by statistics of its rows; binds `role`."""

    depth = 2

    def __init__(self, role: str):
        self.role = role

    def __repr__(self) -> str:
        return "a norm that is written out"

    def match(self, value: Any, so_far: Match, misses: Misses) -> Iterator[Match]:
        """Yield the match if the value is a manual norm."""
        if is_tensor_node(value) and value.target not in ops.NORMS and _is_normalized(value):
            yield replace(so_far, bound={**so_far.bound, self.role: value})


def _is_normalized(root: fx.Node) -> bool:
    """Return True if `root` is an affine function of one value and statistics of the value's rows."""
    found = reached([root], lambda node: node.all_input_nodes if _is_affine(node) else (), _is_computed)
    norms = [node for node in found if node.target in _NORMALIZING]
    ends = [node for node in found if node not in norms and not _is_affine(node)]
    statistics = [node for node in ends if _is_column(node)]
    sources = {node.args[0] for node in norms} | {node for node in ends if node not in statistics}
    own = len(sources) == 1 and all(_is_statistic(node, sources) for node in statistics)
    return own and bool(norms or statistics)


def _is_affine(node: fx.Node) -> bool:
    return node.target in _AFFINE and not _is_column(node)


def _is_computed(node: fx.Node) -> bool:
    """Return True for a tensor that does not depend on parameters and buffers alone."""
    return is_tensor_node(node) and not _is_of_model(node)


def _is_column(node: fx.Node) -> bool:
    return shape_of(node)[-1:] == (1,) and len(shape_of(node)) > 1


def _is_of_model(node: fx.Node) -> bool:
    """Return True if a value depends only on parameters and buffers."""
    if node.op == "placeholder":
        return is_model_tensor(node)
    return bool(node.all_input_nodes) and all(map(_is_of_model, node.all_input_nodes))


def _is_statistic(column: fx.Node, sources: set[fx.Node]) -> bool:
    """Return True if a column is a mean, a variance or a vector norm of the rows of the source."""
    found = reached(
        [column],
        lambda node: node.all_input_nodes if _reduces(node) or is_pointwise(node) else (),
        lambda node: node not in sources and _is_computed(node),
    )
    return any(map(_reduces, found)) and all(_reduces(node) or is_pointwise(node) for node in found)


def _reduces(node: fx.Node) -> bool:
    return called(node) in _STATISTICS and _is_column(node)


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
