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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from te_transform.backends.limits import on_kernels_device
from te_transform.backends.tracing import in_backward, recorded, saving_hooks
from te_transform.execution.console import status
from te_transform.execution.cuda_graph_pair import noting_waits, stream_now
from te_transform.execution.distances import distance
from te_transform.execution.graph_recording import CallSignature, Function, GraphRecording
from te_transform.execution.rerun import as_it_was, call_on_views, copy_of, gradients_of, trained_among
from te_transform.graph.errors import in_a_line

log = logging.getLogger(__name__)

WARM_UPS = 2  # calls before a recording: they load kernels, make plans and show which outputs get gradients
MAX_SIGNATURES = 8  # the maximum number of recordings: each holds the memory of a whole step
# The maximum relative difference of a replay from the function. Some kernels add in any order.
DIFFERENT = 0.02
# The maximum number of reruns of the function, which measure its rounding if a replay differs by more. A few
# reruns are not enough: the gradient of a key's bias consists of rounding only. It is 10% off for some of
# cuDNN's summation orders, and some orders are rare.
REPEATS = 16

_RECORDING = threading.RLock()  # all threads share PyTorch's capture stream
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
            return signature.replayed(self.function, arguments)

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
        """Record a call and compare the recording with the function.

        Returns:
            Why such calls cannot be replayed, or None.
        """
        with _LISTING:
            everyone = list(_ALL)
        for each in everyone:  # if parameters moved, this graph may replace an older one
            each.forget_moved()
        why = _why_not_recorded(arguments)
        if not signature.writes <= {*self.function.changes}:
            why = "it writes to tensors that its operations do not name"
        why = self.function.agreed(why)
        if why is None:
            try:
                with status("recording CUDA graphs"), _RECORDING:
                    signature.graphs, why = _record_and_compare(self.function, signature, arguments)
            except Exception as error:
                why = _why(error)
        if why is not None:
            signature.graphs = None
        return why

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


def _why(error: Exception) -> str:
    """Return an error in one line."""
    log.debug("the traceback of this error", exc_info=error)
    return in_a_line(error)


def _is_recorded_by_others() -> bool:
    """Return True if the call belongs to an outer CUDA graph or a checkpoint."""
    return recorded() or saving_hooks() or in_backward()


def _why_not_recorded(arguments: Sequence[Any]) -> str | None:
    """Return why a call with such arguments cannot be recorded, or None."""
    devices = set()
    for argument in arguments:
        if isinstance(argument, torch.Generator):
            return "it has a random generator as an argument"
        if isinstance(argument, Tensor):
            if type(argument) not in (Tensor, torch.nn.Parameter):
                return f"it reads a {type(argument).__name__}"
            if not on_kernels_device(argument):
                return f"it reads a tensor on {argument.device.type}"
            devices.add(argument.device)
    return None if len(devices) == 1 else f"it reads tensors on {len(devices)} GPUs"


def _record_and_compare(
    function: Function, signature: CallSignature, arguments: Sequence[Any]
) -> tuple[GraphRecording | None, str | None]:
    """Record a call and compare it with the function. Returns the recording, or why there is none."""
    held = [
        argument if static_inputs or not isinstance(argument, Tensor) else copy_of(argument)
        for argument, static_inputs in zip(arguments, function.static_inputs, strict=True)
    ]
    saved: list[Tensor] = []
    with as_it_was(held, function.changes), noting_waits() as waits:
        with saved_tensors_hooks(partial(_noted_in, saved), lambda tensor: tensor):
            outputs, trained = call_on_views(function.run, held, signature.trained)
        if (why := _unfit_outputs(outputs, held)) is not None:  # the same on every rank
            return None, why
        seeds = {index: torch.randn_like(outputs[index]) for index in sorted(signature.wanted)}
        expected = _with_gradients(outputs, trained, seeds)
    recorded = None
    if waits:
        why = f"it synchronizes with the GPU: {waits[0]}"
    else:
        try:
            with as_it_was(held, function.changes):
                recorded = GraphRecording(function, signature, held, outputs)
                if function.ranks is not None:
                    function.ranks.freed_before_end(recorded.graphs)
        except Exception as error:
            why = _why(error)
    if (why := function.agreed(why)) is not None or recorded is None:
        return None, why
    recorded.watch(saved)
    del outputs, trained, saved
    with as_it_was(held, function.changes):
        recorded.gradients.is_free(())
        found = recorded.outputs.assemble(recorded.forward(arguments), held)
        if signature.trained:
            found += recorded.backward([seeds.get(index) for index in recorded.outputs.tensors])
        off = [*map(distance, found, expected)]
        del found
    rerun = partial(_distances, function, signature, held, seeds, expected)
    why = _beyond_rounding(function, rerun, off)
    return (recorded if why is None else None), why


