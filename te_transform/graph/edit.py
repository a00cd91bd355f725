"""Edit fx graphs; no other file edits graphs.

Each capture has two graphs. The captured graph runs. Its copy, the canonical graph, is rewritten to find
operations. A canonical node with the value of a captured node has the captured node's name as its `origin`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from itertools import count
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._C._functorch import (
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    maybe_get_bdim,
    maybe_get_level,
)
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch.vmap import vmap_increment_nesting
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_leaves, tree_map_only

from te_transform.graph import marks, ops
from te_transform.graph import nodes as node_info
from te_transform.graph.bound import module_of
from te_transform.graph.effects import changes_tensors, is_pure


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Return a copy to rewrite, in which each node has its `path` and its `origin`."""
    copied, twins = copy_by_name(graph)
    for node in graph.nodes:
        twins[node.name].meta |= {"path": node_info.path_of(node), "origin": node.name}
    return copied


def _without_argument(meta: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata without "grapharg", the captured tensor, which dynamo also drops."""
    return {key: noted for key, noted in meta.items() if key != "grapharg"}


def number_regions(graph: fx.Graph, barriers: Callable[[fx.Node], bool]) -> None:
    """Set each node's `region` to the number of barriers before the node: writes and mode changes.

    Calls are only moved or merged within one region.
    """
    region = 0
    for node in graph.nodes:
        if barriers(node):
            region += 1
            node.meta["region"] = -region  # a region of its own: nothing is merged with a barrier
        else:
            node.meta["region"] = region


def replace(
    nodes: Sequence[fx.Node],
    target: Callable | str,
    args: tuple,
    at: fx.Node | None = None,
) -> fx.Node:
    """Replace `nodes` by one call with the same value; erase those without other readers.

    `nodes[0]` is the root, which is computed last. The new node has the root's metadata.

    Args:
        target: a function, or the name of a submodule, which the root module may not have yet.
        at: the node before which the call is inserted, by default the root. A reader of the value may precede
            the root.
    """
    root = nodes[0]
    with root.graph.inserting_before(at or root):
        node = root.graph.create_node(_op_for(target), target, concrete(root, args))
    _inherit_meta(node, nodes)
    replace_uses(root, node)
    erase_unread(nodes)
    return node


def _op_for(target: Callable | str) -> str:
    return "call_module" if isinstance(target, str) else "call_function"


def insert(nodes: Sequence[fx.Node], target: Callable, args: tuple, like: fx.Node | None = None) -> fx.Node:
    """Insert a call before `nodes[0]`, as a part of the replacement of `nodes`; the call has no origin.

    The example value is that of `like`, if given. Otherwise the call is evaluated on fake tensors, which
    takes milliseconds.
    """
    graph = nodes[0].graph
    with graph.inserting_before(nodes[0]):
        node = graph.call_function(target, concrete(nodes[0], args))
    _inherit_meta(node, nodes)
    node.meta.pop("origin", None)
    node.meta["spelled"] = ()  # the final replacement of `nodes` has their names
    node.meta["example_value"] = evaluate(node) if like is None else node_info.value(like)
    return node


def insert_once(at: fx.Node, known: dict[tuple, Any], target: Callable, args: tuple) -> fx.Node:
    """Insert a call as insert() does, or return the equal call in `known` from the same region."""
    key = target, str(args), at.meta["region"]
    if key not in known:
        known[key] = insert([at], target, args)
    return known[key]


def calls_before(at: fx.Node) -> Callable[..., fx.Node]:
    """Return a function that inserts a call before `at`, in the same module of the model as `at`.

    The call has the example value of `like`, if given.
    """

    def call(target: Callable, *args: Any, like: fx.Node | None = None, **kwargs: Any) -> fx.Node:
        with at.graph.inserting_before(at):
            node = at.graph.call_function(target, args, kwargs)
        node.meta = {
            key: at.meta[key] for key in ("nn_module_stack", "path", "stack_trace") if key in at.meta
        }
        node.meta["example_value"] = evaluate(node) if like is None else node_info.value(like)
        return node

    return call


def evaluate(node: fx.Node) -> Any:
    """Evaluate the node on the fake tensors of its arguments."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), node_info.value)
    # use the mode of the tensors: while dynamo calls a backend, another mode is current
    modes = (leaf.fake_mode for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor))
    mode = next(modes, nullcontext())
    # with the Python dispatcher, composite C++ ops accept symbolic sizes
    with ExitStack() as stack:
        for context in (unset_fake_temporarily(), mode, torch.no_grad(), enable_python_dispatcher()):
            stack.enter_context(context)
        for size in _batch_sizes((args, kwargs)):
            stack.enter_context(vmap_increment_nesting(size, "error"))
        return node.target(*args, **kwargs)


