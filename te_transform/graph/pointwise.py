"""A pattern for pointwise functions of any name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from te_transform.graph import ops
from te_transform.graph.nodes import called, is_model_tensor, is_tensor_node, may_be_view, reached, value
from te_transform.graph.pattern import Match, Misses, Pattern, note

_POINTWISE_OPS = (*ops.ACTIVATION_OPS, ops.cast, ops.dropout)
# Pointwise functions that PyTorch does not tag as pointwise, leaky_relu up to PyTorch 2.11.
_UNTAGGED = frozenset(
    {
        "hardswish", "leaky_relu", "logsigmoid", "log_sigmoid", "prelu", "softsign", "special_ndtr",
        "tanhshrink",
    }
)  # fmt: skip

_REORDERINGS = frozenset(
    {"flip", "fliplr", "flipud", "roll"}
)  # their result has the same elements in another order


class Pointwise(Pattern):
    """A pattern for a pointwise function of a value that `inner` matches, views of it, and model tensors.

    Its elements may be in another order.

    The match binds `role` to the names of the functions, in graph order.
    """

    def __init__(self, inner: Pattern, role: str):
        self.inner, self.role = inner, role
        self.depth = 1 + inner.depth

    def __repr__(self) -> str:
        return "a pointwise function"

    def match(self, value: Any, so_far: Match, misses: Misses) -> Iterator[Match]:
        nodes, source = _computed(value)
        computing = [node for node in reversed(nodes) if not (may_be_view(node) or _is_made(node))]
        names = tuple(dict.fromkeys(map(called, computing)))
        here = so_far.bind(self.role, names) if any(map(_bends, nodes)) else None
        if source is None or here is None:
            note(misses, so_far, value, self)
            return
        yield from self.inner.match(source, replace(here, nodes=(*here.nodes, *nodes)), misses)


def _computed(root: Any) -> tuple[list[fx.Node], fx.Node | None]:
    """Return the pointwise calls and views that compute `root`, root first, and their only source.

    The source is None if there are several.
    """
    found = reached(
        [root] if isinstance(root, fx.Node) else [],
        lambda node: node.all_input_nodes if _is_passed(node) else (),
        lambda node: _holds_tensors(node) and not is_model_tensor(node),
    )
    inside = set(filter(_is_passed, found))
    sources = {*found} - inside
    return sorted(inside, reverse=True), sources.pop() if len(sources) == 1 else None


def _holds_tensors(node: fx.Node) -> bool:
    """Return True for a tensor, and for the parts of a split or of an unbind."""
    held = value(node)
    return isinstance(held[0] if isinstance(held, (tuple, list)) and held else held, Tensor)


def _is_passed(node: fx.Node) -> bool:
    return is_pointwise(node) or may_be_view(node) or _is_made(node) or called(node) in _REORDERINGS


def _is_made(node: fx.Node) -> bool:
    """Return True if a call makes a tensor that depends on sizes alone, such as the zeros of a maximum."""
    if node.op not in ("call_function", "call_method"):
        return False
    is_like = called(node).endswith("_like") or called(node).startswith("new_")
    return is_like or not any(map(is_tensor_node, node.all_input_nodes))


def leads_elsewhere(node: fx.Node, end: fx.Node) -> bool:
    """Return True if a node other than `end` reads the node, or reads a pointwise function or view of it."""
    readers = reached(node.users, lambda user: user.users if user is not end and _is_passed(user) else ())
    return not all(user is end or _is_passed(user) for user in readers)


def is_pointwise(node: fx.Node) -> bool:
    """Return True if each element of the result depends only on the elements at the same index."""
    if node.op not in ("call_function", "call_method"):
        return False
    return node.target in _POINTWISE_OPS or _is_tagged(called(node).strip("_"))


@cache
def _is_tagged(name: str) -> bool:
    """Return True if PyTorch tags the operator of this name as pointwise."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = () if packet is None else (getattr(packet, overload) for overload in packet.overloads())
    return name in _UNTAGGED or any(torch.Tag.pointwise in overload.tags for overload in overloads)


def _bends(node: fx.Node) -> bool:
    """Return True if the node is more than a view, a cast, a dropout or a multiple, as LoRA has."""
    if may_be_view(node) or _is_made(node) or node.target in (ops.cast, ops.dropout, torch.neg):
        return False
    tensors = sum(is_tensor_node(argument) for argument in node.args)
    return node.target not in (torch.mul, torch.div) or tensors > 1
