"""Find the in-place writes that can become new values, and the writes that reads may be moved across."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx

from te_transform.graph import edit, nodes, ops
from te_transform.graph.effects import changes_tensors, updated

_MAY_ALIAS = ("type_as", "dropout")  # they may return their argument, which their aten schemas do not declare
_OPERATIONS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
Storage = dict[fx.Node, frozenset[fx.Node]]
# in-place arithmetic, as operator and as method, and the same with a new result
_NEW_RESULT: dict[Any, Callable[..., Any]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    "add_": torch.Tensor.add,
    "sub_": torch.Tensor.sub,
    "mul_": torch.Tensor.mul,
    "div_": torch.Tensor.div,
    "clamp_": torch.Tensor.clamp,
}
# Calls for whose backward autograd saves neither their floating point inputs nor their result.
_SAVES_NO_VALUES = frozenset(("add", "gather", "getitem", "mean", "neg", "sub", "sum", "topk"))


def put_by_index(graph: fx.Graph) -> None:
    """Rewrite `x[index] = values` with a tensor index as `x.index_put_`, which returns x."""
    for node in graph.nodes:
        if node.target is not operator.setitem or not all(map(nodes.is_tensor_node, node.args)):
            continue
        target, index, values = map(nodes.value, node.args)
        is_index = index.dtype is torch.int64 and nodes.same_shape(index.shape, values.shape)
        if is_index and target.dim() == index.dim() == 1 and target.dtype is values.dtype:
            edit.set_target(node, torch.Tensor.index_put_, (node.args[0], (node.args[1],), node.args[2]))
            node.meta["example_value"] = target


def read_results(graph: fx.Graph) -> None:
    """Make later readers of a written tensor read the result of the write, which is the same tensor."""
    for node in graph.nodes:
        if nodes.writes(node) and nodes.is_tensor_node(node) and nodes.is_tensor_node(target_of(node)):
            edit.replace_later_uses(target_of(node), node)


def compute_new_results(graph: fx.Graph) -> None:
    """Compute `w / d` for `w /= d` if only the result is read later, and `w` was read before.

    Otherwise no read could be moved across the write, see barriers(). The sum of the weights in
    `w /= w.sum()` is such a read. If autograd may have saved `w`, the write stays: the backward then raises.
    """
    storage = storage_of(graph)
    for node in graph.nodes:
        new = _NEW_RESULT.get(node.target)
        if (
            new is None
            or not _write_keeps_dtype(node)
            or _is_seen(node, storage)
            or _may_be_saved(node, storage)
        ):
            continue
        if _is_read_before(node, storage):
            edit.set_target(node, new, node.args, dict(node.kwargs))


def _write_keeps_dtype(write: fx.Node) -> bool:
    """Return True if arithmetic with a new result has the dtype of the in-place target."""
    if not nodes.is_tensor_node(write.args[0]):
        return False
    target = nodes.value(write.args[0])
    others = [_operand(other) for other in (*write.args[1:], *write.kwargs.values())]
    is_known = all(isinstance(other, (int, float, torch.Tensor)) for other in others)
    return is_known and all(torch.result_type(target, other) is target.dtype for other in others)


def _operand(argument: Any) -> Any:
    """Return the value of an argument, with 1 for any size."""
    if not isinstance(argument, fx.Node):
        return argument
    return 1 if nodes.size_of(argument) is not None else nodes.value(argument)


def _may_be_saved(write: fx.Node, storage: Storage) -> bool:
    """Return True if autograd may have saved the written tensor, or a view of it, before the write."""
    aliases = _aliases_before(write, storage)
    readers = {reader for node in aliases for reader in node.users if reader < write}
    recorded = filter(_may_need_gradient, (*aliases, *readers))
    return any(nodes.called(node) not in _SAVES_NO_VALUES for node in recorded)


def _may_need_gradient(node: fx.Node) -> bool:
    """Return True if autograd records the call, or if its result is unknown."""
    result = nodes.value(node)
    results = result if isinstance(result, (tuple, list)) else (result,)
    return any(not isinstance(each, torch.Tensor) or each.requires_grad for each in results)


def must_stay(graph: fx.Graph) -> set[fx.Node]:
    """Return the in-place writes whose effect is visible other than through their result.

    These are writes to an input, a parameter or a buffer. A write is also visible if a later node reads the
    tensor or another view of it.
    """
    storage = storage_of(graph)
    return {node for node in graph.nodes if nodes.writes(node) and _is_seen(node, storage)}


def barriers(graph: fx.Graph) -> set[fx.Node]:
    """Return the in-place writes that no read may be moved across.

    These are the writes that must stay, and writes to a tensor that another node reads before the write.
    """
    storage = storage_of(graph)
    writes = [node for node in graph.nodes if nodes.writes(node)]
    return {node for node in writes if _is_seen(node, storage) or _is_read_before(node, storage)}


def written(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return the nodes that may share memory with what a call changes, each with the last such call."""
    changes = {node: updated(node) or [node] for node in graph.nodes if changes_tensors(node)}
    if not changes:
        return {}
    storage = storage_of(graph)
    last = {owner: node for node, changed in changes.items() for each in changed for owner in storage[each]}
    owners_written = {node: last.keys() & storage[node] for node in graph.nodes}
    return {node: max(last[owner] for owner in owners) for node, owners in owners_written.items() if owners}


def target_of(write: fx.Node) -> fx.Node | None:
    """Return the tensor that a call writes to: `out` or the first argument; None if neither identifies it.

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
    """Return the owners of each node's memory; nodes with a common owner may be views of one tensor.

    Most calls that return views are known by name. Others, such as some forms of einsum, are found by
    comparing the memory of their fake tensors.
    """
    storage: Storage = {}
    first: dict[int, frozenset[fx.Node]] = {}  # memory -> the owners of the first node with it
    for node in graph.nodes:
        sources = [source for source in _memory_sources(node) if nodes.size_of(source) is None]
        storage[node] = frozenset().union(*(storage[source] for source in sources)) or frozenset((node,))
        if nodes.is_tensor_node(node):
            storage[node] |= first.setdefault(nodes.memory_of(node), storage[node])
    return storage


def _memory_sources(node: fx.Node) -> list[fx.Node]:
    if node.op in ("placeholder", "get_attr", "output") or nodes.size_of(node) is not None:
        return []
    if nodes.writes(node):
        target = target_of(node)
        return node.all_input_nodes if target is None else [target]
    if node.target in ops.NEW or (node.target is operator.getitem and _is_own(*node.args)):
        return []
    operation = node.target if isinstance(node.target, _OPERATIONS) else nodes.called(node)
    return node.all_input_nodes if node.op == "call_module" or _may_alias(operation) else []


def _is_own(source: fx.Node, index: Any) -> bool:
    """Return True if an item has its own memory.

    This holds for an index that is a tensor with dimensions, and for the results of topk and sort.
    """
    return (nodes.is_tensor_node(index) and nodes.value(index).dim() > 0) or (
        nodes.called(source) in ("topk", "sort")
    )


@cache
def _may_alias(operation: Any) -> bool:
    """Return True if an operation may return the memory of an argument.

    `operation` is an operation of torch.ops or the name of a PyTorch function. Schemas are not always
    correct: the schema of aten::dropout does not declare that it may return its argument. For operations made
    by custom_op(), PyTorch checks at each call that they return new memory.
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
