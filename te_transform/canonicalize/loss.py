"""Rewrite a cross entropy to read the model's logits before they are cast and flattened for the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import fx

from te_transform.canonicalize.op import Spelling
from te_transform.graph import ops
from te_transform.graph.nodes import dtype_of, is_tensor_node, same_shape, shape_of
from te_transform.graph.pattern import Call, Match, Var


def _earliest_cross_entropy(graph: fx.Graph, match: Match) -> tuple[Callable, tuple] | None:
    """Return the op on the earliest logits and targets in the graph with one target per row of logits."""
    bound, root = match.bound, match.root
    if dtype_of(bound["targets"]) not in (torch.int64, torch.int32, torch.uint8):  # these are probabilities
        return None
    pairs = [
        (logits, targets)
        for logits in _by_rows(bound["logits"], root)
        for targets in _above(bound["targets"], root)
        if same_shape(shape_of(logits)[:-1], shape_of(targets))
        and (bound["reduction"] != "none" or same_shape(shape_of(targets), shape_of(root)))
    ]
    if not pairs:
        return None
    return ops.cross_entropy, (*pairs[-1], bound["ignore_index"], bound["reduction"], dtype_of(root))


def _by_rows(logits: fx.Node, root: fx.Node) -> Iterator[fx.Node]:
    """Yield the logits with the classes last; F.cross_entropy takes three-dimensional logits as [N, C, L]."""
    if len(shape_of(logits)) == 2:
        yield from _above(logits, root)
    elif logits.target is torch.transpose and logits.args[1:] == (-2, -1):
        yield from _above(logits.args[0], root)


def _above(x: fx.Node, root: fx.Node) -> Iterator[fx.Node]:
    """Yield `x` and the values it was reshaped or cast from.

    Reshapes must keep the last dimension of logits. Casts must be the cast that the op makes itself.
    """
    while True:
        yield x
        before = x.args[0] if x.target in (torch.reshape, ops.cast) else None
        if before is None or x.meta["region"] != root.meta["region"]:
            return
        if x.target is ops.cast and dtype_of(x) is not torch.promote_types(dtype_of(before), torch.float32):
            return
        if dtype_of(x).is_floating_point and not same_shape(shape_of(before)[-1:], shape_of(x)[-1:]):
            return
        x = before


LOSSES = (
    Spelling(
        Call(
            F.cross_entropy,
            Var("logits", lambda value: is_tensor_node(value) and len(shape_of(value)) in (2, 3)),
            Var("targets", is_tensor_node),
            None,
            None,
            Var("ignore_index", lambda value: type(value) is int),
            None,
            Var("reduction"),
        ),
        _earliest_cross_entropy,
    ),
)