def _batch_sizes(arguments: Any) -> list[Any]:
    """Return the batch sizes of the vmap() levels around a call, outermost first.

    Fake tensors of a finished vmap() are valid only inside a vmap() of the same depth.
    """
    sizes: dict[int, Any] = {}
    for leaf in tree_leaves(arguments):
        while isinstance(leaf, torch.Tensor) and is_functorch_wrapped_tensor(leaf):
            level, inner = maybe_get_level(leaf), get_unwrapped(leaf)
            if is_batchedtensor(leaf):
                sizes[level] = inner.shape[maybe_get_bdim(leaf)]
            leaf = inner
    return [sizes.get(level, 1) for level in range(1, max(sizes, default=0) + 1)]


def concrete(at: fx.Node, args: Any) -> Any:
    """Return the arguments with each symbolic size replaced by a node before `at` that computes the size."""

    def settled(argument: Any) -> Any:
        return _size_node(at, argument) if isinstance(argument, torch.SymInt) else argument

    return fx.node.map_aggregate(args, settled)


def _size_node(at: fx.Node, size: torch.SymInt) -> fx.Node | int:
    if (number := size.node.maybe_as_int()) is not None:
        return number
    dimension = None
    for node in at.graph.nodes:
        if node is at:
            break
        known = node_info.value(node)
        if isinstance(known, torch.SymInt) and statically_known_true(known == size):
            return node
        if isinstance(known, torch.Tensor) and dimension is None:
            dims = [d for d, s in enumerate(known.shape) if statically_known_true(s == size)]
            dimension = (node, dims[0]) if dims else None
    if dimension is None:
        raise LookupError(f"expected a node with the size {size} before {at.name}, got none")
    with at.graph.inserting_before(at):
        node = at.graph.call_function(torch.ops.aten.sym_size.int, dimension)
    node.meta = {"example_value": size, "path": "", "region": at.meta.get("region", 0)}
    return node


def _inherit_meta(node: fx.Node, nodes: Sequence[fx.Node]) -> None:
    """Set the node's metadata: the root's, with the common `path` and all `spelled` names of `nodes`."""
    node.meta = dict(nodes[0].meta)
    node.meta["path"] = innermost(n.meta.get("path", "") for n in nodes)
    node.meta["spelled"] = spelled(nodes)
    node.meta.pop("nn_module_stack", None)


def innermost(paths: Iterable[str]) -> str:
    """Return the path of the innermost module that contains all `paths`."""
    split = [path.split(".") if path else [] for path in paths]
    shared = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def spelled(nodes: Sequence[fx.Node]) -> tuple[str, ...]:
    """Return the names of the captured calls behind `nodes`, in graph order.

    Columns of a merged linear in `nodes` are skipped: the linear already has their names.
    """
    once = dict.fromkeys(nodes)
    calls = [n for n in once if n.target is not ops.columns or n.args[0] not in once]
    return tuple(s for n in reversed(calls) for s in n.meta.get("spelled", (node_info.called(n),)))


def set_target(node: fx.Node, target: Callable, args: tuple, kwargs: dict | None = None) -> None:
    """Change the call of a node that keeps its value; record the name of the captured call in `spelled`."""
    node.meta.setdefault("spelled", (node_info.called(node),))
    node.op, node.target = "call_function", target
    node.args, node.kwargs = concrete(node, args), kwargs or {}


def bypass(node: fx.Node, value: fx.Node) -> None:
    """Replace `node` by the equal `value` in all readers, and erase the node."""
    if "origin" in node.meta:  # an inserted value equals a captured value
        value.meta.setdefault("origin", node.meta["origin"])
    replace_uses(node, value)
    erase_unread([node])


def replace_uses(old: fx.Node, new: fx.Node) -> None:
    """Replace `old` by `new` in every reader except `new`."""
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


