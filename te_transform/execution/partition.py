"""Partition graphs into layers or parts of layers, and compile equal pieces once.

A deep graph is cut between numbered modules, such as layers.0 and layers.1. Compile time grows with the size
of a graph, and the code of one layer serves all layers with the same operations and sizes.

Under DDP, any graph is cut into pieces of one gradient bucket each. The backward of a compiled graph returns
all of its gradients at its end.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, groupby, pairwise
from math import inf
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from te_transform.backends.joined import joined_anew
from te_transform.execution.pieces import Piece, Runs, begin, cut_pieces, layer_runs, runner
from te_transform.graph.marks import marked
from te_transform.graph.nodes import (
    bytes_of,
    called,
    changes_state,
    is_tensor_node,
    memory_of,
    path_of,
    storages,
    value,
    writes,
)
from te_transform.graph.structure import structure

log = logging.getLogger(__name__)

FEWEST = 24  # the minimum number of layers of a graph that is compiled layer by layer

CompilePiece = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
_LAYER_PATH = re.compile(r"(?:[^.]+\.)*?\d+(?=\.|$)")


def in_pieces(
    graph: fx.GraphModule,
    arguments: Sequence[Any],
    compile: CompilePiece | None,
    tell: Callable[[str], None],
    bucket: int | None = None,
    record: Callable[[Piece], Callable[..., Any]] | None = None,
) -> Callable[..., list[Any]] | None:
    """Return a function that runs the graph in pieces, or None if the graph is too small or cannot be cut.

    Args:
        graph: of operations and fused ops.
        arguments: the tensors and numbers of a call.
        compile: compiles a piece for its arguments; None to leave pieces uncompiled.
        tell: receives a sentence if the graph cannot be cut into its marked layers.
        bucket: the bytes of gradients per piece, which are reduced during the backward; None without DDP.
        record: returns the function that runs a piece as CUDA graphs.
    """
    given = dict(zip(graph.graph.find_nodes(op="placeholder"), arguments, strict=True))
    pieces = _cut_into_pieces(graph, given, bucket)
    try:
        if pieces is not None and compile is not None:
            _compile(pieces, given, compile)
    except Exception as error:
        log.info("a graph is compiled whole, because its pieces cannot be compiled", exc_info=error)
        pieces = None
    if pieces is None and marked(graph.graph):
        how = "without CUDA graphs" if compile is None else "uncompiled"
        tell(f"a graph whose layers are dropped runs {how}, because it cannot be cut into layers")
    if pieces is None:
        return None
    for piece in pieces if record is not None else ():
        piece.run = record(piece)
    return runner(graph, pieces, joined_anew)


def _cut_into_pieces(
    graph: fx.GraphModule, given: Mapping[fx.Node, Any], bucket: int | None
) -> list[Piece] | None:
    """Return the pieces of a graph, or None if it has no pieces or must not be cut.

    Each marked layer is a piece, and so are the operations between layers. Without marks, a deep graph is cut
    into runs of operations of one layer, any other graph into runs with a bucket of gradients each.
    """
    nodes = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output")]
    has_layers = bool(marked(graph.graph))
    runs = layer_runs(graph.graph) if has_layers else _unmarked(nodes, given, bucket)
    if len(runs) < 2 and not has_layers:  # a block that is captured separately may be one layer
        return None
    # in pieces, an in-place write would change a copy, and a changed setting would end with its piece
    if (not has_layers and any(map(writes, nodes))) or not all(_puts_settings_back(run) for run, _ in runs):
        return None
    pieces = cut_pieces(graph, runs)
    is_cut = all(isinstance(value(node), Tensor) for piece in pieces for node in piece.outputs)
    return pieces if is_cut and not any(map(_writes_to_inputs, pieces)) else None


def _writes_to_inputs(piece: Piece) -> bool:
    """Return True if the piece writes in place to one of its inputs."""
    nodes = piece.module.graph.nodes
    given = set(storages(piece.module.graph.find_nodes(op="placeholder")))
    targets = [next(iter(node.all_input_nodes), None) for node in nodes if writes(node)]
    return any(not is_tensor_node(target) or memory_of(target) in given for target in targets)


def _unmarked(nodes: Sequence[fx.Node], given: Mapping[fx.Node, Any], bucket: int | None) -> Runs:
    runs = [list(run) for _, run in groupby(nodes, _layer_of)]
    if len({_layer_of(run[0]) for run in runs} - {""}) < FEWEST:
        runs = [] if bucket is None else _by_bytes(nodes, given, bucket)
    return [(run, None) for run in runs]


def _by_bytes(nodes: Sequence[fx.Node], given: Mapping[fx.Node, Any], bucket: int) -> list[list[fx.Node]]:
    """Split the operations into runs of at least `bucket` bytes of gradients, from the end backwards.

    Returns:
        The runs in order, or nothing if there is a single run.
    """
    positions, gradients = _cut_positions(nodes), _first_read_bytes(nodes, given)
    cuts, waiting = [len(nodes)], 0
    for position in reversed(range(len(nodes))):
        waiting += gradients[position]
        if waiting >= bucket and position in positions:
            cuts.append(position)
            waiting = 0
    # the rest at the front joins the first run
    return [[*nodes[start:stop]] for start, stop in pairwise([0, *cuts[-2::-1]])]


def _cut_positions(nodes: Sequence[fx.Node]) -> set[int]:
    """Return the indices where operations may be cut: between layers, and inside the first layer.

    A layer is a numbered module with submodules, but not an activation in an nn.Sequential. Little is left to
    compute while the gradients of the first layer are reduced. The first layer is therefore also cut at
    positions that pass on no more bytes than its ends. At a cut, the compiler cannot fuse a sum with the next
    norm.
    """
    layers = {_layer_of(node) for node in nodes if _layer_of(node) != path_of(node)} - {""}
    sizes = [len([*run]) for _, run in groupby(nodes, lambda node: layers & {_layer_of(node)})]
    starts = [*accumulate(sizes, initial=0)]
    first = next((run for run in pairwise(starts) if _layer_of(nodes[run[0]]) in layers), (0, 0))
    handed_on = _handed_on(nodes)
    most = max(handed_on[position] for position in first)
    return {*starts, *(position for position in range(*first) if handed_on[position] <= most)}


def _handed_on(nodes: Sequence[fx.Node]) -> list[float]:
    """Return the bytes that cross each cut between operations; infinite if a value is not a tensor."""
    numbers = {node: number for number, node in enumerate(nodes)}
    handed_on = [0.0] * (len(nodes) + 1)
    for node, number in numbers.items():
        last = max((numbers[user] for user in node.users if user in numbers), default=number)
        for between in range(number + 1, last + 1):
            handed_on[between] += bytes_of(node) if is_tensor_node(node) else inf
    return handed_on


def _first_read_bytes(nodes: Iterable[fx.Node], given: Mapping[fx.Node, Any]) -> list[int]:
    """Return the bytes of trained tensors that each operation is the first to read.

    The backward of the first reader completes the gradient of a tensor.
    """
    tensors = {node: tensor for node, tensor in given.items() if isinstance(tensor, Tensor)}
    trained = {node: tensor.nbytes for node, tensor in tensors.items() if tensor.requires_grad}
    return [sum(trained.pop(read, 0) for read in node.all_input_nodes) for node in nodes]


def _puts_settings_back(run: Sequence[fx.Node]) -> bool:
    """Return True if the operations restore the grad mode that they change.

    Autocast contexts are values that their exits read, and no piece may return such a value.
    """
    switched = [node for node in run if changes_state(node) and "autocast" not in called(node)]
    recorded = [node.args[0] for node in switched if called(node) == "_set_grad_enabled"]
    return len(recorded) == len(switched) and recorded[-1:] in ([], [torch.is_grad_enabled()])


def _layer_of(node: fx.Node) -> str:
    """Return the path of the numbered module of an operation, "" without one."""
    matched = _LAYER_PATH.match(path_of(node))
    return matched.group() if matched else ""


def _compile(pieces: Sequence[Piece], values: dict[fx.Node, Any], compile: CompilePiece) -> None:
    """Compile each piece on fake tensors, or reuse the code of an equal piece."""
    compiled: dict[tuple, Callable[..., Any]] = {}
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    values = tree_map_only(Tensor, partial(fake.from_tensor, static_shapes=True), dict(values))
    for piece in pieces:
        begin(piece, values)
        given = [values[node] for node in piece.inputs]
        key = structure(piece.module), tuple(map(_compiled_properties, given))
        if key not in compiled:
            compiled[key] = compile(piece.module, [as_leaf(each) for each in given])
        piece.run = compiled[key]
        # The compiler times kernels on real tensors, so it runs outside of the fake mode. An active
        # checkpoint would count the tensors that are saved here.
        with fake, saved_tensors_hooks(_unchanged, _unchanged):
            outputs = piece.module.forward(*given)
        values.update(zip(piece.outputs, outputs, strict=True))


def _unchanged(value: Any) -> Any:
    """Return the value."""
    return value


def as_leaf(value: Any) -> Any:
    """Return a tensor as an autograd leaf, which compilers expect, and other values unchanged."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _compiled_properties(value: Any) -> Any:
    """Return the properties of a value that compiled code depends on."""
    if not isinstance(value, Tensor):
        return value
    return value.shape, value.stride(), value.dtype, value.device, value.requires_grad, value.storage_offset()
