"""Move layout changes of cosines and sines to their angles, which rotary kernels take."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from te_transform.graph import edit, ops
from te_transform.graph.nodes import is_number, is_tensor_node

# Calls whose result only arranges, repeats and selects numbers of their tensors.
_LAYOUTS = {
    torch.cat, torch.stack, torch.slice_scatter, torch.repeat_interleave, torch.unsqueeze, torch.reshape,
    torch.transpose, torch.permute, torch.t, torch.Tensor.expand, torch.Tensor.contiguous, operator.getitem,
    ops.columns,
}  # fmt: skip


_NEGATED = (torch.neg,)


class _Turn(NamedTuple):
    """Cosines or sines of angles.

    Attributes:
        angles: the argument of the cosine or sine.
        after: casts, factors and negations of the result, each as a function and its arguments.
    """

    angles: fx.Node
    after: tuple[tuple, ...] = ()


def take_angles(graph: fx.Graph) -> None:
    """Apply the layout changes of cosines and sines to their angles, before the cosines and sines are taken.

    Both are then computed from one tensor of angles. A negated sine is the sine of negated angles, which have
    the same cosine.
    """
    known: dict[tuple, Any] = {}
    for rope in [node for node in graph.nodes if node.target is ops.rope]:
        given = rope.args[1:3]
        if _is_plain(given[0], torch.cos) and _is_plain(given[1], torch.sin):
            continue
        moves = _Moves(rope, known)
        turns = [moves.turn(node, of) for node, of in zip(given, (torch.cos, torch.sin), strict=True)]
        if None in turns:
            continue
        is_reversed = _NEGATED in turns[1].after
        for node, turn, of in zip(given, turns, (torch.cos, torch.sin), strict=True):
            edit.read_instead(rope, node, moves.of(of, turn, is_reversed))
        edit.erase_cascade(graph, given, set())


class _Moves:
    """The moves for one rotation.

    Args:
        rope: the rotation, before which new calls are inserted.
        known: the results so far. Rotations of one region share them.
    """

    def __init__(self, rope: fx.Node, known: dict[tuple, Any]):
        self.rope, self.known = rope, known

    def turn(self, node: Any, function: Callable) -> _Turn | None:
        """Return the angles in the layout of these cosines or sines, or None for other numbers."""
        key = node, function, self.rope.meta["region"]
        if key not in self.known:
            self.known[key] = self._turn(node, function)
        return self.known[key]

    def _turn(self, node: Any, function: Callable) -> _Turn | None:
        if not is_tensor_node(node) or node.meta.get("written"):
            return None
        if node.target is function:
            return None if node.args[0].meta.get("written") else _Turn(node.args[0])
        is_layout = node.target in _LAYOUTS
        if not is_layout and not _is_elementwise(node, function):
            return None
        read = {each: self.turn(each, function) for each in node.all_input_nodes if is_tensor_node(each)}
        if None in read.values() or len({turn.after for turn in read.values()}) != 1:
            return None
        (first, *_), angles = read.values(), {each: turn.angles for each, turn in read.items()}
        if is_layout:
            return first._replace(angles=self._laid_out(node.target, node.args, angles))
        step = node.target, *node.args[1:]
        if step == _NEGATED and step in first.after:
            return None
        return first._replace(after=(*first.after, step))

    def _laid_out(self, target: Callable, args: tuple, angles: dict[fx.Node, fx.Node]) -> fx.Node:
        """Return the layout change of angles. If all angles are unsqueezed, unsqueeze the result instead."""
        dims = {angle.args[1] if _is_unsqueezed(angle) else None for angle in angles.values()}
        dim = dims.pop() if len(dims) == 1 and _is_of_columns(target, args) else None
        if dim is None:
            return self._call(target, fx.map_arg(args, lambda each: angles.get(each, each)))
        inner = {each: angle.args[0] for each, angle in angles.items()}
        return self._call(torch.unsqueeze, (self._laid_out(target, args, inner), dim))

    def of(self, function: Callable, turn: _Turn, is_reversed: bool) -> fx.Node:
        """Return the cosines or sines of the angles. Unsqueezes come last."""
        dims, angles = [], turn.angles
        while _is_unsqueezed(angles):
            dims.append(angles.args[1])
            angles = angles.args[0]
        values = self._call(function, (self._call(torch.neg, (angles,)) if is_reversed else angles,))
        for step in (step for step in turn.after if step != _NEGATED):
            values = self._call(step[0], (values, *step[1:]))
        for dim in reversed(dims):
            values = self._call(torch.unsqueeze, (values, dim))
        return values

    def _call(self, target: Callable, args: tuple) -> fx.Node:
        return edit.insert_once(self.rope, self.known, target, args)


def _is_elementwise(node: fx.Node, function: Callable) -> bool:
    """Return True for a cast, for a product with a number, and for a negation of sines."""
    is_scaled = node.target is torch.mul and is_number(node.args[1])
    return node.target is ops.cast or is_scaled or (node.target is torch.neg and function is torch.sin)


def _is_unsqueezed(node: fx.Node) -> bool:
    return node.target is torch.unsqueeze and node.args[1] != -1


def _is_of_columns(target: Callable, args: tuple) -> bool:
    """Return True for a layout of each row alone, in which the dimensions before the last do not matter."""
    by_dim = {torch.cat: 1, torch.repeat_interleave: 2, torch.slice_scatter: 2}
    return target is ops.columns or (target in by_dim and args[by_dim[target]] == -1)


def _is_plain(node: Any, function: Callable) -> bool:
    """Return True for a function of angles that is only unsqueezed, cast or scaled."""
    while isinstance(node, fx.Node) and (_is_elementwise(node, torch.cos) or _is_unsqueezed(node)):
        node = node.args[0]
    return isinstance(node, fx.Node) and node.target is function
