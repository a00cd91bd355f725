"""Recognize linears, y = x W^T + b: F.linear, addmm or matmul, on a flattened x or not."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from te_transform.canonicalize.moves import reshape_sizes
from te_transform.canonicalize.op import Spelling
from te_transform.graph import edit, ops
from te_transform.graph.nodes import dtype_of, is_model_tensor, is_tensor_node, same_shape, shape_of
from te_transform.graph.pattern import Call, Linear, Match, Norm, Var, X

# F.multi_head_attention_forward splits one parameter into three; an einsum may permute [heads, inputs, width]
_PARTS = (
    torch.t, torch.permute, torch.transpose, torch.reshape, torch.chunk, torch.split, torch.unbind,
    operator.getitem, ops.columns,
)  # fmt: skip


def is_model_weight(rank: int) -> Callable[[Any], bool]:
    """Return the condition that a value of this rank is a parameter, its transpose or a part of it."""

    def holds(value: Any) -> bool:
        shaped = is_tensor_node(value) and len(shape_of(value)) == rank
        while isinstance(value, fx.Node) and value.target in _PARTS:
            value = value.args[0]
        return shaped and is_model_tensor(value)

    return holds


def _is_matrix(value: Any) -> bool:
    """Return True for any matrix; a weight computed at every call matches too, so that it gets a reason."""
    return is_tensor_node(value) and len(shape_of(value)) == 2


def _plain_linear(graph: fx.Graph, match: Match) -> tuple:
    return ops.linear, (match.bound["x"], match.bound["weight"], match.bound["bias"])


def _matmul_as_linear(graph: fx.Graph, match: Match) -> tuple | None:
    """Return the linear for x W + b: W is [in, out]. A bias in another shape gets a reason."""
    x, weight, bias = (match.bound.get(name) for name in ("x", "weight", "bias"))
    if weight.target is torch.t:
        return ops.linear, (x, weight.args[0], bias)
    turned = edit.insert(match.nodes, torch.t, (weight,))
    return ops.linear, (x, turned, bias)


def _add_bias(graph: fx.Graph, match: Match) -> tuple | None:
    linear, bias = match.bound["linear"], match.bound["bias"]
    x, weight, _ = linear.args
    fits = same_shape(shape_of(bias), shape_of(weight)[:1]) and dtype_of(bias) is dtype_of(linear)
    return (ops.linear, (x, weight, bias)) if fits and len(linear.users) == 1 else None


def _unflattened(graph: fx.Graph, match: Match) -> tuple | None:
    """Return the linear on the unflattened input, in the shape that the reshape after the linear restores."""
    root, linear, flat = match.nodes
    _, weight, bias = linear.args
    is_matrix = bias is not None and len(shape_of(bias)) > 1  # a row for each row of the flattened input
    if is_matrix or len(linear.users) > 1 or not same_shape(shape_of(root)[-1:], shape_of(linear)[-1:]):
        return None
    x, shape = match.bound["x"], (*shape_of(root)[:-1], shape_of(flat)[-1])
    if not same_shape(shape_of(x), shape):
        sizes = reshape_sizes(x, shape)
        if sizes is None:
            return None
        x = edit.insert(match.nodes, torch.reshape, (x, sizes))
    return ops.linear, (x, weight, bias)


def _transpose_result(graph: fx.Graph, match: Match) -> tuple | None:
    """Transpose the result of a linear instead of the norm that it reads.

    nn.MultiheadAttention transposes its input to put the length first.
    """
    linear, turn, norm = match.nodes
    if not _keeps_last(turn):
        return None
    product = edit.insert(match.nodes, ops.linear, (norm, *linear.args[1:]))
    return turn.target, (product, *turn.args[1:])


def _norm_of_flat(graph: fx.Graph, match: Match) -> tuple | None:
    """Return the norm of the reshaped value if only linears read the norm, through a reshape."""
    reshape, norm = match.nodes
    flat = (*shape_of(reshape)[:-1], *shape_of(norm)[-1:])
    reads_rows = any(user.target is ops.linear for user in reshape.users)
    if len(norm.users) > 1 or not reads_rows or not same_shape(shape_of(reshape), flat):
        return None
    sizes = reshape_sizes(match.bound["x"], shape_of(reshape))
    if sizes is None:
        return None
    x = edit.insert(match.nodes, torch.reshape, (match.bound["x"], sizes))
    return norm.target, (x, *norm.args[1:])


def _keeps_last(turn: fx.Node) -> bool:
    """Return True if a transpose or permute keeps the last dimension, which a linear maps, in place."""
    if turn.target is torch.transpose:
        return -1 not in turn.args[1:]
    return turn.args[1][-1] == len(turn.args[1]) - 1


TURNS = (torch.transpose, torch.permute)
_MATRIX, _VECTOR = Var("weight", is_model_weight(2)), Var("bias", is_model_weight(1))
_FLAT = Call(torch.reshape, X, Var("flat"))

LINEARS = (
    Spelling(Call(F.linear, X, Var("weight", _is_matrix), Var("bias")), _plain_linear),
    Spelling(Call(torch.addmm, Var("bias", is_tensor_node), X, _MATRIX), _matmul_as_linear),
    Spelling(Call(torch.matmul, X, _MATRIX), _matmul_as_linear),
)
BIASES = (
    Spelling(
        Call(torch.add, Call(ops.linear, X, _MATRIX, None, role="linear"), _VECTOR, commute=True),
        _add_bias,
    ),
)
TURNED = (
    Spelling(Linear(Call(TURNS, Norm(X))), _transpose_result),
    Spelling(Call(torch.reshape, Norm(X)), _norm_of_flat),
)
FLATTENED = (Spelling(Call(torch.reshape, Linear(_FLAT), Var("shape")), _unflattened),)
