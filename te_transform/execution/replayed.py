"""CUDA graphs of a captured graph, which record its forward and backward once and replay them.

The CPU then launches two graphs instead of hundreds of kernels. The CUDA graph trees of torch.compile and
torch.cuda.make_graphed_callables return memory that the next replay overwrites, so a kept or accumulated
gradient changes silently or raises. Here, outputs are copies, a gradient is overwritten only if it has no
holder, and the function itself runs if a replay would be wrong.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from te_transform.backends.joined import check_unwritten, versions_of
from te_transform.backends.tracing import batches_gradients, in_backward, recorded, saving_hooks
from te_transform.execution.call_signature import CallSignature, Function
from te_transform.execution.cuda_graph_pair import CudaGraphPair, casting_anew, stream_now
from te_transform.execution.gradient_memory import GradientMemory
from te_transform.execution.recorded_values import RecordedInputs, RecordedOutputs
from te_transform.execution.recording_check import record_call
from te_transform.execution.rerun import (
    as_it_was,
    autocast_now,
    call_on_views,
    gradients_of,
    random_state,
    set_random_state,
    trained_among,
)
from te_transform.execution.writes import Writes

log = logging.getLogger(__name__)

WARM_UPS = 2  # calls before a recording: they load kernels, make plans and show which outputs get gradients
MAX_SIGNATURES = 8  # the maximum number of recordings: each holds the memory of a whole step
_LISTING = threading.Lock()  # guards iteration over `_ALL`


class Replayed:
    """A function of tensors that is replayed from the third call with the same signature."""

    def __init__(self, function: Function):
        self.function, self.is_divided = function, function.ranks is not None
        self.signatures: dict[tuple, CallSignature] = {}
        self.lock = threading.RLock()
        with _LISTING:
            _ALL.add(self)

    def __call__(self, *arguments: Any) -> Sequence[Any]:
        if _is_recorded_by_others():
            return self.function.run(*arguments)
        with self.lock:
            signature = self.signature_of(arguments)
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
            if self.is_divided and not self._lies(signature.graphs, arguments):
                return self.function.run(*arguments)
            return self._replay(signature, arguments)

    def _replay(self, signature: CallSignature, arguments: Sequence[Any]) -> Sequence[Any]:
        graphs = signature.graphs
        if not signature.trained:
            return graphs.outputs.assemble(graphs.forward(arguments), arguments)
        trained = [arguments[index] for index in signature.trained]
        found = Replay.apply(signature, self.function, arguments, *trained)
        return graphs.outputs.assemble(found, arguments)

    def _lies(self, graphs: GraphRecording, arguments: Sequence[Any]) -> bool:
        """Return True if static inputs kept their addresses."""
        lies = graphs.inputs.keep_addresses(arguments)
        if not lies:
            self.function.note(
                "a graph of a divided model runs without CUDA graphs, because its parameters have moved "
                "since the recording: change them in place, as copy_() and load_state_dict() do"
            )
        return lies

    def again(self, signature: CallSignature) -> Callable[..., Sequence[Any]] | None:
        """Return a function that replays calls without gradients, or None without a recording."""
        with self.lock:
            graphs = signature.graphs
            if graphs is None or signature not in self.signatures.values() or _is_recorded_by_others():
                return None

        def replay(*arguments: Any) -> Sequence[Any]:
            with self.lock:
                return graphs.outputs.assemble(graphs.forward(arguments), arguments)

        return replay

    def signature_of(self, arguments: Sequence[Any]) -> CallSignature:
        """Return the signature of a call: its mode and arguments, without the values of tensors."""
        values = tuple(
            (a.data_ptr() if static_inputs and not self.is_divided else None, a.requires_grad)
            if isinstance(a, Tensor)
            else a
            for a, static_inputs in zip(arguments, self.function.static_inputs, strict=True)
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
        found = record_call(self.function, signature, arguments, make)
        if isinstance(found, str):
            return found
        signature.graphs = found
        return None

    def _refused(self, signature: CallSignature, why: str, arguments: Sequence[Any]) -> Sequence[Any]:
        """Run the function, now and for all later calls with this signature.

        If the call raises, for example because its inputs do not fit, the next call is recorded. On several
        ranks, it is not, because a single rank may raise.
        """
        signature.refused = self.is_divided
        outputs = self.function.run(*arguments)
        signature.refused = True
        log.warning("a graph runs without CUDA graphs, %s", why)
        self.function.note(f"a graph runs without CUDA graphs, {why}")
        return outputs


_ALL: weakref.WeakSet[Replayed] = weakref.WeakSet()


def _is_recorded_by_others() -> bool:
    """Return True if the call belongs to an outer CUDA graph or a checkpoint."""
    return recorded() or saving_hooks() or in_backward()


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
            found, trained[:] = call_on_views(function.run, arguments, signature.trained)
            return [found[index] for index in self.outputs.tensors]

        def backward(found: list[Tensor]) -> list[Tensor | None]:
            used = [found[number] for number in self.outputs.wanted]
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
    @staticmethod
    def forward(
        ctx: Any, signature: CallSignature, function: Function, arguments: Sequence[Any], *trained: Tensor
    ) -> tuple[Tensor, ...]:
        graphs = signature.graphs
        ctx.set_materialize_grads(False)
        ctx.signature, ctx.graphs, ctx.arguments = signature, graphs, arguments
        ctx.function, ctx.before = function, Writes()
        ctx.before.note([arguments[index] for index in function.writes])
        ctx.forward = Forward()
        signature.waiting = weakref.ref(ctx.forward)
        ctx.random, ctx.autocast = random_state(trained[0].device), autocast_now(trained[0].device.type)
        ctx.read = _noted([arguments[index] for index in graphs.inputs.unchanged])
        outputs = graphs.forward(arguments)
        ctx.watched = _noted([arguments[index] for index in graphs.watched])
        # autograd frees a saved tensor after the last backward
        ctx.save_for_backward(torch.empty(0, dtype=torch.float32, device="cpu"))
        ctx.mark_non_differentiable(*(outputs[number] for number in graphs.outputs.without))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        signature, graphs, _ = ctx.signature, ctx.graphs, ctx.saved_tensors
        given = [number for number, grad in enumerate(grads) if grad is not None]
        if not given:
            return None, None, None, *(None for _ in signature.trained)
        is_last = signature.waiting is not None and signature.waiting() is ctx.forward
        if given != graphs.outputs.wanted:
            # zeros for the other outputs would be wrong: parameters without a gradient would get zeros
            signature.record_for({graphs.outputs.tensors[number] for number in given}, ctx.function.note)
        if given != graphs.outputs.wanted or not is_last or torch.is_grad_enabled() or batches_gradients():
            return None, None, None, *_computed_again(ctx, grads)
        _check_unchanged(ctx.watched)
        found = graphs.backward(grads)
        signature.waiting = None  # another forward may now overwrite the memory of this one
        return None, None, None, *found


def _noted(tensors: Sequence[Tensor]) -> list[tuple[Tensor, int, int]]:
    """Note version and address of tensors, to detect writes and moves before the backward."""
    return [(tensor, version, tensor.data_ptr()) for tensor, version in versions_of(tensors)]


def _check_unchanged(noted: Sequence[tuple[Tensor, int, int]]) -> None:
    check_unwritten([(tensor, version) for tensor, version, _ in noted])
    for tensor, _, address in noted:
        if tensor.data_ptr() != address:
            raise RuntimeError(
                f"expected a tensor of shape {list(tensor.shape)} at the address of the forward, got a new "
                "one before the backward of a CUDA graph; assign to .data after the backward, or convert "
                "with graphs=False"
            )


def _computed_again(ctx: Any, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Compute gradients of a replayed call by a rerun of the function, with its autocast and random state.

    Reruns serve a second backward, a differentiated backward, and outputs without recorded gradients.
    """
    _check_unchanged(ctx.read)
    is_recorded, writes = torch.is_grad_enabled(), ctx.function.writes
    with as_it_was(ctx.arguments, writes), torch.enable_grad():
        set_random_state(ctx.arguments[ctx.signature.trained[0]].device, ctx.random)
        ctx.before.undo()
        with torch.autocast(**ctx.autocast):
            outputs, trained = call_on_views(ctx.function.run, ctx.arguments, ctx.signature.trained)
        pairs = [
            (outputs[index], grad)
            for index, grad in zip(ctx.graphs.outputs.tensors, grads, strict=True)
            if grad is not None
        ]
        used, given = zip(*pairs, strict=True)
        return gradients_of(used, trained, given, create_graph=is_recorded)
