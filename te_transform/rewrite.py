"""Edit fx graphs: the only file that does."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.shape_prop import _extract_tensor_metadata

from te_transform import vocabulary
from te_transform.trace import Call, Recording


def replace(
    recording: Recording, nodes: Sequence[fx.Node], target: Callable, args: tuple, **meta: Any
) -> fx.Node:
    """Put one call of `target` where `nodes` computed the same value, `nodes[0]` last; the rest goes if
    unread.

    The new node stands at the root's place and carries its metadata; its `call` is the innermost module call
    that made all of `nodes`.
    """
    root = nodes[0]
    with recording.graph.inserting_before(root):
        node = recording.graph.call_function(target, args)
    _inherit(node, nodes, meta)
    pass_on(recording, root, node)
    erase_unread(recording, nodes)
    return node


def call_fused(recording: Recording, nodes: Sequence[fx.Node], name: str, args: tuple) -> fx.Node:
    """As `replace`, with a call of the module `name`."""
    with recording.graph.inserting_before(nodes[0]):
        # not through Graph.call_module: there is no owning module yet that could vouch for the name
        node = recording.graph.create_node("call_module", name, args)
    _inherit(node, nodes, {})
    pass_on(recording, nodes[0], node)
    erase_unread(recording, nodes)
    return node


def merge(
    recording: Recording, linears: Sequence[fx.Node], name: str, weight: Tensor, bias: Tensor | None
) -> list[tuple[int, int]]:
    """One linear on `weight` and `bias`, called `name`, in place of `linears`; returns the columns that were
    theirs."""
    rows = [node.meta["tensor_meta"].shape[-1] for node in linears]
    with recording.graph.inserting_before(linears[0]):
        parameters = [
            _attribute(recording, f"{name}.{k}", t) for k, t in (("weight", weight), ("bias", bias))
        ]
        merged = recording.graph.call_function(vocabulary.linear, (linears[0].args[0], *parameters))
    meta = linears[0].meta["tensor_meta"]
    _inherit(merged, linears, {"tensor_meta": meta._replace(shape=torch.Size((*meta.shape[:-1], sum(rows))))})
    merged.meta["merged"] = name
    columns, start = [], 0
    for node, count in zip(linears, rows, strict=True):
        columns.append((start, start + count))
        with recording.graph.inserting_before(node):
            part = recording.graph.call_function(vocabulary.columns, (merged, *columns[-1]))
        part.meta = dict(node.meta)
        pass_on(recording, node, part)
        start += count
    erase_unread(recording, linears)
    return columns


def _attribute(recording: Recording, name: str, tensor: Tensor | None) -> fx.Node | None:
    if tensor is None:
        return None
    recording.attributes[name] = tensor
    node = recording.graph.create_node("get_attr", name)
    node.meta = {"call": None, "path": "", "tensor_meta": _extract_tensor_metadata(tensor)}
    return node


def _inherit(node: fx.Node, nodes: Sequence[fx.Node], meta: dict[str, Any]) -> None:
    """The root's metadata; `calls`, all module calls, and `spelled`, all recorded calls, that went into the
    node."""
    node.meta = {**nodes[0].meta, **meta}
    set_call(node, innermost(n.meta.get("call") for n in nodes))
    node.meta["calls"] = {c for n in nodes for c in n.meta.get("calls", {n.meta.get("call")})} - {None}
    node.meta["spelled"] = spelled(nodes)


def spelled(nodes: Sequence[fx.Node]) -> tuple[str, ...]:
    """The names of the recorded calls behind `nodes`, in the order of the graph."""
    return tuple(s for n in reversed(nodes) for s in n.meta.get("spelled", (_name(n),)))


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target))


def insert(
    recording: Recording,
    nodes: Sequence[fx.Node],
    target: Callable,
    args: tuple,
    like: fx.Node,
    shape: Sequence | None = None,
) -> fx.Node:
    """A new call in front of `nodes[0]`, as part of what will replace `nodes`: of the dtype of `like`, and
    its shape if none is given."""
    with recording.graph.inserting_before(nodes[0]):
        node = recording.graph.call_function(target, args)
    meta = like.meta["tensor_meta"]
    _inherit(node, nodes, {"tensor_meta": meta if shape is None else meta._replace(shape=torch.Size(shape))})
    node.meta["spelled"] = ()  # the node that takes the place of `nodes` says it
    return node


def respell(node: fx.Node, target: Callable, args: tuple, kwargs: dict | None = None) -> None:
    """The same value by another call: the node stays itself and remembers the name of the recorded one."""
    node.meta.setdefault("spelled", (_name(node),))
    node.target, node.args, node.kwargs = target, args, kwargs or {}


def bypass(recording: Recording, node: fx.Node, value: fx.Node) -> None:
    """Let the readers of `node` read `value`, which is the same, and drop the node."""
    pass_on(recording, node, value)
    erase_unread(recording, [node])


def pass_on(recording: Recording, old: fx.Node, new: fx.Node) -> None:
    """Let every reader of `old` read `new`, those that look it up through the recorded calls too."""
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    recording.renamed[old] = new


def set_call(node: fx.Node, call: Call | None) -> None:
    node.meta["call"] = call
    if call is not None:
        node.meta["path"], node.meta["class"] = call.path, type(call.module)


def innermost(calls: Any) -> Call | None:
    """The innermost recorded call around all of `calls`."""
    chains = [_outwards(call) for call in calls if call is not None]
    if not chains:
        return None
    shared = set(map(id, chains[0])).intersection(*(set(map(id, chain)) for chain in chains[1:]))
    return next((call for call in chains[0] if id(call) in shared), None)


def _outwards(call: Call | None) -> list[Call]:
    chain = []
    while call is not None:
        chain.append(call)
        call = call.parent
    return chain


def erase_unread(recording: Recording, nodes: Sequence[fx.Node]) -> None:
    """Drop those of `nodes` that nothing reads any more; writes in place stay."""
    for node in sorted(set(nodes), reverse=True):
        if not node.users and node.op != "output" and not writes(node):
            recording.graph.erase_node(node)


def sweep(recording: Recording) -> None:
    """Drop every call that nothing reads and that writes nothing."""
    for node in reversed(recording.graph.nodes):
        if node.op == "call_function" and not node.users and not writes(node):
            recording.graph.erase_node(node)


def writes(node: fx.Node) -> bool:
    """Whether the node changes a tensor in place."""
    name = _name(node)
    inplace = (name.endswith("_") and not name.endswith("__")) or node.kwargs.get("inplace") is True
    return node.op == "call_function" and (
        inplace or name in ("setitem", "__iadd__", "__imul__", "iadd", "imul")
    )


def collapse(recording: Recording, owner: Call) -> list[Call]:
    """Turn the calls `owner` made of its children back into calls, unless a fusion has taken their insides.

    What is left is the owner's own forward: its glue, its children called as they always were. Anything
    recorded outside `owner` (a norm in front of it) stays as it is. Returns the calls that are made again.
    """
    sweep(recording)
    again = []
    for child in (c for c in recording.calls if c.parent is owner):
        inside = [n for n in recording.graph.nodes if n.meta.get("call") and n.meta["call"].within(child)]
        if inside:
            _collapse_call(recording, owner, child, inside)
            again.append(child)
    return again


def _collapse_call(recording: Recording, owner: Call, child: Call, inside: list[fx.Node]) -> None:
    name = child.path.removeprefix(owner.path).lstrip(".")
    args = fx.node.map_aggregate(child.args, recording.now)
    kwargs = fx.node.map_aggregate(child.kwargs, recording.now)
    with recording.graph.inserting_before(inside[0]):
        # not through Graph.call_module: there is no owning module that could vouch for the name
        called = recording.graph.create_node("call_module", name, tuple(args), dict(kwargs))
        set_call(called, owner)
        _hand_out(recording, child.output, called, set(inside))
    erase_unread(recording, inside)


def _hand_out(recording: Recording, output: Any, source: fx.Node, inside: set[fx.Node]) -> None:
    output = recording.now(output)
    if isinstance(output, fx.Node):
        if output in inside:
            source.meta.setdefault("tensor_meta", output.meta.get("tensor_meta"))
            pass_on(recording, output, source)
        return
    items = (
        output.items()
        if isinstance(output, dict)
        else enumerate(output)
        if isinstance(output, (tuple, list))
        else ()
    )
    for key, item in items:
        if (
            recording.now(item) in inside
            if isinstance(item, fx.Node)
            else isinstance(item, (tuple, list, dict))
        ):
            _hand_out(recording, item, recording.graph.call_function(operator.getitem, (source, key)), inside)


def rename_attributes(recording: Recording, name: Callable[[str], str]) -> None:
    """Give every get_attr node that is read the name that `name` makes of its own; the others go."""
    for node in [n for n in recording.graph.nodes if n.op == "get_attr"]:
        if node.users:
            node.target = name(node.target)
        else:
            recording.graph.erase_node(node)


def snapshot(recording: Recording) -> fx.Graph:
    """The graph as it stands, on its own: without the model, whose tensors and calls the recording keeps
    alive."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in recording.graph.nodes:
        copies[node] = copy = graph.node_copy(node, copies.__getitem__)
        copy.meta = {key: node.meta[key] for key in ("path", "tensor_meta", "merged") if key in node.meta}
    return graph
