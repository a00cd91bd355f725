"""Find norms and rotations that a model writes out in a form that no spelling of the ops covers."""

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
    shape_of,
    value,
)
from te_transform.graph.pattern import Match, Misses, Pattern
from te_transform.graph.pointwise import is_pointwise

_AFFINE = (torch.mul, torch.div, torch.add, torch.sub, torch.neg, ops.cast)
_NORMALIZING = (*ops.NORMS, F.normalize)
_STATISTICS = frozenset({"mean", "var", "std", "sum", "norm", "vector_norm", "linalg_vector_norm"})
_PRODUCTS = frozenset({"mul", "matmul", "bmm", "einsum", "addcmul"})


class Normalized(Pattern):
    """A value [..., width] that is shifted and scaled by statistics of its own rows; `role` is its node."""

    depth = 2

    def __init__(self, role: str):
        self.role = role

    def __repr__(self) -> str:
        return "a norm that is written out"

    def match(self, value: Any, so_far: Match, misses: Misses) -> Iterator[Match]:
        """Yield the match, if the value is such a norm."""
        if is_tensor_node(value) and value.target not in ops.NORMS and _is_normalized(value):
            yield replace(so_far, bound={**so_far.bound, self.role: value})


def _is_normalized(root: fx.Node) -> bool:
    """Return True if one value, and statistics of its rows, are all that `root` is an affine function of."""
    sources: set[fx.Node] = set()
    statistics: set[fx.Node] = set()
    normalizes, seen, waiting = False, set(), [root]
    while waiting:
        node = waiting.pop()
        if node in seen or not is_tensor_node(node) or _is_of_model(node):
            continue
        seen.add(node)
        if node.target in _NORMALIZING:
            normalizes = True
            sources.add(node.args[0])
        elif _is_column(node):
            statistics.add(node)
        elif node.target in _AFFINE:
            waiting += node.all_input_nodes
        else:
            sources.add(node)
    own = len(sources) == 1 and all(_is_statistic(node, sources) for node in statistics)
    return own and (normalizes or bool(statistics))


def _is_column(node: fx.Node) -> bool:
    return shape_of(node)[-1:] == (1,) and len(shape_of(node)) > 1


def _is_of_model(node: fx.Node) -> bool:
    """Return True if a value is computed from parameters and buffers alone."""
    if node.op == "placeholder":
        return is_model_tensor(node)
    return bool(node.all_input_nodes) and all(map(_is_of_model, node.all_input_nodes))


def _is_statistic(column: fx.Node, sources: set[fx.Node]) -> bool:
    """Return True if a column is a mean, a variance or a length of the rows of the source."""
    reduces, seen, waiting = False, set(), [column]
    while waiting:
        node = waiting.pop()
        if node in seen or node in sources or not is_tensor_node(node) or _is_of_model(node):
            continue
        seen.add(node)
        reduced = called(node) in _STATISTICS and _is_column(node)
        if not reduced and not is_pointwise(node):
            return False
        reduces |= reduced
        waiting += node.all_input_nodes
    return reduces


def rotated_by(query: fx.Node) -> list[fx.Node]:
    """Return the calls between a projection and attention that multiply its columns by numbers that are
    neither computed from the projection nor learned: cosines and sines, in any form but ops.rope."""
    region = _between(query)
    moved: set[fx.Node] = set()
    for node in sorted(region):
        if any(read in moved or _ends(read) for read in node.all_input_nodes):
            moved.add(node)
    return [node for node in sorted(moved) if called(node).strip("_") in _PRODUCTS and _factors(node, moved)]


def _ends(node: fx.Node) -> bool:
    return node.target in (ops.linear, ops.sdpa, *ops.NORMS)


def _between(query: fx.Node) -> set[fx.Node]:
    """Return what `query` is computed from, up to projections, norms and rotations in the op's form."""
    seen: set[fx.Node] = set()
    waiting = [query]
    while waiting:
        node = waiting.pop()
        if node not in seen and not _ends(node) and node.target is not ops.rope:
            seen.add(node)
            waiting += [*node.all_input_nodes, *(user for user in node.users if _fills(user, node))]
    return seen


def _fills(user: fx.Node, node: fx.Node) -> bool:
    return user.target is operator.setitem and user.args[0] is node


def _factors(node: fx.Node, moved: set[fx.Node]) -> list[fx.Node]:
    return [
        read
        for read in node.all_input_nodes
        if read not in moved and not _ends(read) and is_tensor_node(read) and _varies_by_column(read)
    ]


def _varies_by_column(factor: fx.Node) -> bool:
    """Return True if a factor has other numbers for other columns and is no parameter."""
    if any(map(is_parameter, computed_from([factor]))):
        return False
    shape = shape_of(factor)
    floats = value(factor).is_floating_point() or value(factor).is_complex()
    return floats and len(shape) > 1 and shape[-1] != 1
