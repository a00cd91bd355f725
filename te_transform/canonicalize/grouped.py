"""Recognize grouped queries: models repeat each key and value head for several query heads."""

from __future__ import annotations

import torch
from torch import fx

from te_transform.canonicalize.op import Spelling
from te_transform.graph import edit, ops
from te_transform.graph.nodes import is_tensor_node, may_be_view, same_shape, shape_of, writes
from te_transform.graph.pattern import Call, Match, OneOf, Pattern, Var


def _expanded(name: str, x: Pattern, dim: int) -> Pattern:
    expanded = Call(torch.Tensor.expand, Call(torch.unsqueeze, x, dim), Var(f"{name}_sizes"))
    return Call(torch.reshape, expanded, Var(f"{name}_shape"), role=f"repeated_{name}")


def _repeated(name: str) -> Pattern:
    """Return the pattern of [batch, heads, length, width] with repeated heads.

    Some models repeat the heads before they transpose heads and length.
    """
    x, by_length = Var(name, is_tensor_node), Var(f"{name}_by_length", is_tensor_node)
    return OneOf(
        _expanded(name, x, -3),
        Call(torch.repeat_interleave, x, Var(f"{name}_times"), -3, role=f"repeated_{name}"),
        Call(torch.transpose, _expanded(name, by_length, -2), -3, -2),
    )


def _grouped(graph: fx.Graph, match: Match) -> tuple | None:
    key, value = (_few(match, name) for name in ("key", "value"))
    if key is None or value is None or not same_shape(shape_of(key)[1:2], shape_of(value)[1:2]):
        return None
    if torch.is_grad_enabled() and (is_given(key) or is_given(value)):
        return None
    return ops.sdpa, (match.bound["query"], key, value, *match.root.args[3:7], True, *match.root.args[8:])


def _few(match: Match, name: str) -> fx.Node | None:
    """Return the key or value before its heads were repeated, or None if other dimensions changed too."""
    few, many = match.bound.get(name), shape_of(match.bound[f"repeated_{name}"])
    heads = 1
    if few is None:
        few, heads = match.bound[f"{name}_by_length"], 2
    shape = shape_of(few)
    if len(many) != 4 or not same_shape(
        (*many[:heads], *many[heads + 1 :]), (*shape[:heads], *shape[heads + 1 :])
    ):
        return None
    if heads == 1:
        return few
    return edit.insert(match.nodes, torch.transpose, (few, -3, -2))


def is_given(node: fx.Node) -> bool:
    """Return True if a tensor is an input of the forward (such as a static cache) or a view of an input.

    The original's backward reads the repeated copy, which later writes to the input do not change.
    """
    while node.args and isinstance(node.args[0], fx.Node) and (may_be_view(node) or writes(node)):
        node = node.args[0]
    return node.op in ("placeholder", "get_attr")


def _shared(graph: fx.Graph, match: Match) -> tuple | None:
    """Return the call for one key and value head that the matrix product broadcasts to all query heads."""
    query, key, value = (shape_of(node) for node in match.root.args[:3])
    single = same_shape(key[-3:-2], (1,)) and same_shape(value[-3:-2], (1,))
    if match.root.args[7] or not single or not isinstance(query[-3], int) or query[-3] == 1:
        return None
    return ops.sdpa, (*match.root.args[:7], True, *match.root.args[8:])


GROUPED_QUERIES = (
    Spelling(Call(ops.sdpa, Var("query"), _repeated("key"), _repeated("value")), _grouped),
    Spelling(Call(ops.sdpa), _shared),
)
