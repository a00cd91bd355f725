"""Recognize rotary position embeddings of halves or of pairs of columns: whole or by parts, also in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import fx

from te_transform.canonicalize.op import Spelling
from te_transform.canonicalize.parts import ColumnHalf, are_both, part_of
from te_transform.graph import edit, ops
from te_transform.graph.nodes import dtype_of, is_tensor_node, same_shape, shape_of
from te_transform.graph.pattern import Call, Each, Match, Maybe, Pattern, Var, X

_FIRST_HALF = Call(ops.columns, X, 0, Var("half"))
_SECOND_HALF = Call(ops.columns, X, Var("half"), Var("width"))
_ROTATED = Call(torch.cat, Each(Call(torch.neg, _SECOND_HALF), _FIRST_HALF), -1)


def _is_in_halves(x: fx.Node, half: int, width: int, root: fx.Node) -> bool:
    halves = width == shape_of(x)[-1] and 2 * half == width
    return halves and same_shape(shape_of(x), shape_of(root))


def _plus(rotated: Pattern) -> Call:
    """Return the pattern of x cos + rotated sin. Each of x and `rotated` may be cast before its product."""
    return Call(
        torch.add,
        Call(torch.mul, Var("whole", is_tensor_node), Var("cos", is_tensor_node), commute=True),
        Call(torch.mul, Maybe(ops.cast, rotated), Var("sin", is_tensor_node), role="other", commute=True),
        commute=True,
    )


def _adds_to(match: Match, x: fx.Node) -> bool:
    """Return True if the first term is a product of x, which is cast as in the second term."""
    whole, sin = match.bound["whole"], match.bound["sin"]
    casts = whole.target is ops.cast and whole.args[0] is x
    rotated = [factor for factor in match.bound["other"].args if factor is not sin]
    return (whole is x or casts) and all(dtype_of(factor) is dtype_of(whole) for factor in rotated)


def _rope_of_halves(graph: fx.Graph, match: Match) -> tuple | None:
    x, half, width = match.bound["x"], match.bound["half"], match.bound["width"]
    if not _is_in_halves(x, half, width, match.root) or not _adds_to(match, x):
        return None
    return ops.rope, (match.bound["whole"], match.bound["cos"], match.bound["sin"])


def _rope_in_float32(graph: fx.Graph, match: Match) -> tuple | None:
    """Return the op for 16-bit queries that are rotated in fp32, and cast back.

    They are cast to fp32 before the rotation, or the cosines and sines are fp32.
    """
    x, rope = match.bound["x"], match.bound["rope"]
    rounds = dtype_of(match.root) is dtype_of(x) and dtype_of(x).itemsize == 2
    wide = dtype_of(rope) is torch.float32 and dtype_of(x).itemsize == 2
    alone = len(rope.users) == 1
    return (ops.rope, (x, *rope.args[1:3], True, *rope.args[4:])) if rounds and wide and alone else None


ROTARY = (Spelling(_plus(_ROTATED), _rope_of_halves),)
WIDE_ROTARY = (Spelling(Call(ops.cast, Call(ops.rope, Maybe(ops.cast, X), role="rope")), _rope_in_float32),)


class _Term(NamedTuple):
    """A term of one half of a rotation: a part of x times cosines or sines."""

    sign: int
    part: ColumnHalf
    factor: fx.Node


class _Rotation(NamedTuple):
    """The rotation of two parts: x1 cos - x2 sin and x2 cos + x1 sin; `sign` -1 negates the sines.

    Cosines and sines are half as wide as x, unless `whole`.
    """

    part: ColumnHalf
    cos: fx.Node
    sin: fx.Node
    sign: int = 1
    whole: bool = False


def join_parts(graph: fx.Graph) -> None:
    """Rewrite rotations that are computed by parts of x as the op.

    Parts are halves, with cosines and sines of half the width, or the even and odd columns.
    """
    known: dict[tuple, fx.Node] = {}
    for root in [node for node in graph.nodes if node.target in (torch.cat, torch.reshape, torch.add)]:
        covered: list[fx.Node] = [root]
        rotation = _rotation_of_pairs(root, covered) if root.target is torch.add else _by_parts(root, covered)
        alone = all(user in covered for node in covered[1:] for user in node.users)
        if rotation is None or not alone or len({node.meta["region"] for node in covered}) > 1:
            continue
        in_pairs = root.target is not torch.cat
        make = partial(edit.insert_once, root, known)
        cos, sin = rotation.cos, rotation.sin
        if rotation.sign < 0:
            sin = make(torch.neg, (sin,))
        if not rotation.whole and in_pairs:
            cos, sin = (make(torch.repeat_interleave, (part, 2, -1)) for part in (cos, sin))
        elif not rotation.whole:
            cos, sin = (make(torch.cat, ((part, part), -1)) for part in (cos, sin))
        how = (False, True) if in_pairs else ()
        edit.replace(covered, ops.rope, (rotation.part.x, cos, sin, *how))


def _by_parts(root: fx.Node, covered: list[fx.Node]) -> _Rotation | None:
    """Return the rotation of parts that a cat joins, or a stack; add its calls to `covered`."""
    joined = root
    if root.target is torch.reshape:
        joined = root.args[0]
        if not _is_stack_of_columns(joined, root):
            return None
        covered.append(joined)
    parts, dim = joined.args
    if dim != -1 or len(parts) != 2:
        return None
    first, second = ([*_terms(part, 1, covered)] for part in parts)
    if len(first) != 2 or len(second) != 2:
        return None
    orders = product((first, first[::-1]), (second, second[::-1]))
    return next(filter(None, (_matched(root, *one, *other) for one, other in orders)), None)


def _matched(root: fx.Node, cos: _Term, sin: _Term, other_cos: _Term, other_sin: _Term) -> _Rotation | None:
    part = cos.part
    fits = (
        cos.factor is other_cos.factor
        and sin.factor is other_sin.factor
        and are_both(part, sin.part)
        and (other_sin.part, other_cos.part) == (part, sin.part)
        and cos.sign == other_cos.sign == 1
        and sin.sign == -other_sin.sign
        and part.in_pairs == (root.target is torch.reshape)
        and same_shape(shape_of(part.x), shape_of(root))
        and all(same_shape(shape_of(t.factor)[-1:], (shape_of(part.x)[-1] // 2,)) for t in (cos, sin))
    )
    return _Rotation(part, cos.factor, sin.factor, -sin.sign) if fits else None


def _is_stack_of_columns(stack: fx.Node, root: fx.Node) -> bool:
    """Return True if `root` joins the last two dimensions of a stack of two values, as columns in pairs."""
    if not is_tensor_node(stack) or stack.target is not torch.stack or stack.args[1] != -1:
        return False
    *shape, half, two = shape_of(stack)
    return two == 2 and same_shape(shape_of(root), (*shape, half * 2))


_TURNED = Call(
    torch.reshape,
    Call(torch.stack, Each(Call(torch.neg, Var("odd", is_tensor_node)), Var("even", is_tensor_node)), -1),
    role="turned",
)
_OF_PAIRS = _plus(_TURNED)


def _rotation_of_pairs(root: fx.Node, covered: list[fx.Node]) -> _Rotation | None:
    """Return the rotation x cos + [-x1, x0, -x3, x2, ...] sin; add its calls to `covered`."""
    for match in _OF_PAIRS.match(root, Match(), None):
        bound, (even, odd) = match.bound, (part_of(match.bound[name]) for name in ("even", "odd"))
        if even is None or odd is None or not even.in_pairs or not are_both(even, odd):
            continue
        if _adds_to(match, even.x) and _is_stack_of_columns(bound["turned"].args[0], bound["turned"]):
            covered.extend(match.nodes[1:])
            return _Rotation(even._replace(x=bound["whole"]), bound["cos"], bound["sin"], whole=True)
    return None


def _terms(node: fx.Node, sign: int, covered: list[fx.Node]) -> Iterator[_Term]:
    """Yield the terms of one part of a rotation."""
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
        parts = [part_of(factor) for factor in factors]
        at = 0 if parts[0] is not None else 1
        if parts[at] is not None:
            yield _Term(sign * signs[0] * signs[1], parts[at], factors[1 - at])


def _without_sign(node: fx.Node) -> tuple[int, fx.Node]:
    return (-1, node.args[0]) if node.target is torch.neg else (1, node)
