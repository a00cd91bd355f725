"""Prove that an attention mask is the causal one, whatever the length."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from te_transform import rewrite, vocabulary
from te_transform.pattern import argument
from te_transform.trace import Recording

# elementwise, or a slice of a buffer: what holds for the whole mask holds for every upper left corner of it
_ALLOWED = (
    operator.getitem, torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge, torch.logical_not,
    torch.unsqueeze, torch.reshape, torch.arange, torch.ones, torch.tril, torch.triu, torch.Tensor.to,
    vocabulary.cast, vocabulary.kept,
)  # fmt: skip
_LENGTHS = (1, 2, 3, 7, 16)


def use_causal_flag(recording: Recording) -> dict[str, Tensor]:
    """Give every sdpa of a symbolic recording whose mask is proved to be causal the flag in the mask's place.

    Returns the buffers the proofs rest on, by name.
    """
    leaves: dict[str, Tensor] = {}
    for node in list(recording.graph.nodes):
        if node.target is vocabulary.sdpa and isinstance(argument(node, "mask"), fx.Node):
            found = _proved(recording, node)
            if found is not None:
                leaves |= found
                query = node.args[0]
                if query.target is vocabulary.zero_hidden:  # a causal mask hides no row
                    query = query.args[0]
                node.args = (query, *node.args[1:3], None, node.args[4], True, *node.args[6:])
    rewrite.sweep(recording)
    return leaves


def _proved(recording: Recording, node: fx.Node) -> dict[str, Tensor] | None:
    mask = argument(node, "mask")
    shape = mask.meta["tensor_meta"].shape
    if mask.meta["tensor_meta"].dtype is not torch.bool or len(shape) < 2 or str(shape[-1]) != str(shape[-2]):
        return None
    nodes = _ancestry(mask)
    if nodes is None:
        return None
    leaves = {n.target: recording.attributes[n.target] for n in nodes if n.op == "get_attr"}
    longest = min((min(t.shape[-2:]) for t in leaves.values() if t.dim() >= 2), default=None)
    symbols = {s for n in nodes for s in _symbols(n)}
    for length in {*_LENGTHS, longest} - {None} if symbols else {None}:
        if longest is None or length is None or length <= longest:
            value = _evaluate(nodes, leaves, dict.fromkeys(symbols, length))
            if value is None or not _is_causal(value):
                return None
    return leaves


def _is_causal(mask: Tensor) -> bool:
    causal = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    return mask.shape[-1] == mask.shape[-2] and torch.equal(mask, causal.expand(mask.shape))


def _ancestry(mask: fx.Node) -> list[fx.Node] | None:
    """All that the mask is computed from, in order, if that is buffers and sizes alone."""
    found, stack = set(), [mask]
    while stack:
        node = stack.pop()
        if node.op == "placeholder" or (node.op == "call_function" and node.target not in _ALLOWED):
            return None
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return sorted(found)


def _symbols(node: fx.Node) -> set:
    found: set = set()

    def look(value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            found.update(value.node.expr.free_symbols)
        return value

    fx.node.map_aggregate((node.args, dict(node.kwargs)), look)
    return found


def _evaluate(nodes: list[fx.Node], leaves: dict[str, Tensor], sizes: dict[Any, int]) -> Tensor | None:
    values: dict[fx.Node, Any] = {}

    def concrete(value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return int(value.node.expr.subs(sizes))
        return values[value] if isinstance(value, fx.Node) else value

    for node in nodes:
        if node.op == "get_attr":
            values[node] = leaves[node.target]
            continue
        args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), concrete)
        try:
            values[node] = node.target(*args, **kwargs)
        except (RuntimeError, IndexError, TypeError):
            return None
    return values[nodes[-1]]
