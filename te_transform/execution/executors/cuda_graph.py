"""CUDA graphs, which record the forward and backward of the fused or compiled graph once and replay them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

from torch import Tensor, fx

from te_transform.backends.fp8.fp8_only import StoredForms, addresses, closed, forms_of, opened
from te_transform.canonicalize import written
from te_transform.execution.call_context import CallContext
from te_transform.execution.call_signature import CallSignature, Function
from te_transform.execution.cuda_graph_pair import stream_now
from te_transform.execution.executors.fused import Fused
from te_transform.execution.executors.inductor import compiled, in_layers
from te_transform.execution.graph_version import GraphVersion
from te_transform.execution.lm_head import Head, head_of, with_head
from te_transform.execution.pieces import Piece
from te_transform.execution.replayed import Replayed
from te_transform.execution.specializations import Ready, Specializations, attention_kernels
from te_transform.execution.specialize import Precomputed, Specialized
from te_transform.graph.marks import marked
from te_transform.graph.nodes import returned, stays_in_place, storages

_OVERLAP = "runs without CUDA graphs, it returns two tensors that share memory"


class Recorded:
    """A function of a graph's arguments and the precomputed tensors that runs as CUDA graphs.

    Args:
        replayed: the function without the head. FP8 tensors are passed as bytes.
        forms: the indices of these FP8 tensors, with their classes and dtypes.
        head: runs outside of the recording.
    """

    def __init__(self, replayed: Replayed, forms: StoredForms, head: Head | None):
        self.replayed, self.forms, self.head = replayed, forms, head

    def __call__(self, *arguments: Any) -> Any:
        return with_head(self._replay, self.head)(*arguments)

    def signature_of(self, arguments: Sequence[Any], own: int) -> CallSignature | None:
        """Return the signature of a call, or None if its recording needs more than `own` arguments."""
        signature = self.replayed.signature_of(opened(arguments, self.forms))
        is_enough = signature.graphs is not None and signature.graphs.needs <= own
        return signature if is_enough else None

    def again(self, signature: CallSignature) -> Callable[..., Any] | None:
        """Return a function of the graph's arguments that replays the recording, or None if it was freed."""
        replay = self.replayed.again(signature)
        return None if replay is None else with_head(replay, self.head)

    def _replay(self, *arguments: Any) -> Any:
        return self.replayed(*opened(arguments, self.forms))


class LastStep(NamedTuple):
    """The last replayed call without gradients.

    Attributes:
        key: equal for the next step of generation if the same recording can compute it.
        recorded: the function that ran the call.
        signature: of the call. The recording may be freed elsewhere.
    """

    key: tuple[Any, ...]
    recorded: Recorded
    signature: weakref.ref[CallSignature]


