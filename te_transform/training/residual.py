"""Residual layers of a captured graph: x + f(norm(x)), found by their operations, not by names.

A branch reads the stream only through a norm. Successive branches that are added in the same module of a list
form one layer: its attention and its MLP. Branches that read the same norm, or the same value of the stream,
may be parallel.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import fx

from te_transform.graph import ops
from te_transform.graph.effects import changes_tensors
from te_transform.graph.nodes import (
    called,
    changes_state,
    computed_from,
    is_parameter,
    is_tensor_node,
    may_be_view,
    memory_of,
    modules_of,
    reached,
    same_shape,
    shape_of,
    storages,
    value,
    writes,
)
from te_transform.plan.match import Plan

READ_OUTSIDE = (
    "values beside the stream, as caches, attention weights or router logits, are read outside of the layer; "
    "pass use_cache=False, output_attentions=False, output_router_logits=False"
)
SHARED_WEIGHT = "a weight is read by several layers; drop_layers() needs layers with weights of their own"
NOT_NORMALIZED = (
    "the sum at {} adds a branch that reads the stream without a norm, as in post-norm models; drop_layers() "
    "needs pre-norm branches x + f(norm(x))"
)
OTHER_FORM = (
    "the stream has another shape or dtype behind the layer; drop_layers() needs x + f(norm(x)) of one form"
)
CHANGES_MODE = (
    "the layer switches autocast or the gradient mode; drop_layers() needs both to be set around the model"
)
WRITES = "the layer writes in place to a tensor from outside; drop_layers() needs layers that only compute"
NO_SUM = "the sum is part of another operation, {}; drop_layers() needs an addition of stream and branch"
NESTED_LAYER = "the layer lies inside another one, which is dropped as a whole"

_NUMBERED_PATH = re.compile(r"(?:.*\.)?\d+$")
_ADD_NAMES = {"add", "iadd", "__add__", "__iadd__", "add_"}


@dataclass(frozen=True, eq=False)
class Layer:
    """The branches of one layer, as nodes of the captured graph.

    Attributes:
        path: of the module that adds the branches; "#n" for the nth branch outside of modules of a list.
        start: the stream before the layer.
        end: the stream after the layer.
        branches: each sum, with its operand that is the branch.
        inside: the nodes that depend on `start` and that `end` needs.
    """

    path: str
    start: fx.Node
    end: fx.Node
    branches: tuple[tuple[fx.Node, fx.Node], ...]
    inside: frozenset[fx.Node]

    def weights(self) -> set[fx.Node]:
        """Return the parameters that only this layer reads. A table with rows for all layers is excluded."""
        given = {read for node in self.inside for read in node.all_input_nodes} - self.inside
        nodes = reached(given, lambda node: node.all_input_nodes if len(node.all_input_nodes) == 1 else ())
        return set(filter(is_parameter, nodes))


@dataclass(frozen=True)
class Residual:
    """The layers of a graph that can be dropped, in order, and the reasons why others cannot, by path."""

    layers: tuple[Layer, ...]
    refused: dict[str, str]


def residual(plan: Plan) -> Residual:
    """Return the residual layers of a captured graph."""
    sums, live = _sums(plan.before), _live(plan.captured.graph)
    layers: list[Layer] = []
    refused: dict[str, str] = {}
    for path, group in _sums_by_layer(plan, sums):
        layer_or_reason = _layer_or_refusal(plan, live, path, [(node, *sums[node]) for node in group])
        if isinstance(layer_or_reason, Layer):
            layers.append(layer_or_reason)
        else:
            refused[path] = layer_or_reason
    shared = _paths_with_shared_weights(layers)
    refused |= dict.fromkeys(shared, SHARED_WEIGHT)
    own = [layer for layer in layers if layer.path not in shared]
    nested = {layer for layer in own if any(layer.inside < other.inside for other in own)}
    refused |= {layer.path: NESTED_LAYER for layer in nested}
    if not own and not refused:
        refused = {path: NOT_NORMALIZED.format(path or "top level") for path in _post_norms(plan.before)}
    return Residual(tuple(layer for layer in own if layer not in nested), refused)


def _paths_with_shared_weights(layers: Sequence[Layer]) -> set[str]:
    """Return the paths of layers with a matrix that another layer reads too."""
    matrices = {layer: {node for node in layer.weights() if value(node).dim() > 1} for layer in layers}
    readers = Counter(node for nodes in matrices.values() for node in nodes)
    return {layer.path for layer, nodes in matrices.items() if any(readers[node] > 1 for node in nodes)}


def unreached_arguments(layers: Sequence[Layer]) -> list[fx.Node]:
    """Return the arguments of a captured graph that get no gradient if these layers are left out.

    Besides the layers' weights, these are weights for the keys and values of cross-attention, a table of
    positions if all its layers are left out, and an encoder then.
    """
    graph, ends = layers[0].end.graph, {layer.start: layer.end for layer in layers}
    left_out = {node for layer in layers for node in layer.inside} - set(ends.values())
    leading: set[fx.Node] = set()  # the nodes that lead to the output
    for node in reversed(graph.nodes):
        is_read = not leading.isdisjoint(node.users) or ends.get(node) in leading
        if node.op == "output" or (is_read and node not in left_out):
            leading.add(node)
    return [node for node in graph.nodes if node.op == "placeholder" and node not in leading]


def _sums(graph: fx.Graph) -> dict[fx.Node, tuple[fx.Node, fx.Node]]:
    """Return the sums of a stream and a branch, in order, each with its stream and branch."""
    sums: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
    for node in graph.nodes:
        for stream, branch in _stream_and_branch(node):
            if _reads_by_norms(branch, _stream(stream, sums)):
                sums[node] = stream, branch
                break
    return sums


def _stream_and_branch(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield both orders of a sum's operands: stream and branch, branch and stream."""
    if node.target is not torch.add or node.kwargs or len(node.args) != 2:
        return
    if all(map(is_tensor_node, node.args)):
        for stream, branch in (node.args, node.args[::-1]):
            if same_shape(shape_of(stream), shape_of(node)) and same_shape(shape_of(branch), shape_of(node)):
                yield stream, branch