def _beyond_rounding(
    function: Function, rerun: Callable[[], list[float]], off: Sequence[float]
) -> str | None:
    """Return a sentence if a result of a recording differs from the function by more than rounding, or None.

    FP8 rounds coarsely, and kernels that add in any order round differently in each call. An embedding's
    gradients add thousands of bf16 numbers to one row and differ by several percent.
    """
    allowed = [DIFFERENT] * len(off)
    for _ in range(REPEATS):
        if function.agreed(_too_far(off, allowed)) is None:
            return None
        allowed = [*map(max, allowed, [2 * each for each in rerun()])]
    return function.agreed(_too_far(off, allowed))


def _too_far(off: Sequence[float], allowed: Sequence[float]) -> str | None:
    """Return a sentence about the result with the largest excess over its allowed distance, or None."""
    each, most = max(zip(off, allowed, strict=True), key=lambda pair: pair[0] / pair[1])
    if each <= most:
        return None
    return f"the recording computes other numbers, off by {each:.2g} where rounding is {most:.2g}"


def _distances(
    function: Function,
    signature: CallSignature,
    held: list[Any],
    seeds: Mapping[int, Tensor],
    expected: Sequence[Any],
) -> list[float]:
    """Return how far a rerun of the function with perturbed gradients is from its first results."""
    with as_it_was(held, function.changes):
        outputs, trained = call_on_views(function.run, held, signature.trained)
        rounded = {index: _rounded_otherwise(seed) for index, seed in seeds.items()}
        return [*map(distance, _with_gradients(outputs, trained, rounded), expected)]


def _rounded_otherwise(seed: Tensor) -> Tensor:
    """Perturb each number by the rounding error of bf16."""
    return seed * (1 + 2**-8 * (2 * torch.rand_like(seed) - 1))


def _noted_in(saved: list[Tensor], tensor: Tensor) -> Tensor:
    """Note a tensor that autograd saves."""
    saved.append(tensor.detach())
    return tensor


def _with_gradients(
    outputs: Sequence[Any], trained: Sequence[Tensor], seeds: Mapping[int, Tensor]
) -> list[Any]:
    """Return the outputs and the gradients of the trained arguments for these output gradients."""
    found = [output.detach() if isinstance(output, Tensor) else output for output in outputs]
    if not trained:
        return found
    used, given = [outputs[index] for index in seeds], [*seeds.values()]
    return [*found, *gradients_of(used, trained, given)]


def _unfit_outputs(outputs: Sequence[Any], arguments: Sequence[Any]) -> str | None:
    """Return why these outputs cannot be returned as copies, or None."""
    given = {a.untyped_storage()._cdata for a in arguments if isinstance(a, Tensor)}
    themselves = set(map(id, arguments))
    tensors = [out for out in outputs if isinstance(out, Tensor) and id(out) not in themselves]
    if any(tensor.untyped_storage()._cdata in given for tensor in tensors):
        return "it returns memory of an argument"
    if any(not on_kernels_device(tensor) for tensor in tensors) or not tensors:
        return "it returns no tensor on the GPU, or also tensors on another device"
    return None