def move_readers_behind(value: fx.Node) -> None:
    """Move readers that precede a value behind it, such as a cast to the dtype that the value has."""
    for reader in sorted(value.users, reverse=True):
        if reader < value:
            value.append(reader)
            move_readers_behind(reader)


def read_instead(node: fx.Node, old: fx.Node, new: Any) -> None:
    """Replace the input `old` of one node by `new`, a node or a constant."""
    node.replace_input_with(old, new)


def replace_later_uses(value: fx.Node, write: fx.Node) -> None:
    """Replace `value` in readers after `write`, which writes to `value` in place and returns it."""
    value.replace_all_uses_with(write, delete_user_cb=lambda user: user > write)


def read_shards(node: fx.Node, args: tuple, target: str | None = None) -> None:
    """Set the arguments of a call to shards, or call the submodule `target` with these arguments.

    Function calls are evaluated again for the new example value.
    """
    if target is not None:
        node.op, node.target, node.kwargs = "call_module", target, {}
    node.args = args
    if node.op == "call_function":
        node.meta["example_value"] = tree_map_only(torch.Tensor, _as_before(node), evaluate(node))


def _as_before(node: fx.Node) -> Callable[[torch.Tensor], torch.Tensor]:
    before = next(leaf for leaf in tree_leaves(node_info.value(node)) if isinstance(leaf, torch.Tensor))
    return lambda result: result.detach().requires_grad_(before.requires_grad)