def _stream(node: fx.Node, sums: dict[fx.Node, tuple[fx.Node, fx.Node]]) -> list[fx.Node]:
    """Return the values of the stream up to `node`, in reverse order."""
    values = [node]
    while (before := _before(values[-1], sums)) is not None:
        values.append(before)
    return values


def _before(node: fx.Node, sums: dict[fx.Node, tuple[fx.Node, fx.Node]]) -> fx.Node | None:
    """Return the value of the stream before a sum or a reshape, or None for the first value."""
    return node.args[0] if node.target is torch.reshape else sums[node][0] if node in sums else None


def _behind(node: fx.Node, *targets: Any) -> fx.Node:
    """Return the value behind calls of these functions, such as reshapes."""
    while node.target in targets:
        node = node.args[0]
    return node


def _reads_by_norms(branch: fx.Node, stream: Sequence[fx.Node]) -> bool:
    """Return True if the branch reads the stream, and only through norms."""
    of_stream, seen, waiting, is_read = set(stream), set(), [branch], False
    while waiting:
        node = waiting.pop()
        if node in of_stream:
            return False
        if node in seen or node < stream[-1] or _is_size(node):
            continue
        seen.add(node)
        inputs = node.all_input_nodes
        # casts and reshapes may precede a norm: experts flatten [batch, sequence]
        if node.target in ops.NORMS and _behind(node.args[0], ops.cast, torch.reshape) in of_stream:
            is_read, inputs = True, inputs[1:]
        waiting += inputs
    return is_read


def _is_size(node: fx.Node) -> bool:
    return isinstance(value(node), (int, float, torch.SymInt, torch.Size))


def _sums_by_layer(plan: Plan, sums: dict[fx.Node, Any]) -> Iterator[tuple[str, list[fx.Node]]]:
    """Yield the path of each layer with its sums: successive sums of one stream and one module."""
    stacks = {node: modules_of(_captured(plan, node)) if "origin" in node.meta else [] for node in sums}
    classes: dict[str, set[str]] = defaultdict(set)
    for path, kind in (module for stack in stacks.values() for module in stack):
        classes[path.rpartition(".")[0]].add(kind)
    group: list[fx.Node] = []
    numbers = count(1)
    is_block = plan.modules[0] != ""  # captured separately
    paths = {
        node: _layer_path(stack, classes, is_block) or ("" if is_block else f"#{next(numbers)}")
        for node, stack in stacks.items()
    }
    for node in sums:
        stream = _behind(sums[node][0], torch.reshape)
        goes_on = group and stream is group[-1] and paths[node] == paths[group[0]]
        if group and not goes_on:
            yield paths[group[0]], group
            group = []
        group.append(node)
    if group:
        yield paths[group[0]], group


def _layer_path(stack: Sequence[tuple[str, str]], classes: dict[str, set[str]], is_block: bool) -> str:
    """Return the path of a sum's layer, or "" for a block that is captured separately.

    The layer is the innermost module in a list whose modules have the same class. Without such a list, it is
    the outermost module of a list: T5's layers hold lists of several classes.
    """
    of_lists = [path for path, _ in reversed(stack) if _NUMBERED_PATH.match(path)]
    outermost = of_lists[-1] if of_lists and not is_block else ""
    return next((path for path in of_lists if len(classes[path.rpartition(".")[0]]) == 1), outermost)


