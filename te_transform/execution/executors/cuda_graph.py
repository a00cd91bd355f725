"""CUDA graphs, which record the forward and backward of the fused or compiled graph once and replay them.

The CPU then launches two graphs instead of hundreds of kernels. The CUDA graph trees of torch.compile and
torch.cuda.make_graphed_callables return memory that the next replay overwrites, so a kept or accumulated
gradient changes silently or raises. Here, outputs are copies, a gradient is overwritten only if it has no
holder, and the function itself runs if a replay would be wrong.

execution/recordable.py makes the functions that are recorded.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from te_transform.backends.fp8.fp8_only import addresses, opened
from te_transform.backends.tracing import batches_gradients, in_backward, recorded, saving_hooks
from te_transform.execution.call_context import CallContext
from te_transform.execution.call_signature import CallSignature, Function
from te_transform.execution.cuda_graph_pair import CudaGraphPair, casting_anew, stream_now
from te_transform.execution.gradient_memory import GradientMemory
from te_transform.execution.graph_version import GraphVersion
from te_transform.execution.lm_head import Head, with_head
from te_transform.execution.recordable import RecordableGraph
from te_transform.execution.recorded_values import RecordedInputs, RecordedOutputs
from te_transform.execution.recording_check import record_call
from te_transform.execution.rerun import (
    CallStart,
    call_on_views,
    check_unchanged,
    gradients_of,
    noted_tensors,
    trained_among,
)
from te_transform.execution.specializations import Ready, Specializations, attention_kernels
from te_transform.execution.specialize import Precomputed, Specialized

log = logging.getLogger(__name__)

WARM_UPS = 2  # calls before a recording: they load kernels, make plans and show which outputs get gradients
MAX_SIGNATURES = 8  # the maximum number of recordings: each holds the memory of a whole step
_LISTING = threading.Lock()  # guards iteration over `_ALL`


class LastStep(NamedTuple):
    """The last replayed call without gradients.

    Attributes:
        key: equal for the next step of generation if the same recording can compute it.
        replayed: the function that ran the call.
        signature: of the call. The recording may be freed elsewhere.
    """

    key: tuple[Any, ...]
    replayed: Replayed
    signature: weakref.ref[CallSignature]


class CudaGraph:
    """The executor that replays a graph.

    Args:
        version: the graph, and its sites that run as captured.
    """

    name = "as CUDA graphs"

    def __init__(self, version: GraphVersion):
        self.is_divided = version.ranks is not None
        self.recordable = RecordableGraph(version, Replayed)
        self.specializations = Specializations(version, self._make)
        self.last: LastStep | None = None

    def refuse(self, call: CallContext) -> str | None:
        """Return why the call runs without CUDA graphs."""
        why = self.specializations.refuse(call)
        if why is not None:
            return why
        step = self._step(call)
        ready = self._replay_of(step) or self.specializations.find(call)
        if isinstance(ready, str):
            return ready
        call.prepared = ready, step
        return None

    def run(self, call: CallContext) -> Any:
        """Replay a recording, or run the call. The third call with the same shapes and mode is recorded."""
        ready, step = call.prepared
        if callable(ready):  # a replay of the last step's recording
            return ready(*call.args)
        outputs = ready.compute(*ready.arguments(call))
        if ready.backend is not None:
            ready.update_scales(call, outputs)
        if step is not None:
            self._keep(step, ready, call.args)
        return outputs

    def _make(
        self, lowered: Specialized, known: Precomputed, arguments: Sequence[Any], bucket: int | None
    ) -> Callable[..., Any] | None:
        recipe, _ = self.specializations.precision()
        return self.recordable.make(lowered.with_known(known), known, arguments, recipe)

    def _keep(self, step: tuple[Any, ...], ready: Ready, arguments: Sequence[Any]) -> None:
        """Keep the function that ran this call for the next one, if it reads only memory of the arguments."""
        replayed, known = ready.compute, ready.known
        if known.states or ready.lowered.reads_values or not isinstance(replayed, Replayed):
            return
        self.last = None
        if not {*addresses(known.tensors)} <= {*step[0]}:  # some are copies that each call makes
            return
        signature = replayed.signature_of([*arguments, *known.tensors])
        if signature.graphs is not None and signature.graphs.needs <= len(arguments):
            self.last = LastStep(step, replayed, weakref.ref(signature))

    def _step(self, call: CallContext) -> tuple[Any, ...] | None:
        """Return a key that is equal for calls without gradients that one recording can compute.

        Return None if the addresses of the arguments do not decide this.
        """
        if call.records_gradients or self.is_divided:
            return None
        arguments = call.args
        writes, static_inputs = self.specializations.writes, self.recordable.static_inputs
        pairs = zip(arguments, static_inputs, strict=True)
        others = [argument for argument, is_static in pairs if not is_static]
        if writes:
            changed = {arguments[index].untyped_storage()._cdata for index in writes}
            tensors = (other for other in others if isinstance(other, Tensor))
            if any(tensor.untyped_storage()._cdata in changed for tensor in tensors):
                return None
        where = addresses([*compress(arguments, static_inputs)])
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
        return None if signature is None else last.replayed.again(signature)


class Replayed:
    """A function of tensors that is replayed from the third call with the same signature.

    Args:
        function: the function, without the head.
        head: runs outside of the recording.
    """

    def __init__(self, function: Function, head: Head | None = None):
        self.function, self.head, self.is_divided = function, head, function.ranks is not None
        self.signatures: dict[tuple, CallSignature] = {}
        self.lock = threading.RLock()
        with _LISTING:
            _ALL.add(self)

    def __call__(self, *arguments: Any) -> Sequence[Any]:
        return with_head(self._call, self.head)(*arguments)

    def again(self, signature: CallSignature) -> Callable[..., Sequence[Any]] | None:
        """Return a function that replays calls without gradients, or None without a recording."""
        graphs = signature.graphs
        if graphs is None or _is_recorded_by_others():
            return None

        def replay(*arguments: Any) -> Sequence[Any]:
            with self.lock:
                return graphs.outputs.assemble(graphs.forward(arguments), arguments)

        return with_head(replay, self.head)

    def signature_of(self, arguments: Sequence[Any]) -> CallSignature:
        """Return the signature of a call: its mode and arguments, without the values of tensors."""
        return self._signature(opened(arguments, self.function.forms))

    def _call(self, *given: Any) -> Sequence[Any]:
        arguments = opened(given, self.function.forms)
        if _is_recorded_by_others():
            return self.function.run(*arguments)
        with self.lock:
            signature = self._signature(arguments)
            if signature.refused or signature.is_waiting():
                return self.function.run(*arguments)
            if signature.calls < WARM_UPS or not signature.knows_gradients():
                return signature.warmed_up(self.function.run, arguments)
            if signature.graphs is not None and not signature.graphs.gradients.is_free(arguments):
                if self.is_divided:  # other ranks may not hold theirs
                    return self.function.run(*arguments)
                signature.copies_gradients, signature.graphs = True, None  # the holder keeps the memory
            if signature.graphs is None and (why := self._record(signature, arguments)) is not None:
                return self._refused(signature, why, arguments)
            if self.is_divided and self._have_moved(signature.graphs, arguments):
                return self.function.run(*arguments)
            return self._replay(signature, arguments)

    def _replay(self, signature: CallSignature, arguments: Sequence[Any]) -> Sequence[Any]:
        graphs = signature.graphs
        if not signature.trained:
            return graphs.outputs.assemble(graphs.forward(arguments), arguments)
        trained = [arguments[index] for index in signature.trained]
        tensors = Replay.apply(signature, self.function, arguments, *trained)
        return graphs.outputs.assemble(tensors, arguments)

    def _have_moved(self, graphs: GraphRecording, arguments: Sequence[Any]) -> bool:
        """Return True if static inputs have new addresses, and report it."""
        if graphs.inputs.keep_addresses(arguments):
            return False
        self.function.note(
            "a graph of a divided model runs without CUDA graphs, because its parameters have moved "
            "since the recording: change them in place, as copy_() and load_state_dict() do"
        )
        return True

    def _signature(self, arguments: Sequence[Any]) -> CallSignature:
        values = tuple(
            (a.data_ptr() if is_static and not self.is_divided else None, a.requires_grad)
            if isinstance(a, Tensor)
            else a
            for a, is_static in zip(arguments, self.function.static_inputs, strict=True)
        )
        key = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), stream_now(), values
        signature = self.signatures.pop(key, None)
        if signature is None:
            signature = CallSignature(trained_among(arguments))
            while len(self.signatures) >= MAX_SIGNATURES:
                del self.signatures[next(iter(self.signatures))]
        self.signatures[key] = signature  # the last is the most recent; the first is dropped first
        return signature

    def forget_moved(self) -> None:
        """Drop recordings whose parameters are gone or have new addresses."""
        for key, signature in list(self.signatures.items()):
            if signature.graphs is not None and signature.graphs.inputs.have_moved():
                self.signatures.pop(key, None)

    def _record(self, signature: CallSignature, arguments: Sequence[Any]) -> str | None:
        """Record a call. Return why such calls cannot be replayed, or None."""
        with _LISTING:
            everyone = list(_ALL)
        for each in everyone:  # if parameters moved, this graph may replace an older one
            each.forget_moved()
        signature.graphs = None  # frees the memory of an older recording
        make = partial(GraphRecording, self.function, signature)
        recording = record_call(self.function, signature, arguments, make)
        if isinstance(recording, str):
            return recording
        signature.graphs = recording
        return None

    def _refused(self, signature: CallSignature, why: str, arguments: Sequence[Any]) -> Sequence[Any]:
        """Run the function, now and for all later calls with this signature.

        If the call raises, for example because its inputs do not fit, the next call is recorded. On several
        ranks, it is not, because a single rank may raise.
        """
        signature.refused = self.is_divided
        outputs = self.function.run(*arguments)
        signature.refused = True
        log.warning("a graph runs without CUDA graphs: %s", why)
        self.function.note(f"a graph runs without CUDA graphs: {why}")
        return outputs


_ALL: weakref.WeakSet[Replayed] = weakref.WeakSet()


def _is_recorded_by_others() -> bool:
    """Return True if the call belongs to an outer CUDA graph or a checkpoint."""
    return recorded() or saving_hooks() is not None or in_backward()


class GraphRecording:
    """The recording of one call, which computes other calls with the same signature.

    Args:
        function: the recorded function.
        signature: of the call.
        arguments: of the call. Arguments that are not static are copies, to which later calls copy theirs.
        outputs: of the function for these arguments.
    """

    def __init__(
        self, function: Function, signature: CallSignature, arguments: Sequence[Any], outputs: Sequence[Any]
    ):
        self.writes = function.writes
        self.inputs = RecordedInputs.of(arguments, function.static_inputs, function.changes)
        self.outputs = RecordedOutputs.of(outputs, arguments, signature.wanted, bool(signature.trained))
        # the number of leading arguments that a replay needs; the recorded kernels read the others in place
        self.needs = 1 + max([*self.inputs.copies, *self.writes, *self.outputs.given.values()], default=-1)
        returned = [outputs[index] for index in self.outputs.tensors]
        self.seeds = [torch.zeros_like(returned[number]) for number in self.outputs.wanted]
        self.watched: list[int] = []  # the indices of static arguments that the backward reads
        self.graphs = self._recorded(function, signature, arguments, returned[0].device)
        self.gradients = GradientMemory(self.graphs.gradients, signature.copies_gradients)

    def _recorded(
        self, function: Function, signature: CallSignature, arguments: Sequence[Any], device: torch.device
    ) -> CudaGraphPair:
        """Record the function's forward and its backward."""
        trained: list[Tensor] = []

        def forward() -> list[Tensor]:
            outputs, trained[:] = call_on_views(function.run, arguments, signature.trained)
            return [outputs[index] for index in self.outputs.tensors]

        def backward(outputs: list[Tensor]) -> list[Tensor | None]:
            used = [outputs[number] for number in self.outputs.wanted]
            return list(gradients_of(used, trained, self.seeds))

        with casting_anew():
            return CudaGraphPair(forward, backward if signature.trained else None, device)

    def watch(self, saved: Sequence[Tensor]) -> None:
        """Note the static arguments that share memory with the tensors that autograd saved."""
        self.watched = self.inputs.static_within(saved)

    def forward(self, arguments: Sequence[Any]) -> list[Tensor]:
        """Return the new tensors among the outputs of a call."""
        with torch.no_grad():
            self.inputs.copy_from(arguments)
            self.graphs.first.replay()
            for index in self.writes:
                if not arguments[index].is_inference():
                    increment_version(arguments[index])
            return [output.clone() for output in self.graphs.outputs]

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the last forward, given the gradients of its new tensors."""
        with torch.no_grad():
            for number, seed in zip(self.outputs.wanted, self.seeds, strict=True):
                seed.copy_(grads[number])
            self.graphs.second.replay()
            return self.gradients.take()


class Forward:
    """A token for a forward. It is alive as long as the backward may still run."""


class Replay(torch.autograd.Function):
    """A replayed call. Its backward replays the recorded one, or reruns the function if a replay is wrong.

    A rerun serves a second backward, a differentiated backward, and outputs without recorded gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, signature: CallSignature, function: Function, arguments: Sequence[Any], *trained: Tensor
    ) -> tuple[Tensor, ...]:
        graphs = signature.graphs
        ctx.set_materialize_grads(False)
        ctx.signature, ctx.graphs, ctx.function, ctx.forward = signature, graphs, function, Forward()
        ctx.start = CallStart(arguments, signature.trained, function.writes, graphs.inputs.unchanged)
        signature.waiting = weakref.ref(ctx.forward)
        outputs = graphs.forward(arguments)
        ctx.watched = noted_tensors([arguments[index] for index in graphs.watched])
        # autograd frees a saved tensor after the last backward
        ctx.save_for_backward(torch.empty(0, dtype=torch.float32, device="cpu"))
        ctx.mark_non_differentiable(*(outputs[number] for number in graphs.outputs.without))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        signature, graphs, _ = ctx.signature, ctx.graphs, ctx.saved_tensors
        given = {number: grad for number, grad in enumerate(grads) if grad is not None}
        if not given:
            return None, None, None, *(None for _ in signature.trained)
        is_last = signature.waiting is not None and signature.waiting() is ctx.forward
        is_wanted, tensors = [*given] == graphs.outputs.wanted, graphs.outputs.tensors
        if not is_wanted:
            # zeros for the other outputs would be wrong: parameters without a gradient would get zeros
            signature.record_for({tensors[number] for number in given}, ctx.function.note)
        if not (is_wanted and is_last) or torch.is_grad_enabled() or batches_gradients():
            seeds = {tensors[number]: grad for number, grad in given.items()}
            return None, None, None, *ctx.start.gradients(ctx.function.run, seeds)
        check_unchanged(ctx.watched)
        gradients = graphs.backward(grads)
        signature.waiting = None  # another forward may now overwrite the memory of this one
        return None, None, None, *gradients