def with_shape(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a fake tensor like `like` with another shape; a parameter if `like` is a parameter."""
    mode = like.fake_mode if isinstance(like, FakeTensor) else nullcontext()
    with unset_fake_temporarily(), mode, torch.no_grad():
        tensor = torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
    if isinstance(like, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, like.requires_grad)
    return tensor.requires_grad_(like.requires_grad)


def erase_unread(nodes: Iterable[fx.Node]) -> None:
    """Erase the nodes that have no readers, except calls that change tensors."""
    for node in sorted(set(nodes), reverse=True):
        if not node.users and node.op not in ("output", "placeholder") and not changes_tensors(node):
            node.graph.erase_node(node)


def erase_cascade(
    graph: fx.Graph, nodes: Iterable[fx.Node], inside: set[str], staying: Collection[fx.Node] = ()
) -> None:
    """Erase the nodes that have no readers, then their inputs that lost all readers, and so on.

    Keep random calls and those that change tensors, unless their names are in `inside`. Keep all nodes in
    `staying`.
    """
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        called = node.op in ("call_function", "call_method", "call_module", "get_attr")
        if node._erased or not called or node.users or node in staying:
            continue
        if node.name not in inside and (changes_tensors(node) or node_info.is_random(node)):
            continue
        sources = node.all_input_nodes
        graph.erase_node(node)
        waiting += sources


def copy_by_name(graph: fx.Graph) -> tuple[fx.Graph, dict[str, fx.Node]]:
    """Return a copy of the graph, and its nodes by the names of the original nodes."""
    copied, copies = fx.Graph(), {}
    for node in graph.nodes:
        copies[node] = twin = copied.node_copy(node, copies.__getitem__)
        twin.meta = _without_argument(node.meta)
        if hasattr(node, "_dynamo_source"):
            twin._dynamo_source = node._dynamo_source
    return copied, {node.name: twin for node, twin in copies.items()}


def insert_call(
    graph: fx.Graph,
    at: fx.Node,
    target: Callable | str,
    args: tuple,
    kwargs: dict | None = None,
    *,
    like: fx.Node,
) -> fx.Node:
    """Insert a call of a function or a submodule name before `at`, with the example value of `like`."""
    with graph.inserting_before(at):
        node = graph.create_node(_op_for(target), target, args, kwargs or {})
    node.meta = {key: like.meta[key] for key in ("example_value", "path") if key in like.meta}
    return node


def hand_out(graph: fx.Graph, call: fx.Node, others: Sequence[fx.Node]) -> None:
    """Change a call to return a tuple of its result and the values of `others`; erase `others`.

    Readers of these nodes read items of the tuple.
    """
    values, at = [call, *others], call.next
    for index, before in enumerate(values):
        if before._erased:
            continue
        readers = set(before.users)
        with graph.inserting_before(at):
            item = graph.call_function(operator.getitem, (call, index))
        item.meta = dict(before.meta)
        before.replace_all_uses_with(item, delete_user_cb=readers.__contains__)
    call.meta["example_value"] = tuple(map(node_info.value, values))
    call.meta.pop("origin", None)
    erase_unread([node for node in others if not node._erased])


def merge(graph: fx.Graph, linears: Sequence[fx.Node]) -> fx.Node:
    """Replace linears with the same input by one linear with joined weights; each becomes columns of it."""
    first = min(linears)
    with graph.inserting_before(first):
        weights, biases = ([node.args[i] for node in linears] for i in (1, 2))
        weight, bias = _insert_join(graph, weights, first), None
        if any(bias is not None for bias in biases):  # a number n stands for n zeros
            rows = (node_info.shape_of(weight)[0] for weight in weights)
            biases = [n if own is None else own for n, own in zip(rows, biases, strict=True)]
            bias = _insert_join(graph, biases, first)
        merged = graph.call_function(ops.linear, (first.args[0], weight, bias))
    _inherit_meta(merged, linears)
    merged.meta.pop("origin", None)
    merged.meta["example_value"] = evaluate(merged)
    start = 0
    for node in linears:
        stop = start + node_info.shape_of(node)[-1]
        with graph.inserting_before(node):
            columns = graph.call_function(ops.columns, (merged, start, stop))
        columns.meta, start = dict(node.meta), stop
        replace_uses(node, columns)
    erase_unread(linears)
    return merged


def _insert_join(graph: fx.Graph, parts: Sequence[fx.Node | int], at: fx.Node) -> fx.Node:
    last = max(part for part in parts if isinstance(part, fx.Node))
    while last.next.op == "placeholder":
        last = last.next
    with graph.inserting_after(last):
        node = graph.call_function(ops.join, tuple(parts))
    node.meta = {"path": at.meta["path"], "region": at.meta["region"]}
    node.meta["example_value"] = evaluate(node)
    return node


def extract(
    gm: fx.GraphModule, outputs: Sequence[fx.Node], boundary: Iterable[fx.Node]
) -> tuple[fx.GraphModule, tuple[fx.Node, ...]]:
    """Extract the computation of `outputs` from `boundary` nodes and placeholders as a separate module.

    Returns:
        The module, which returns a tuple, and the nodes that are its arguments, in graph order. Every
        boundary node is an argument: the module's replacement may read sizes that the module does not read.
    """
    inside, inputs = needed(outputs, boundary)
    arguments = tuple(sorted(inputs))
    return _module_of(gm, arguments, sorted(inside), outputs), arguments


def read_aside(outputs: Sequence[fx.Node], boundary: Collection[fx.Node]) -> set[fx.Node]:
    """Return the tensors read between `boundary` and `outputs` that do not depend on the boundary.

    Examples are tensors of which only the dtype or shape is read.
    """
    inside, _ = needed(outputs, boundary)
    between = {*boundary, *outputs}
    for node in sorted(inside):
        if any(read in between for read in node.all_input_nodes):
            between.add(node)
    read = {read for node in between & inside for read in node.all_input_nodes} & inside - between
    return {node for node in read if node_info.is_tensor_node(node) and node.op != "get_attr"}


def needed(outputs: Iterable[fx.Node], boundary: Iterable[fx.Node]) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the operations that compute `outputs`, and their inputs: the boundary and placeholders."""
    ends = {*boundary}
    operations = node_info.computed_from(outputs, ends.__contains__)
    inputs = ends | {node for node in operations if node.op == "placeholder"}
    return operations - inputs, inputs


def _module_of(
    gm: fx.GraphModule, inputs: Sequence[fx.Node], nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> fx.GraphModule:
    graph, copies = fx.Graph(), {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = _without_argument(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return module_of(gm, graph)


def cut_out(
    gm: fx.GraphModule, run: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> tuple[fx.GraphModule, tuple[fx.Node, ...]]:
    """Copy a run of operations into a separate module, including operations that `outputs` do not need.

    Returns:
        The module, which returns a tuple, and the nodes before the run that are its arguments. Arguments are
        in the order of their first use, which is the same for equal runs.
    """
    read, inside = dict.fromkeys(read for node in run for read in node.all_input_nodes), set(run)
    inputs = tuple(node for node in read if node not in inside)
    return _module_of(gm, inputs, run, outputs), inputs


def without(gm: fx.GraphModule, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> fx.GraphModule:
    """Return the graph without `nodes`, which no other node reads; the graph returns `outputs`."""
    graph, twins = copy_by_name(gm.graph)
    graph.output_node().args = ([twins[node.name] for node in outputs],)
    for node in sorted(nodes, reverse=True):
        graph.erase_node(twins[node.name])
    return module_of(gm, graph)


def with_keyword(gm: fx.GraphModule, name: str, change: Callable[[Any], Any]) -> fx.GraphModule:
    """Return a copy of a module whose calls of submodules have change(value) for the value of a keyword."""
    graph, _ = copy_by_name(gm.graph)
    for node in graph.nodes:
        if node.op == "call_module" and name in node.kwargs:
            node.update_kwarg(name, change(node.kwargs[name]))
    return module_of(gm, graph)


def passed_through(gm: fx.GraphModule, index: int, function: Callable, *rest: Any) -> fx.GraphModule:
    """Return a copy of a module in which output number `index` is replaced by function(output, *rest)."""
    graph, _ = copy_by_name(gm.graph)
    output, outputs = graph.output_node(), [*node_info.returned(graph)]
    node = outputs[index]
    outputs[index] = insert_call(graph, output, function, (node, *rest), like=node)
    output.args = (tuple(outputs),)
    return module_of(gm, graph)


def with_layers(gm: fx.GraphModule, layers: Sequence[Any]) -> fx.GraphModule:
    """Return a copy of a captured graph with marked layers and scaled branches.

    Args:
        gm: the graph.
        layers: the layers from training/residual.py, in order.

    Returns:
        The copy. After the arguments of `gm`, it takes a 0-dim tensor per layer: the factor of its branches.
    """
    graph, twins = copy_by_name(gm.graph)
    eliminate_dead_code(graph)  # an unread size would be computed after the layer
    for number, layer in enumerate(layers):
        start, end = twins[layer.start.name], twins[layer.end.name]
        names = {node.name for node in layer.inside}
        inside = [node for node in graph.nodes if node.name in names]
        begins = insert_call(graph, _first_of(inside, start), marks.layer_begins, (start, number), like=start)
        for node in inside:
            node.replace_input_with(start, begins)
        factor = _factor_argument(graph, number, like=start)
        for added, branch in layer.branches:
            _scale_operand(graph, twins[added.name], twins[branch.name], factor)
        twins[layer.end.name] = insert_call(
            graph, end.next, marks.layer_ends, (end, begins, number), like=end
        )
        replace_uses(end, twins[layer.end.name])
    return module_of(gm, graph)


def _first_of(inside: Sequence[fx.Node], start: fx.Node) -> fx.Node:
    """Return the first operation after `start` that can run with a layer.

    Operations on other values, such as keys of an encoder's output, may come before the layer reads `start`.
    """
    first = inside[0]
    while first.prev is not start and first.prev.op != "placeholder" and not _is_barrier(first.prev):
        first = first.prev
    return first


def _is_barrier(node: fx.Node) -> bool:
    return marks.is_mark(node) or changes_tensors(node) or node_info.changes_state(node)


def _factor_argument(graph: fx.Graph, number: int, like: fx.Node) -> fx.Node:
    last = next(node for node in reversed(graph.nodes) if node.op == "placeholder")
    tensor = node_info.value(like)
    with graph.inserting_after(last), unset_fake_temporarily(), tensor.fake_mode:
        node = graph.placeholder(f"factor_of_layer_{number}")
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        node.meta["example_value"] = torch.ones((), dtype=dtype, device=tensor.device)
    node._dynamo_source = None  # nowhere in the model
    return node


def _scale_operand(graph: fx.Graph, added: fx.Node, branch: fx.Node, factor: fx.Node) -> None:
    scaled = calls_before(added)(torch.mul, branch, factor)
    before = node_info.value(branch)
    scaled.meta["example_value"] = node_info.value(scaled).detach().requires_grad_(before.requires_grad)
    added.replace_input_with(branch, scaled)


def with_known(
    gm: fx.GraphModule,
    values: Mapping[fx.Node, Any],
    staying: Collection[fx.Node] = (),
    more: Mapping[fx.Node, Mapping[str, Any]] = MappingProxyType({}),
) -> fx.GraphModule:
    """Return a copy of the graph in which known values replace nodes.

    Args:
        gm: the graph.
        values: the known values by node. Tensors, also in tuples, become arguments. Other values become
            constants. A graph module is inlined; its first output replaces the node.
        staying: the nodes whose tensors keep their addresses in all calls.
        more: additional keywords for calls in the graph; their tensors keep their addresses.

    Returns:
        The copy. Its arguments are the arguments of `gm`, the tensors of `values`, and the tensors of `more`.
        Tensors of `more` with the same address share one argument.
    """
    graph, twins = copy_by_name(gm.graph)
    last = next((node for node in reversed(graph.nodes) if node.op == "placeholder"), graph._root)
    numbers = count()

    def argument(stays: bool) -> fx.Node:
        nonlocal last
        with graph.inserting_after(last):
            last = graph.placeholder(f"known_{next(numbers)}")
        last._dynamo_source = None  # nowhere in the model
        if stays:  # dynamo's mark for parameters, which CUDA graphs read
            last.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
        return last

    for node, known in values.items():
        twin = twins[node.name]
        replacement = tree_map_only(torch.Tensor, lambda _, stays=node in staying: argument(stays), known)
        if isinstance(known, fx.GraphModule):
            replacement = _inline(graph, known, twin)
        for user in list(twin.users):
            read_instead(user, twin, replacement)
        graph.erase_node(twin)
    arguments: dict[int, fx.Node] = {}

    def once(tensor: torch.Tensor) -> fx.Node:
        if tensor.data_ptr() not in arguments:
            arguments[tensor.data_ptr()] = argument(stays=True)
        return arguments[tensor.data_ptr()]

    for node, keywords in more.items():
        twin = twins[node.name]
        twin.kwargs = {**twin.kwargs, **tree_map_only(torch.Tensor, once, dict(keywords))}
    return module_of(gm, graph)


def _inline(graph: fx.Graph, called: fx.GraphModule, at: fx.Node) -> fx.Node:
    """Inline a graph module before the call `at`, with the call's arguments, and return its first output."""
    arguments = called.graph.find_nodes(op="placeholder")
    with graph.inserting_before(at):
        first, *_ = graph.graph_copy(called.graph, dict(zip(arguments, at.args, strict=True)))
    return first


def name_model_tensors(captured: fx.GraphModule, arguments: Sequence[Any]) -> fx.GraphModule:
    """Return a standalone captured graph whose model tensors are attributes with their names in the model.

    Args:
        captured: the graph from dynamo, which takes every tensor of the model as an argument.
        arguments: the arguments of the captured call.
    """
    graph, copies = copy_by_name(captured.graph)
    root = dict(captured.named_children())
    placeholders = captured.graph.find_nodes(op="placeholder")
    for node, argument in zip(placeholders, arguments, strict=True):
        name, twin = node_info.name_in_model(node), copies[node.name]
        if name:
            root[name] = argument
            with graph.inserting_after(twin):
                attribute = graph.create_node("get_attr", name)
            attribute.meta = dict(twin.meta)
            twin.replace_all_uses_with(attribute)
            graph.erase_node(twin)
    for node in graph.nodes:
        node.meta["path"], node.meta["class"] = node_info.path_of(node), node_info.class_of(node)
    # a dictionary as the root keeps dotted names without a copy of the user's modules
    return fx.GraphModule(root, graph)


def snapshot(graph: fx.Graph) -> fx.Graph:
    """Return a copy of the graph with the metadata that reports and lower_unfused() read."""
    copied, twins = copy_by_name(graph)
    kept = ("path", "region", "example_value", "fused", "origin", "spelled", "outcome", "argument")
    for node in graph.nodes:
        metadata = {key: node.meta[key] for key in kept if key in node.meta}
        twins[node.name].meta = {**metadata, "source": node_info.source_of(node)}
    return copied


def take_any_layout(node: fx.Node) -> None:
    """Change view() to reshape() for all views of the node: reshape() accepts columns of a wider tensor."""
    for user in node.users:
        if node_info.may_be_view(user):
            if user.op == "call_method" and user.target == "view":
                user.target = "reshape"
            elif user.op == "call_method" and user.target == "view_as":
                user.target = "reshape_as"
            take_any_layout(user)


def eliminate_dead_code(graph: fx.Graph) -> None:
    """Erase every unread call that has no other effect than its result."""
    for node in reversed(graph.nodes):
        called = node.op in ("call_function", "call_method")
        if called and not node.users and is_pure(node):
            graph.erase_node(node)