def _layer_or_refusal(
    plan: Plan, live: set[fx.Node], path: str, sums: Sequence[tuple[fx.Node, fx.Node, fx.Node]]
) -> Layer | str:
    """Return the layer as nodes of the captured graph, or why it cannot be dropped."""
    first, last = sums[0][1], sums[-1][0]
    if not all("origin" in node.meta for each in sums for node in each):
        return NO_SUM.format("whose parts were written otherwise")
    start, end = _latest(plan, _captured(plan, first)), _in_form(_captured(plan, last), first)
    if not same_shape(shape_of(start), shape_of(end)) or value(start).dtype != value(end).dtype:
        return OTHER_FORM
    branches = []
    for each in sums:
        node, stream, branch = (_captured(plan, node_of_plan) for node_of_plan in each)
        if called(node) not in _ADD_NAMES:
            return NO_SUM.format(called(node))
        operand = _branch_operand(node, stream, branch)
        if operand is None:
            return NO_SUM.format("whose parts were written otherwise")
        branches.append((node, operand))
    inside = _nodes_between(start, end)
    reason = _why_not_dropped(live, start, end, inside)
    return reason or Layer(path, start, end, tuple(branches), frozenset(inside))


def _captured(plan: Plan, node: fx.Node) -> fx.Node:
    return plan.by_name[node.meta["origin"]]


def _latest(plan: Plan, node: fx.Node) -> fx.Node:
    """Return the last captured node with the value of `node`: a dropout with p=0 may follow."""
    known = {each.meta.get("origin") for each in plan.before.nodes}
    users = [user for user in node.users if user.users]
    if len(users) == 1 and users[0].name not in known and users[0].all_input_nodes == [node]:
        return _latest(plan, users[0]) if is_tensor_node(users[0]) else node
    return node


def _in_form(end: fx.Node, start: fx.Node) -> fx.Node:
    """Return the only reader of `end` if it is a view that restores the shape of `start`, else `end`."""
    (reader, *others) = end.users or (end,)
    if others or not may_be_view(reader) or not is_tensor_node(reader):
        return end
    is_same = same_shape(shape_of(reader), shape_of(start))
    return reader if is_same and not same_shape(shape_of(end), shape_of(start)) else end


def _branch_operand(node: fx.Node, stream: fx.Node, branch: fx.Node) -> fx.Node | None:
    """Return the operand of a captured sum that is computed from the branch."""
    for operand in node.all_input_nodes:
        if branch in computed_from([operand], lambda at: at is not branch and not at > stream):
            return operand
    return None


def _nodes_between(start: fx.Node, end: fx.Node) -> set[fx.Node]:
    """Return the nodes that depend on `start` and that `end` needs, and calls that change or measure them.

    A call that measures them, such as a batch norm whose result nothing reads, updates another tensor.
    """
    inside: set[fx.Node] = set()
    writing = [node for node in end.graph.nodes if start < node < end and changes_tensors(node)]
    roots = [end]
    while roots:
        for node in sorted(computed_from(roots, lambda node: not node > start)):
            if any(read is start or read in inside for read in node.all_input_nodes):
                inside.add(node)
        own = set(storages(inside)) - {memory_of(start)}
        roots = [
            node for node in writing if node not in inside and own & set(storages(node.all_input_nodes[:1]))
        ]
    return inside


def _why_not_dropped(live: set[fx.Node], start: fx.Node, end: fx.Node, inside: set[fx.Node]) -> str | None:
    """Return why a layer cannot be left out, or None. The graph's output needs the `live` nodes."""
    for node in sorted(inside - {end}):
        if any(user in live and user not in inside for user in node.users):
            return READ_OUTSIDE
    first = min(inside)
    between = [node for node in end.graph.nodes if first <= node <= end]
    if any(map(changes_state, between)):
        return CHANGES_MODE
    given = {read for node in inside for read in node.all_input_nodes} - inside
    outside, own = set(storages((start, *given))), set(storages(inside))
    for node in filter(writes, between):
        target = next(iter(node.all_input_nodes), None)
        if not is_tensor_node(target) or memory_of(target) in (outside if node in inside else outside | own):
            return WRITES
    return None


def _live(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that the output or a write needs."""
    return computed_from(
        node for node in graph.nodes if node.op == "output" or changes_tensors(node) or changes_state(node)
    )


def _post_norms(graph: fx.Graph) -> Iterable[str]:
    """Yield the paths of sums of which an operand is computed from the other operand."""
    for node in graph.nodes:
        for stream, branch in _stream_and_branch(node):
            if branch > stream and stream in computed_from([branch], partial(_is_out_of, stream)):
                yield node.meta.get("path", "")


def _is_out_of(stream: fx.Node, node: fx.Node) -> bool:
    return not node >= stream or _is_size(node)
