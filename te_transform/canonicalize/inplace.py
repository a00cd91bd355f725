"""Which writes in place can be told from new values, and which reads may be moved over them."""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import torch
from torch import fx

from te_transform.graph import edit, nodes, ops

# composites that may hand back their argument, or a view of it, and have no aten schema that says so
_MAY_ALIAS = frozenset(
    ("getitem", "getattr", "float", "double", "half", "bfloat16", "type", "type_as", "dropout", "setitem")
)
# which aten has not
_NEW = frozenset((ops.by_expert, ops.in_order, ops.dispatch, ops.group_ends, ops.grouped_mm, ops.combine))
_OPERATIONS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
Storage = dict[fx.Node, frozenset[fx.Node]]


def put_by_index(graph: fx.Graph) -> None:
    """Spell `x[index] = values`, of a tensor of indices, as the call that it is and that returns x."""
    for node in graph.nodes:
        if node.target is not operator.setitem or not all(map(nodes.is_tensor_node, node.args)):
            continue
        target, index, values = map(nodes.value, node.args)
        is_index = index.dtype is torch.int64 and nodes.same_shape(index.shape, values.shape)
        if is_index and target.dim() == index.dim() == 1 and target.dtype is values.dtype:
            edit.set_target(node, torch.Tensor.index_put_, (node.args[0], (node.args[1],), node.args[2]))
            node.meta["example_value"] = target


def read_results(graph: fx.Graph) -> None:
    """Let what reads a tensor after a write to it read the write's result, which is the same tensor."""
    for node in graph.nodes:
        if nodes.writes(node) and nodes.is_tensor_node(node) and nodes.is_tensor_node(target_of(node)):
            edit.replace_later_uses(target_of(node), node)


def must_stay(graph: fx.Graph) -> set[fx.Node]:
    """The writes in place that something sees other than through their result.

    That is a read, later, of the tensor written or of another view of it, and any write into an input, a
    parameter or a buffer.
    """
    storage = storage_of(graph)
    return {node for node in graph.nodes if nodes.writes(node) and _is_seen(node, storage)}


def barriers(graph: fx.Graph) -> set[fx.Node]:
    """The writes in place over which no read may be moved: those that must stay and those to a tensor that
    something else reads first."""
    storage = storage_of(graph)
    writes = [node for node in graph.nodes if nodes.writes(node)]
    return {node for node in writes if _is_seen(node, storage) or _is_read_before(node, storage)}


def written(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that may share memory with one that is still written in place."""
    writes = [node for node in graph.nodes if nodes.writes(node)]
    if not writes:
        return set()
    storage = storage_of(graph)
    owners = frozenset().union(*(storage[node] for node in writes))
    return {node for node in graph.nodes if storage[node] & owners}


def target_of(write: fx.Node) -> fx.Node | None:
    """The tensor that is written to; None where the call does not say by `out` or its first argument.

    Operations of torch.ops may write to any of their arguments, and `out` may be several tensors.
    """
    out, is_op = write.kwargs.get("out"), isinstance(write.target, _OPERATIONS)
    first = write.args[0] if write.args and out is None and not is_op else out
    return first if isinstance(first, fx.Node) else None


def _is_seen(write: fx.Node, storage: Storage) -> bool:
    target = target_of(write)
    if target is None or not nodes.is_tensor_node(write) or nodes.called(write) == "setitem":
        return True
    if any(owner.op in ("placeholder", "get_attr") for owner in storage[target]):
        return True
    return any(reader > write for node in _aliases_before(write, storage) for reader in node.users)


def _is_read_before(write: fx.Node, storage: Storage) -> bool:
    owners = storage[write]
    readers = (reader for node in _aliases_before(write, storage) for reader in node.users)
    return any(reader is not write and not storage[reader] & owners for reader in readers)


def _aliases_before(write: fx.Node, storage: Storage) -> list[fx.Node]:
    owners = storage[target_of(write)]
    return [node for node, others in storage.items() if node < write and owners & others]


def storage_of(graph: fx.Graph) -> Storage:
    """For each node those that its memory may come from; two that share one may be views of one tensor.

    Which calls hand out views is known by name; others, as einsum may, show by the memory of their fake
    tensors.
    """
    storage: Storage = {}
    first: dict[int, frozenset[fx.Node]] = {}  # by their memory
    for node in graph.nodes:
        sources = [source for source in _sources(node) if nodes.size_of(source) is None]
        storage[node] = frozenset().union(*(storage[source] for source in sources)) or frozenset((node,))
        if nodes.is_tensor_node(node):
            storage[node] |= first.setdefault(nodes.memory_of(node), storage[node])
    return storage


def _sources(node: fx.Node) -> list[fx.Node]:
    if node.op in ("placeholder", "get_attr", "output") or nodes.size_of(node) is not None:
        return []
    if nodes.writes(node):
        target = target_of(node)
        return node.all_input_nodes if target is None else [target]
    if node.target in _NEW or (node.target is operator.getitem and _is_own(*node.args)):
        return []
    operation = node.target if isinstance(node.target, _OPERATIONS) else nodes.called(node)
    return node.all_input_nodes if node.op == "call_module" or _may_alias(operation) else []


def _is_own(source: fx.Node, index: Any) -> bool:
    """Whether an item has memory of its own: it is looked up by a tensor of more than one number, or one of
    two results."""
    return (nodes.is_tensor_node(index) and nodes.value(index).dim() > 0) or (
        nodes.called(source) in ("topk", "sort")
    )


@cache
def _may_alias(operation: Any) -> bool:
    """Whether an operation of torch.ops, or one of PyTorch's by its name, may hand out memory of another.

    A schema binds nobody: that of aten's dropout does not say that it returns its argument. PyTorch checks at
    each call that those of custom_op() return new memory.
    """
    if isinstance(operation, _OPERATIONS):
        packet = getattr(operation, "overloadpacket", operation)
        namespace, _, operation = packet._qualified_op_name.partition("::")
    else:
        name, namespace = operation.strip("_"), "aten"
        packet = getattr(torch.ops.aten, name, None) or getattr(torch.ops.aten, f"_{name}", None)
    is_known = namespace == "aten" or torch.library._maybe_get_opdef(packet._qualified_op_name) is not None
    if packet is None or not is_known or operation.strip("_") in _MAY_ALIAS:
        return True
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads() if overload != "out"]
    return any(r.alias_info is not None and not r.alias_info.is_write for s in schemas for r in s.returns)