class CudaGraph:
    """The executor that replays a graph.

    Args:
        version: the graph, and its sites that run as captured.
        fused: runs the first call with the same shapes and mode in a recipe.
    """

    name = "as CUDA graphs"

    def __init__(self, version: GraphVersion, fused: Fused):
        plan = version.plan
        self.options, self.tell, self.ranks = version.options, version.tell, version.ranks
        self.specializations = Specializations(version, fused, self._make)
        seen = written(plan.captured.graph)
        placeholders = [node for node in plan.captured.graph.nodes if node.op == "placeholder"]
        self.static_inputs = [stays_in_place(node) or node in seen for node in placeholders]
        self.outputs_overlap = _overlap(returned(plan.captured.graph), placeholders)
        self.last: LastStep | None = None

    def refuse(self, call: CallContext) -> str | None:
        """Return why the call runs without CUDA graphs."""
        why = self.specializations.refuse(call)
        if why is not None:
            return why
        step = self._step(call)
        found = self._replay_of(step) or self.specializations.find(call)
        if isinstance(found, str):
            return found
        call.found = found, step
        return None

    def run(self, call: CallContext) -> Any:
        """Replay a recording, or run the call. The third call with the same shapes and mode is recorded."""
        found, step = call.found
        if callable(found):  # a replay of the last step's recording
            return found(*call.args)
        outputs = found.run(call)
        if step is not None and isinstance(found, Ready):
            self._keep(step, found, call.args)
        return outputs

    def _keep(self, step: tuple[Any, ...], found: Ready, arguments: Sequence[Any]) -> None:
        """Keep the function that ran this call for the next one, if it reads only memory of the arguments."""
        recorded, known = found.compute, found.known
        if known.states or found.lowered.reads_values or not isinstance(recorded, Recorded):
            return
        # True if precomputed tensors are memory of the arguments, not copies that each call makes
        own = {*addresses(known.tensors)} <= {*step[0]}
        signature = recorded.signature_of([*arguments, *known.tensors], len(arguments)) if own else None
        self.last = None if signature is None else LastStep(step, recorded, weakref.ref(signature))

    def _step(self, call: CallContext) -> tuple[Any, ...] | None:
        """Return a key that is equal for calls without gradients that one recording can compute.

        Return None if the addresses of the arguments do not decide this.
        """
        if call.records_gradients or self.ranks is not None:
            return None
        arguments, writes = call.args, self.specializations.writes
        pairs = zip(arguments, self.static_inputs, strict=True)
        others = [argument for argument, is_static in pairs if not is_static]
        if writes:
            changed = {arguments[index].untyped_storage()._cdata for index in writes}
            tensors = (other for other in others if isinstance(other, Tensor))
            if any(tensor.untyped_storage()._cdata in changed for tensor in tensors):
                return None
        where = addresses([*compress(arguments, self.static_inputs)])
        values = [other for other in others if not isinstance(other, Tensor)]
        recipe, scaling = self.specializations.precision()
        sizes, here = self.specializations.sizes(arguments), (call.is_inference, stream_now())
        return where, values, sizes, (recipe is None, scaling), attention_kernels(), here

    def _replay_of(self, step: tuple[Any, ...] | None) -> Callable[..., Any] | None:
        """Return a replay of a call like the last one, or None. It halves the CPU time of the call."""
        last = self.last  # read once, because another thread may change it
        if step is None or last is None or last.key != step:
            return None
        signature = last.signature()
        return None if signature is None else last.recorded.again(signature)

    def _make(
        self, lowered: Specialized, known: Precomputed, arguments: Sequence[Any], bucket: int | None
    ) -> Callable[..., Any] | None:
        graph = lowered.with_known(known)
        compile = partial(compiled, options=self.options, tell=self.tell) if self.options.compile else None
        # the head runs outside of the recording, so its outputs need no copy
        head = head_of(graph, compile, recorded=True)
        graph = graph if head is None else head.rest
        given = [*arguments, *known.tensors]
        record = self._recorder(graph, known, arguments)
        if marked(graph.graph):  # each layer has a recording of its own
            record_piece = partial(self._recorded_piece, record)
            if compile is None:
                run = in_layers(graph, given, None, self.tell, record=record_piece)
            else:
                run = compile(graph, given, bucket, record_piece)
            return None if run is None else with_head(run, head)
        run = self._in_recipe(graph) if compile is None else compile(graph, given, bucket)
        if run is None:
            return None
        if self.outputs_overlap:
            self.tell(f"a graph {_OVERLAP}")
            return with_head(run, head)
        return record(run, [node for node in graph.graph.nodes if node.op == "placeholder"], head)

    def _recorder(
        self, graph: fx.GraphModule, known: Precomputed, arguments: Sequence[Any]
    ) -> Callable[..., Recorded]:
        """Return a function that makes operations of the graph run as CUDA graphs.

        Its arguments are a function that runs the operations, the nodes that they read, and the head.
        """
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        # new copies usually get the address of the last call's copy, but not if other layers ran
        as_own = self.ranks is not None or bool(marked(graph.graph))
        known_stay = known.stay_as(compress(arguments, self.static_inputs)) if as_own else known.static_inputs
        given = dict(zip(placeholders, [*arguments, *known.tensors], strict=True))
        static_inputs = dict(zip(placeholders, [*self.static_inputs, *known_stay], strict=True))
        writes = {placeholders[index] for index in self.specializations.writes}
        states = {placeholders[len(arguments) + index] for index in known.written}

        def record(run: Callable[..., Any], inputs: Sequence[fx.Node], head: Head | None = None) -> Recorded:
            forms = forms_of([given.get(node) for node in inputs])
            stay = [*(static_inputs.get(node, False) for node in inputs), *(True for _ in forms)]
            writes_to, states_in = (
                [index for index, node in enumerate(inputs) if node in nodes] for nodes in (writes, states)
            )

            def recorded(*tensors: Any) -> Any:
                return run(*closed(tensors, forms))

            function = Function(recorded, stay, writes_to, states_in, self.tell, self.ranks)
            return Recorded(Replayed(function), forms, head)

        return record

    def _recorded_piece(self, record: Callable[..., Recorded], piece: Piece) -> Callable[..., Any]:
        """Return a function that runs a piece of a graph as CUDA graphs of its own."""
        run = piece.run or self._in_recipe(piece.module)
        if not piece.outputs:
            return run
        if _overlap(piece.outputs, piece.inputs):
            self.tell(f"a part of a graph {_OVERLAP}")
            return run
        return record(run, piece.inputs)

    def _in_recipe(self, graph: fx.GraphModule) -> Callable[..., Any]:
        """Return a function that runs the graph in the active recipe, because a backward may rerun it."""
        recipe, _ = self.specializations.precision()
        if recipe is None:
            return graph.forward

        def run(*arguments: Any) -> Any:
            with self.options.backend.within_step(recipe):
                return graph.forward(*arguments)

        return run


def _overlap(outputs: Iterable[Any], inputs: Iterable[fx.Node]) -> bool:
    """Return True if two outputs share memory that is not memory of an input."""
    nodes = [node for node in dict.fromkeys(outputs) if isinstance(node, fx.Node)]
    given = set(storages(inputs))
    made = [storage for storage in storages(nodes) if storage not in given]
    return len(set(made)) < len(made)
