"""Rotary position embedding in its rotate-half form."""

from __future__ import annotations

import torch
from torch import fx

from te_transform.canonicalize.op import Spelling
from te_transform.graph import ops
from te_transform.graph.nodes import is_tensor_node, same_shape, shape_of
from te_transform.graph.pattern import Call, Each, Match, Var

_X = Var("x", is_tensor_node)
_FIRST = Call(ops.columns, _X, 0, Var("half"))
_SECOND = Call(ops.columns, _X, Var("half"), Var("width"))
_ROTATED = Call(torch.cat, Each(Call(torch.neg, _SECOND), _FIRST), -1)


def _rope(graph: fx.Graph, match: Match) -> tuple | None:
    x, half, width = match.bound["x"], match.bound["half"], match.bound["width"]
    halves = width == shape_of(x)[-1] and 2 * half == width
    if not halves or not same_shape(shape_of(x), shape_of(match.root)):
        return None
    return ops.rope, (x, match.bound["cos"], match.bound["sin"])


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
