"""Recognize rotary position embeddings in rotate-half form: whole or by halves, with or without fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from te_transform.canonicalize.op import Spelling
from te_transform.graph import edit, ops
from te_transform.graph.nodes import dtype_of, is_number, is_tensor_node, same_shape, shape_of
from te_transform.graph.pattern import Call, Each, Match, Var

_X = Var("x", is_tensor_node)
_FIRST = Call(ops.columns, _X, 0, Var("half"))
_SECOND = Call(ops.columns, _X, Var("half"), Var("width"))
_ROTATED = Call(torch.cat, Each(Call(torch.neg, _SECOND), _FIRST), -1)


def _is_in_halves(x: fx.Node, half: int, width: int, root: fx.Node) -> bool:
    halves = width == shape_of(x)[-1] and 2 * half == width
    return halves and same_shape(shape_of(x), shape_of(root))


def _rope(graph: fx.Graph, match: Match) -> tuple | None:
    x, half, width = match.bound["x"], match.bound["half"], match.bound["width"]
    if not _is_in_halves(x, half, width, match.root):
        return None
    return ops.rope, (x, match.bound["cos"], match.bound["sin"])


def _wide(graph: fx.Graph, match: Match) -> tuple | None:
    """Return the op for 16-bit queries that are cast to fp32, rotated, and cast back."""
    x, rope = match.bound["x"], match.bound["rope"]
    rounds = dtype_of(match.root) is dtype_of(x) and dtype_of(x).itemsize == 2
    wide = dtype_of(rope) is dtype_of(rope.args[0]) is torch.float32
    alone = len(rope.users) == 1
    return (ops.rope, (x, *rope.args[1:3], True)) if rounds and wide and alone else None


ROTARY = (
    Spelling(
        Call(
            torch.add,
            Call(torch.mul, _X, Var("cos", is_tensor_node), commute=True),
            Call(torch.mul, _ROTATED, Var("sin", is_tensor_node), commute=True),
            commute=True,
        ),
        _rope,
    ),
)
WIDE_ROTARY = (Spelling(Call(ops.cast, Call(ops.rope, Call(ops.cast, _X), role="rope")), _wide),)


class _Term(NamedTuple):
    """A term of one half of a rotation: columns of x times cosines or sines."""

    sign: int
    columns: fx.Node
    factor: fx.Node


class _Rotation(NamedTuple):
    """The concatenation of x1 cos - x2 sin and x2 cos + x1 sin; `sign` -1 negates the sines."""

    x: fx.Node
    cos: fx.Node
    sin: fx.Node
    sign: int


def join_halves(graph: fx.Graph) -> None:
    """Rewrite rotations that are computed by halves, with cosines and sines of half the width, as the op."""
    known: dict[tuple, fx.Node] = {}
    for root in [node for node in graph.nodes if node.target is torch.cat]:
        covered: list[fx.Node] = [root]
        rotation = _rotation(root, covered)
        alone = all(user in covered for node in covered[1:] for user in node.users)
        if rotation is None or not alone or len({node.meta["region"] for node in covered}) > 1:
            continue
        widening = _Widening(graph, root, rotation.sign, known)
        cos, sin = widening(rotation.cos, torch.cos), widening(rotation.sin, torch.sin)
        signs = [node for term in covered for node in term.all_input_nodes if node.target is torch.neg]
        edit.replace(graph, covered, ops.rope, (rotation.x, cos, sin))
        edit.erase_unread(graph, [node for node in signs if not node._erased])


def _rotation(root: fx.Node, covered: list[fx.Node]) -> _Rotation | None:
    """Return the rotation that a cat computes, or None; add its calls, except the factors, to `covered`."""
    halves, dim = root.args
    if dim != -1 or len(halves) != 2:
        return None
    first, second = ([*_terms(half, 1, covered)] for half in halves)
    if len(first) != 2 or len(second) != 2:
        return None
    for cos, sin in (first, first[::-1]):
        for other_cos, other_sin in (second, second[::-1]):
            found = _matched(root, cos, sin, other_cos, other_sin)
            if found is not None:
                return found
    return None


def _matched(root: fx.Node, cos: _Term, sin: _Term, other_cos: _Term, other_sin: _Term) -> _Rotation | None:
    x, start, half = cos.columns.args
    _, middle, width = sin.columns.args
    fits = (
        cos.factor is other_cos.factor
        and sin.factor is other_sin.factor
        and cos.columns is other_sin.columns
        and sin.columns is other_cos.columns
        and x is sin.columns.args[0]
        and (start, middle) == (0, half)
        and cos.sign == other_cos.sign == 1
        and sin.sign == -other_sin.sign
        and _is_in_halves(x, half, width, root)
        and all(same_shape(shape_of(t.factor)[-1:], (half,)) for t in (cos, sin))
    )
    return _Rotation(x, cos.factor, sin.factor, -sin.sign) if fits else None


def _terms(node: fx.Node, sign: int, covered: list[fx.Node]) -> Iterator[_Term]:
    """Yield the terms of one half of a rotation."""
    if node.target in (torch.add, torch.sub) and all(map(is_tensor_node, node.args)):
        covered.append(node)
        yield from _terms(node.args[0], sign, covered)
        yield from _terms(node.args[1], sign if node.target is torch.add else -sign, covered)
    elif node.target is torch.neg:
        covered.append(node)
        yield from _terms(node.args[0], -sign, covered)
    elif node.target is torch.mul and all(map(is_tensor_node, node.args)):
        covered.append(node)
        signs, factors = zip(*map(_without_sign, node.args), strict=True)
        found = [factor.target is ops.columns for factor in factors]
        if any(found):
            columns = factors[found.index(True)]
            yield _Term(sign * signs[0] * signs[1], columns, factors[1 - found.index(True)])


def _without_sign(node: fx.Node) -> tuple[int, fx.Node]:
    return (-1, node.args[0]) if node.target is torch.neg else (1, node)


class _Widening:
    """The rewrite of half-width cosines and sines to full width, with angles concatenated with themselves.

    A `sign` of -1 negates the angles: cosines stay the same, sines change their sign.
    """

    def __init__(self, graph: fx.Graph, root: fx.Node, sign: int, known: dict[tuple, fx.Node]):
        self.graph, self.root, self.sign, self.known = graph, root, sign, known

    def __call__(self, node: fx.Node, function: Callable) -> fx.Node:
        key = node, function, self.sign, self.root.meta["region"]
        if key not in self.known:
            self.known[key] = self._widen(node, function)
        return self.known[key]

    def _widen(self, node: fx.Node, function: Callable) -> fx.Node:
        inner = node.args[0] if node.all_input_nodes else node
        if not any(each.meta.get("written") for each in (node, inner)):
            if node.target is ops.cast or _is_unsqueezed(node) or _is_scaled(node):
                return self._call(node.target, self(inner, function), *node.args[1:])
            if node.target is function:
                return self._call(function, self(inner, torch.neg))
        whole = self._call(torch.cat, (node, node), -1)
        return whole if function is torch.cos or self.sign > 0 else self._call(torch.neg, whole)

    def _call(self, target: Callable, *args: Any) -> fx.Node:
        return edit.insert(self.graph, [self.root], target, args)


def _is_unsqueezed(node: fx.Node) -> bool:
    return node.target is torch.unsqueeze and node.args[1] != -1


def _is_scaled(node: fx.Node) -> bool:
    return node.target is torch.mul and is_number(node.args[1])
