"""Which writes in place can be told from new values."""

from __future__ import annotations

from functools import cache

import torch
from torch import fx

from te_transform import rewrite

# composites that may hand back their argument, or a view of it, and have no aten schema that says so
_MAY_ALIAS = (
    "getitem",
    "getattr",
    "float",
    "double",
    "half",
    "bfloat16",
    "type",
    "type_as",
    "dropout",
    "setitem",
)


def must_stay(graph: fx.Graph) -> set[fx.Node]:
    """The writes in place that something sees other than through their result.

    That is a read, later, of the tensor written or of another view of it, and any write into an input, a
    parameter or a buffer.
    """
    storage = _storage(graph)
    return {node for node in graph.nodes if rewrite.writes(node) and _is_seen(node, storage)}


def written(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that may share memory with one that is still written in place."""
    storage = _storage(graph)
    owners = frozenset().union(*(storage[node] for node in graph.nodes if rewrite.writes(node)))
    return {node for node in graph.nodes if storage[node] & owners} if owners else set()


def _is_seen(write: fx.Node, storage: dict[fx.Node, frozenset[fx.Node]]) -> bool:
    written = storage[write.args[0]]
    if write.target.__name__ == "setitem" or any(
        owner.op in ("placeholder", "get_attr") for owner in written
    ):
        return True
    before = (node for node, owners in storage.items() if node < write and owners & written)
    return any(reader > write for node in before for reader in node.users)


def _storage(graph: fx.Graph) -> dict[fx.Node, frozenset[fx.Node]]:
    """For each node those that its memory may come from; two that share one may be views of one tensor."""
    storage: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        sources: list[fx.Node] = []
        if rewrite.writes(node):
            sources = [node.args[0]]
        elif node.op == "call_function" and _may_alias(node.target.__name__):
            sources = node.all_input_nodes
        storage[node] = frozenset().union(*(storage[source] for source in sources)) or frozenset((node,))
    return storage


@cache
def _may_alias(name: str) -> bool:
    name = name.strip("_")
    if name in _MAY_ALIAS:
        return True
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:  # no operation of torch: it may do anything
        return True
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads() if overload != "out"]
    return any(r.alias_info is not None and not r.alias_info.is_write for s in schemas for r in s.returns)
