"""Calls of a captured graph as CUDA graphs: forward and backward are recorded once, and replayed.

The CPU then launches two graphs instead of hundreds of kernels. PyTorch's own ways, the trees of
torch.compile and torch.cuda.make_graphed_callables, hand out the memory that the next replay writes to: a
gradient that was kept, or that autograd accumulates into, changes silently or may not be read any more. Here
outputs are copies, gradients are nobody's any more when they are overwritten, and what a replay cannot do,
the function itself does.
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
from te_transform.execution.console import in_a_line, status
from te_transform.execution.cuda_graph_pair import noting_waits, stream_now
from te_transform.execution.distances import distance
from te_transform.execution.graph_recording import CallSignature, Function, GraphRecording
from te_transform.execution.rerun import as_it_was, call_on_views, copied, gradients_of, trained_among

log = logging.getLogger(__name__)

WARM_UPS = 2  # calls of a kind that run as they are: kernels are loaded, plans made, gradients looked at
MOST = 8  # kinds that are kept, each of which holds all memory of a step
# What a replay may differ by from the function itself, relative to the norm: some kernels add up in any order
DIFFERENT = 0.02
# Calls of the function itself, at most, where a replay differs by more, to see how far rounding takes that.
# Few do not show it: a key's bias has a gradient of rounding alone, which is 10% off where cuDNN's attention
# adds up in one order and not in another, and some of these orders are seldom.
REPEATS = 16

_RECORDING = threading.RLock()  # PyTorch records in one stream that all threads share
_LISTING = threading.Lock()  # of what there is in `_ALL`, which other threads add to


class Replayed:
    """A function of tensors, whose calls are replayed from the third of a kind on."""

    def __init__(self, function: Function):
        self.function, self.is_divided = function, function.ranks is not None
        self.kinds: dict[tuple, CallSignature] = {}
        self.lock = threading.RLock()
        with _LISTING:
            _ALL.add(self)

    def __call__(self, *arguments: Any) -> Sequence[Any]:
        if _is_recorded_by_others():
            return self.function.run(*arguments)
        with self.lock:
            kind = self.kind_of(arguments)
            if kind.refused or kind.is_waiting():
                return self.function.run(*arguments)
            if kind.calls < WARM_UPS or not kind.knows_gradients():
                return kind.warmed_up(self.function.run, arguments)
            if kind.graphs is not None and not kind.graphs.frees_gradients(arguments):
                if self.is_divided:  # on the other ranks nobody may hold them
                    return self.function.run(*arguments)
                kind.copies_gradients, kind.graphs = True, None  # whoever holds them keeps the memory
            if kind.graphs is None and (why := self._record(kind, arguments)) is not None:
                return self._refused(kind, why, arguments)
            if self.is_divided and not self._lies(kind.graphs, arguments):
                return self.function.run(*arguments)
            return kind.replayed(self.function, arguments)

    def _lies(self, graphs: GraphRecording, arguments: Sequence[Any]) -> bool:
        """Whether what stays lies where it was recorded."""
        lies = all(arguments[place].data_ptr() == at for place, at in graphs.staying.items())
        if not lies:
            self.function.note(
                "a graph of a divided model runs without CUDA graphs, its parameters lie elsewhere than when "
                "it was recorded: change what they hold in place, as copy_() and load_state_dict() do"
            )
        return lies

    def again(self, kind: CallSignature) -> Callable[..., Sequence[Any]] | None:
        """What replays calls without gradients of this kind, by whoever's arguments; None where nothing
        does."""
        with self.lock:
            graphs = kind.graphs
            if graphs is None or kind not in self.kinds.values() or _is_recorded_by_others():
                return None

        def replay(*arguments: Any) -> Sequence[Any]:
            with self.lock:
                return graphs.returned(graphs.forward(arguments), arguments)

        return replay

    def kind_of(self, arguments: Sequence[Any]) -> CallSignature:
        """Calls that differ in nothing but the values of their tensors."""
        told = tuple(
            (a.data_ptr() if static_inputs and not self.is_divided else None, a.requires_grad)
            if isinstance(a, Tensor)
            else a
            for a, static_inputs in zip(arguments, self.function.static_inputs, strict=True)
        )
        key = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), stream_now(), told
        kind = self.kinds.pop(key, None)
        if kind is None:
            kind = CallSignature(trained_among(arguments))
            while len(self.kinds) >= MOST:
                del self.kinds[next(iter(self.kinds))]
        self.kinds[key] = kind  # as the last, the one to let go of is that of the longest ago
        return kind

    def forget_moved(self) -> None:
        """Let go of what was recorded for parameters that are gone, or lie elsewhere now."""
        for key, kind in list(self.kinds.items()):
            if kind.graphs is not None and kind.graphs.has_moved():
                self.kinds.pop(key, None)

    def _record(self, kind: CallSignature, arguments: Sequence[Any]) -> str | None:
        """Record a call and hold it to the function; why such calls cannot be replayed."""
        with _LISTING:
            everyone = list(_ALL)
        for each in everyone:  # another graph's, if the change that moved parameters made this one
            each.forget_moved()
        why = _unfit(arguments)
        if not kind.writes <= {*self.function.changes}:
            why = "it writes to tensors that its operations do not name"
        why = self.function.agreed(why)
        if why is None:
            try:
                with status("recording CUDA graphs"), _RECORDING:
                    kind.graphs, why = _recorded(self.function, kind, arguments)
            except Exception as error:
                why = _why(error)
        if why is not None:
            kind.graphs = None
        return why

    def _refused(self, kind: CallSignature, why: str, arguments: Sequence[Any]) -> Sequence[Any]:
        """The call as it is, and so are all of its kind from now on; where it raises, as it does for inputs
        that do not fit, the next one is recorded. (On several ranks it might raise on one alone.)"""
        kind.refused = self.is_divided
        outputs = self.function.run(*arguments)
        kind.refused = True
        log.warning("a graph runs without CUDA graphs, %s", why)
        self.function.note(f"a graph runs without CUDA graphs, {why}")
        return outputs


_ALL: weakref.WeakSet[Replayed] = weakref.WeakSet()


def _why(error: Exception) -> str:
    log.debug("where that came from", exc_info=error)
    return in_a_line(error)


def _is_recorded_by_others() -> bool:
    """Whether the call is a part of what somebody else records or repeats: a CUDA graph, a checkpoint."""
    return recorded() or saving_hooks() or in_backward()


def _unfit(arguments: Sequence[Any]) -> str | None:
    """Why a call with such arguments cannot be recorded, or None."""
    devices = set()
    for argument in arguments:
        if isinstance(argument, torch.Generator):
            return "it is given a random generator"
        if isinstance(argument, Tensor):
            if type(argument) not in (Tensor, torch.nn.Parameter):
                return f"it reads a {type(argument).__name__}"
            if not on_kernels_device(argument):
                return f"it reads a tensor on {argument.device.type}"
            devices.add(argument.device)
    return None if len(devices) == 1 else f"it reads tensors on {len(devices)} GPUs"


def _recorded(
    function: Function, kind: CallSignature, arguments: Sequence[Any]
) -> tuple[GraphRecording | None, str | None]:
    """What was recorded of a call, held to what the function itself computes; or why there is nothing."""
    held = [
        argument if static_inputs or not isinstance(argument, Tensor) else copied(argument)
        for argument, static_inputs in zip(arguments, function.static_inputs, strict=True)
    ]
    saved: list[Tensor] = []
    with as_it_was(held, function.changes), noting_waits() as waits:
        with saved_tensors_hooks(partial(_noted_in, saved), lambda tensor: tensor):
            outputs, trained = call_on_views(function.run, held, kind.trained)
        if (why := _unfit_outputs(outputs, held)) is not None:  # which is so on each rank
            return None, why
        seeds = {place: torch.randn_like(outputs[place]) for place in sorted(kind.wanted)}
        expected = _with_gradients(outputs, trained, seeds)
    recorded = None
    if waits:
        why = f"it waits for the GPU: {waits[0]}"
    else:
        try:
            with as_it_was(held, function.changes):
                recorded = GraphRecording(function, kind, held, outputs)
                if function.ranks is not None:
                    function.ranks.freed_before_end(recorded.graphs)
        except Exception as error:
            why = _why(error)
    if (why := function.agreed(why)) is not None or recorded is None:
        return None, why
    recorded.watch(saved)
    del outputs, trained, saved
    with as_it_was(held, function.changes):
        recorded.frees_gradients(())
        found = recorded.returned(recorded.forward(arguments), held)
        if kind.trained:
            found += recorded.backward([seeds.get(place) for place in recorded.tensors])
        off = [*map(distance, found, expected)]
        del found
    why = _beyond_rounding(function, kind, held, seeds, expected, off)
    return (recorded if why is None else None), why


def _beyond_rounding(
    function: Function,
    kind: CallSignature,
    held: list[Any],
    seeds: Mapping[int, Tensor],
    expected: Sequence[Any],
    off: Sequence[float],
) -> str | None:
    """What of a recording is further off from what the function computed than rounding takes it, or None.

    In FP8 rounding goes far, and kernels that add up in any order round differently in each call: thousands
    of numbers in bf16 that are added to one row, as an embedding's gradients are, by several percent.
    """
    allowed = [DIFFERENT] * len(off)
    for _ in range(REPEATS):
        if function.agreed(_too_far(off, allowed)) is None:
            return None
        again = [2 * each for each in _distances(function, kind, held, seeds, expected)]
        allowed = [*map(max, allowed, again)]
    return function.agreed(_too_far(off, allowed))


def _too_far(off: Sequence[float], allowed: Sequence[float]) -> str | None:
    """The result that is furthest from what is allowed, if it is further off, or None."""
    each, most = max(zip(off, allowed, strict=True), key=lambda pair: pair[0] / pair[1])
    if each <= most:
        return None
    return f"what was recorded computes other numbers, off by {each:.2g} where rounding is {most:.2g}"


def _distances(
    function: Function,
    kind: CallSignature,
    held: list[Any],
    seeds: Mapping[int, Tensor],
    expected: Sequence[Any],
) -> list[float]:
    """How far the function itself is from what it computed, called again with gradients rounded otherwise."""
    with as_it_was(held, function.changes):
        outputs, trained = call_on_views(function.run, held, kind.trained)
        rounded = {place: _rounded_otherwise(seed) for place, seed in seeds.items()}
        return [*map(distance, _with_gradients(outputs, trained, rounded), expected)]


def _rounded_otherwise(seed: Tensor) -> Tensor:
    """The same numbers, off by what bf16 may round by."""
    return seed * (1 + 2**-8 * (2 * torch.rand_like(seed) - 1))


def _noted_in(saved: list[Tensor], tensor: Tensor) -> Tensor:
    saved.append(tensor.detach())
    return tensor


def _with_gradients(
    outputs: Sequence[Any], trained: Sequence[Tensor], seeds: Mapping[int, Tensor]
) -> list[Any]:
    """The outputs, and the gradients that lead from those of some outputs to the arguments."""
    found = [output.detach() if isinstance(output, Tensor) else output for output in outputs]
    if not trained:
        return found
    used, given = [outputs[place] for place in seeds], [*seeds.values()]
    return [*found, *gradients_of(used, trained, given)]


def _unfit_outputs(outputs: Sequence[Any], arguments: Sequence[Any]) -> str | None:
    """Why these outputs cannot be handed out as copies, or None."""
    given = {a.untyped_storage()._cdata for a in arguments if isinstance(a, Tensor)}
    themselves = set(map(id, arguments))
    tensors = [out for out in outputs if isinstance(out, Tensor) and id(out) not in themselves]
    if any(tensor.untyped_storage()._cdata in given for tensor in tensors):
        return "it returns memory of an argument"
    if any(not on_kernels_device(tensor) for tensor in tensors) or not tensors:
        return "it returns no tensor on the GPU, or others too"
    return None
