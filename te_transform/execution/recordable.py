"""Functions of a captured graph that can be recorded as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import compress
from typing import Any

from torch import fx

from te_transform.backends.fp8.fp8_only import closed, forms_of
from te_transform.execution.call_signature import Function
from te_transform.execution.executors.inductor import compiled
from te_transform.execution.graph_version import GraphVersion
from te_transform.execution.lm_head import Head, head_of, with_head
from te_transform.execution.partition import in_pieces
from te_transform.execution.pieces import Piece
from te_transform.execution.rerun import RunGraph
from te_transform.execution.specialize import Precomputed
from te_transform.graph.marks import marked
from te_transform.graph.nodes import returned, stays_in_place, storages

_OVERLAP = "runs without CUDA graphs: it returns two tensors that share memory"


class RecordableGraph:
    """A captured graph whose specializations are recorded.

    Args:
        version: the graph, and its sites that run as captured.
        replayed: returns the function that runs a function, and its head, as CUDA graphs.
    """

    def __init__(self, version: GraphVersion, replayed: Callable[[Function, Head | None], RunGraph]):
        self.version, self.replayed, graph = version, replayed, version.plan.captured.graph
        placeholders = graph.find_nodes(op="placeholder")
        self.static_inputs = [
            stays_in_place(node) or index in version.writes for index, node in enumerate(placeholders)
        ]
        self.outputs_overlap = _overlap(returned(graph), placeholders)

    def make(
        self, graph: fx.GraphModule, known: Precomputed, arguments: Sequence[Any], recipe: Any
    ) -> RunGraph | None:
        """Return a function that runs a specialization, or None if the compiler fails.

        Args:
            graph: the specialization. Its arguments are the captured graph's and `known.tensors`.
            known: the precomputed values.
            arguments: of a call.
            recipe: the active recipe, or None.
        """
        tell, options = self.version.tell, self.version.options
        compile = partial(compiled, options=options, tell=tell) if options.compile else None
        # the head runs outside of the recording, so its outputs need no copy
        head = head_of(graph, compile, recorded=True)
        graph = graph if head is None else head.rest
        given = [*arguments, *known.tensors]
        record = self._recorder(graph, known, arguments)
        if marked(graph.graph):  # each layer has a recording of its own
            record_piece = partial(self._recorded_piece, record, recipe)
            if compile is None:
                run = in_pieces(graph, given, None, tell, record=record_piece)
            else:
                run = compile(graph, given, record=record_piece)
            return None if run is None else with_head(run, head)
        run = self._in_recipe(graph, recipe) if compile is None else compile(graph, given)
        if run is None:
            return None
        if self.outputs_overlap:
            tell(f"a graph {_OVERLAP}")
            return with_head(run, head)
        return record(run, graph.graph.find_nodes(op="placeholder"), head)

    def _recorder(
        self, graph: fx.GraphModule, known: Precomputed, arguments: Sequence[Any]
    ) -> Callable[..., RunGraph]:
        """Return a function that makes operations of the graph run as CUDA graphs.

        Its arguments are a function that runs the operations, the nodes that they read, and the head.
        """
        placeholders, ranks = graph.graph.find_nodes(op="placeholder"), self.version.ranks
        # new copies usually get the address of the last call's copy, but not if other layers ran
        as_own = ranks is not None or bool(marked(graph.graph))
        known_stay = known.stay_as(compress(arguments, self.static_inputs)) if as_own else known.static_inputs
        given = dict(zip(placeholders, [*arguments, *known.tensors], strict=True))
        static_inputs = dict(zip(placeholders, [*self.static_inputs, *known_stay], strict=True))
        writes = {placeholders[index] for index in self.version.writes}
        states = {placeholders[len(arguments) + index] for index in known.written}

        def record(run: RunGraph, inputs: Sequence[fx.Node], head: Head | None = None) -> RunGraph:
            forms = forms_of([given.get(node) for node in inputs])
            stay = [*(static_inputs.get(node, False) for node in inputs), *(True for _ in forms)]
            writes_to, states_in = (
                [index for index, node in enumerate(inputs) if node in nodes] for nodes in (writes, states)
            )

            def recorded(*tensors: Any) -> Any:
                return run(*closed(tensors, forms))

            tell = self.version.tell
            return self.replayed(Function(recorded, stay, writes_to, states_in, tell, ranks, forms), head)

        return record

    def _recorded_piece(self, record: Callable[..., RunGraph], recipe: Any, piece: Piece) -> RunGraph:
        """Return a function that runs a piece of a graph as CUDA graphs of its own."""
        run = piece.run or self._in_recipe(piece.module, recipe)
        if not piece.outputs:
            return run
        if _overlap(piece.outputs, piece.inputs):
            self.version.tell(f"a part of a graph {_OVERLAP}")
            return run
        return record(run, piece.inputs)

    def _in_recipe(self, graph: fx.GraphModule, recipe: Any) -> RunGraph:
        """Return a function that runs the graph in the recipe, because a backward may rerun it."""
        if recipe is None:
            return graph.forward

        def run(*arguments: Any) -> Any:
            with self.version.options.backend.within_step(recipe):
                return graph.forward(*arguments)

        return run


def _overlap(outputs: Iterable[Any], inputs: Iterable[fx.Node]) -> bool:
    """Return True if two outputs share memory that is not memory of an input."""
    nodes = [node for node in dict.fromkeys(outputs) if isinstance(node, fx.Node)]
    given = set(storages(inputs))
    new = [storage for storage in storages(nodes) if storage not in given]
    return len(set(new)) < len(new)
