"""Move changes of the columns of cosines and sines to their angles, which rotary kernels take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from te_transform.graph import edit, ops
from te_transform.graph.nodes import is_number

# Changes of the last dimension: a function, and its arguments after the tensor.
Change = tuple[Any, ...]
TWICE: Change = (torch.cat,)  # the columns, and the same columns again
IN_PAIRS: Change = (torch.repeat_interleave, 2, -1)  # each column two times
REVERSED: Change = (torch.neg,)  # negates sines, because it negates the angles


class Angles:
    """The rewrite of changed cosines and sines as cosines and sines of changed angles.

    Args:
        graph: the canonical graph.
        root: the node before which new calls are inserted.
        known: the results so far. Rotations that share them share their angles.
    """

    def __init__(self, graph: fx.Graph, root: fx.Node, known: dict[tuple, fx.Node]):
        self.graph, self.root, self.known = graph, root, known

    def __call__(self, node: fx.Node, function: Callable, *changes: Change) -> fx.Node:
        """Return `node` with `changes` made to it, first to last.

        Args:
            node: cosines or sines of angles, possibly cast, scaled, unsqueezed, or with changed columns.
                Other values are changed as they are.
            function: torch.cos, torch.sin, or torch.neg for the angles themselves.
            changes: the changes.
        """
        key = node, function, changes, self.root.meta["region"]
        if key not in self.known:
            self.known[key] = self._changed(node, function, changes)
        return self.known[key]

    def _changed(self, node: fx.Node, function: Callable, changes: tuple[Change, ...]) -> fx.Node:
        inner = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else node
        if not any(each.meta.get("written") for each in (node, inner)):
            if node.target is ops.cast or _is_unsqueezed(node) or _is_scaled(node):
                return self._outside(node, self(inner, function, *changes))
            if node.target is function:
                return self._outside(node, self(inner, torch.neg, *changes))
            if _is_of_columns(node):
                return self(inner, function, (node.target, *node.args[1:]), *changes)
        for change in changes:
            if change is not REVERSED or function is not torch.cos:
                node = self._call(*_applied(node, change))
        return node

    def _outside(self, node: fx.Node, inner: fx.Node) -> fx.Node:
        """Return the call of a node on another first argument."""
        return node if inner is node.args[0] else self._call(node.target, (inner, *node.args[1:]))

    def _call(self, target: Callable, args: tuple) -> fx.Node:
        return edit.insert(self.graph, [self.root], target, args)


def _applied(node: fx.Node, change: Change) -> tuple[Callable, tuple]:
    target, *rest = change
    return target, (((node, node), -1) if change is TWICE else (node, *rest))


def _is_unsqueezed(node: fx.Node) -> bool:
    return node.target is torch.unsqueeze and node.args[1] != -1


def _is_scaled(node: fx.Node) -> bool:
    return node.target is torch.mul and is_number(node.args[1])


def _is_of_columns(node: fx.Node) -> bool:
    """Return True for a selection of columns, and for columns that are repeated a number of times."""
    repeated = node.target is torch.repeat_interleave and node.args[2] == -1
    return node.target is ops.columns or (repeated and isinstance(node.args[1], int))
