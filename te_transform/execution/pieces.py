"""Graphs in pieces that run in order. A call may skip pieces that are layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from te_transform.graph import edit
from te_transform.graph.effects import changes_tensors
from te_transform.graph.marks import is_mark, marked
from te_transform.graph.nodes import returned, value

dropped: ContextVar[frozenset[int]] = ContextVar("dropped", default=frozenset())
"""The layers that this call skips, by their numbers in the graph."""

Marks = tuple[fx.Node, fx.Node]
Runs = list[tuple[list[fx.Node], Marks | None]]


@dataclass(eq=False)
class Piece:
    """A run of operations.

    Attributes:
        module: the operations, as a module that returns a tuple.
        inputs, outputs: nodes of the whole graph.
        marks: the marks of the layer, or None if the piece is not a layer.
        dead: nodes that nothing after the piece reads.
        run: computes the outputs; the module's forward, or compiled code.
    """

    module: fx.GraphModule
    inputs: Sequence[fx.Node]
    outputs: Sequence[fx.Node]
    marks: Marks | None = None
    dead: Sequence[fx.Node] = ()
    run: Callable[..., Sequence[Any]] | None = None

    def is_left_out(self, layers: frozenset[int]) -> bool:
        """Return True if the piece is one of these layers."""
        return self.marks is not None and self.marks[1].args[2] in layers


def cut_pieces(graph: fx.GraphModule, runs: Runs) -> list[Piece]:
    """Cut a graph into pieces, one for each run of operations."""
    run_numbers = {node: number for number, (run, _) in enumerate(runs) for node in run}
    pieces = []
    for number, (run, marks) in enumerate(runs):
        outputs = [node for node in run if any(run_numbers.get(user) != number for user in node.users)]
        results = outputs if marks is None else [marks[1].args[0]]
        module, inputs = edit.cut_out(graph, run, results)
        pieces.append(Piece(module, inputs, outputs if marks is None else marks[1:], marks))
    last = {node: piece for piece in pieces for node in _piece_inputs(piece)}
    for node in {*last} - {*returned(graph.graph)}:
        last[node].dead = (*last[node].dead, node)
    return pieces


def _piece_inputs(piece: Piece) -> list[fx.Node]:
    return [*piece.inputs, *(() if piece.marks is None else (*piece.marks[:1], piece.marks[0].args[0]))]


def runner(
    graph: fx.GraphModule, pieces: Sequence[Piece], prepare: Callable[[Any], Any] = lambda value: value
) -> Callable[..., list[Any]]:
    """Return a function that runs the pieces in order, except for dropped layers.

    Args:
        graph: the whole graph.
        pieces: of the graph.
        prepare: converts each input of a piece.
    """
    placeholders, outputs = graph.graph.find_nodes(op="placeholder"), returned(graph.graph)

    def run(*given: Any) -> list[Any]:
        values, layers = dict(zip(placeholders, given, strict=True)), dropped.get()
        for piece in pieces:
            begin(piece, values)
            if piece.is_left_out(layers):
                values[piece.marks[1]] = _passed(values[piece.marks[0]], piece.marks[1])
            else:
                results = piece.run(*(prepare(values[node]) for node in piece.inputs))
                values.update(zip(piece.outputs, results, strict=True))
            for node in piece.dead:
                del values[node]
        return [values[node] if isinstance(node, fx.Node) else node for node in outputs]

    return run


def begin(piece: Piece, values: dict[fx.Node, Any]) -> None:
    """Set the value of the mark before a layer to the value of the residual stream."""
    if piece.marks is not None:
        values[piece.marks[0]] = values[piece.marks[0].args[0]]


def _passed(stream: Tensor, end: fx.Node) -> Tensor:
    """Return the residual stream after a dropped layer.

    It requires gradients if the layer's result would. A backward that reaches no parameter would raise, and
    compiled pieces expect a stream with gradients.
    """
    if stream.requires_grad or not value(end).requires_grad or not torch.is_grad_enabled():
        return stream
    return stream.detach().requires_grad_()


def by_layers(graph: fx.GraphModule) -> Callable[..., Any]:
    """Return a function that runs a graph: its forward, or its pieces if it has marked layers."""
    if not marked(graph.graph):
        return graph.forward
    pieces = cut_pieces(graph, layer_runs(graph.graph))
    for piece in pieces:
        piece.run = piece.module.forward
    run, is_tuple = runner(graph, pieces), isinstance(returned(graph.graph), tuple)
    return (lambda *given: tuple(run(*given))) if is_tuple else run


def layer_runs(graph: fx.Graph) -> Runs:
    """Return the operations of each layer, and those between layers, in an order in which they can run.

    Operations that only one layer needs, such as casts and joins of its weights, run with this layer.
    """
    ends = {mark: (mark, inner) for mark, inner in _inner(graph).items()}
    taken = {node for _, inner in ends.values() for node in inner}
    runs: Runs = []
    rest: list[fx.Node] = []
    for node in graph.nodes:
        if node in ends:
            runs += [(rest, None)] * bool(rest)
            runs.append((ends[node][1], (node.args[1], node)))
            rest = []
        elif node not in taken and computes(node):
            rest.append(node)
    return runs + [(rest, None)] * bool(rest)


def computes(node: fx.Node) -> bool:
    """Return True if the node is an operation, not an argument, the output or a mark."""
    return node.op not in ("placeholder", "output") and not is_mark(node)


def _inner(graph: fx.Graph) -> Mapping[fx.Node, list[fx.Node]]:
    """Return the operations of each layer, by the mark at its end."""
    layers: dict[fx.Node, list[fx.Node]] = {}
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    for begins, ends in marked(graph):
        between = nodes[nodes.index(begins) + 1 : nodes.index(ends)]
        of_stream, inside = {begins}, set()
        for node in between:
            of_stream |= {node} if of_stream & {*node.all_input_nodes} else set()
        for node in reversed(between):
            is_read = bool(node.users) or (node in of_stream and changes_tensors(node))
            if is_read and not {user for user in node.users if user is not ends} - inside:
                inside.add(node)
        layers[ends] = [node for node in between if node in inside]
    return layers
