"""A pattern for functions of any name between two values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator

from te_transform.graph import ops
from te_transform.graph.nodes import (
    called,
    is_foreign,
    is_model_tensor,
    is_tensor_node,
    may_be_view,
    reached,
    value,
)
from te_transform.graph.pattern import Match, Misses, Pattern, note

_POINTWISE_OPS = (*ops.ACTIVATION_OPS, ops.cast, ops.dropout)
# Pointwise functions that PyTorch does not tag as pointwise, leaky_relu up to PyTorch 2.11.
_UNTAGGED = frozenset(
    {
        "hardswish", "leaky_relu", "logsigmoid", "log_sigmoid", "prelu", "softsign", "special_ndtr",
        "tanhshrink",
    }
)  # fmt: skip

_INDICES = (None, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_MATRIX_PRODUCTS = frozenset(
    {
        "addbmm", "addmm", "addmv", "addr", "baddbmm", "bilinear", "bmm", "cdist", "chain_matmul", "dot",
        "einsum", "ger", "grouped_mm", "gru", "inner", "kron", "linear", "lstm", "matmul", "mm",
        "multi_dot", "multi_head_attention_forward", "mv", "outer", "rnn_relu", "rnn_tanh",
        "scaled_dot_product_attention", "sdpa", "tensordot", "wide_linear",
    }
)  # fmt: skip


class Between(Pattern):
    """A pattern for a pointwise function of a value that `inner` matches, among calls that are no products.

    Tensors of the model may enter. Calls for which `passes` is False may not lie between. If some calls are
    not pointwise, such as convolutions, only the root of the match may read what is computed from the value.
    The match binds `role` to the names of the calls.
    """

    def __init__(self, inner: Pattern, role: str, passes: Callable[[fx.Node], bool] = lambda node: True):
        self.inner, self.role, self.passes = inner, role, passes
        self.depth = 1 + inner.depth

    def __repr__(self) -> str:
        return "a pointwise function"

    def match(self, value: Any, so_far: Match, misses: Misses) -> Iterator[Match]:
        nodes, sources = calls_towards(value, self.passes)
        here = so_far.bind(self.role, call_names(nodes)) if any(map(_bends, nodes)) else None
        if len(sources) != 1 or here is None or self._leads_elsewhere(so_far.root, nodes, *sources):
            note(misses, so_far, value, self)
            return
        yield from self.inner.match(*sources, replace(here, nodes=(*here.nodes, *reversed(nodes))), misses)

    def _leads_elsewhere(self, root: fx.Node, nodes: list[fx.Node], source: fx.Node) -> bool:
        return not all(map(_keeps_positions, nodes)) and leads_elsewhere(source, root)


def _keeps_positions(node: fx.Node) -> bool:
    is_reordering = called(node) in ("flip", "fliplr", "flipud", "roll")
    return is_reordering or is_pointwise(node) or may_be_view(node) or _is_made(node)


def calls_towards(
    root: Any, passes: Callable[[fx.Node], bool] = lambda node: True
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the calls that compute a value, in graph order, and the values at which they begin.

    They begin at matrix products, at inputs, and at calls for which `passes` is False. Tensors of the model
    are left out.
    """

    def is_inside(node: fx.Node) -> bool:
        return is_passed(node) and passes(node)

    nodes = reached(
        [root] if isinstance(root, fx.Node) else [],
        lambda node: node.all_input_nodes if is_inside(node) else (),
        lambda node: _dtype_held(node) not in _INDICES and not is_model_tensor(node),
    )
    inside = set(filter(is_inside, nodes))
    values = {node for node in nodes if _dtype_held(node) is not torch.bool}
    return sorted(inside), sorted(values - inside)


def call_names(nodes: list[fx.Node]) -> tuple[str, ...]:
    """Return the names of the calls, each once: those that compute if there are any, else the views."""
    computing = [node for node in nodes if not (may_be_view(node) or _is_made(node))]
    return tuple(dict.fromkeys(map(called, computing or nodes)))


def _dtype_held(node: fx.Node) -> torch.dtype | None:
    """Return the dtype of a tensor, or of the parts of a split or of an unbind; None for other values."""
    tensor = value(node)
    tensor = tensor[0] if isinstance(tensor, (tuple, list)) and tensor else tensor
    return tensor.dtype if isinstance(tensor, Tensor) else None


def is_passed(node: fx.Node) -> bool:
    """Return True for a call of a function that is not a matrix product, as far as its name tells."""
    is_call = node.op in ("call_function", "call_method") and not isinstance(node.target, HigherOrderOperator)
    return is_call and called(node) not in _MATRIX_PRODUCTS and not is_foreign(node)


def _is_made(node: fx.Node) -> bool:
    """Return True if a call makes a tensor that depends on sizes alone, such as the zeros of a maximum."""
    if node.op not in ("call_function", "call_method"):
        return False
    is_like = called(node).endswith("_like") or called(node).startswith("new_")
    return is_like or not any(map(is_tensor_node, node.all_input_nodes))


def leads_elsewhere(node: fx.Node, end: fx.Node) -> bool:
    """Return True if a node other than `end` reads the node, or reads a value that is computed from it."""
    readers = reached(node.users, lambda user: user.users if user is not end and is_passed(user) else ())
    return not all(user is end or is_passed(user) for user in readers)


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
    """Return True if the node is more than a cast, a dropout or a multiple, as LoRA has."""
    if not is_pointwise(node) or node.target in (ops.cast, ops.dropout, torch.neg):
        return False
    tensors = sum(is_tensor_node(argument) for argument in node.args)
    return node.target not in (torch.mul, torch.div) or tensors > 1
