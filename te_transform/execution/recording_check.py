"""Record a call, and compare the recording with the function."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from te_transform.backends.limits import on_kernels_device
from te_transform.execution.call_signature import CallSignature, Function
from te_transform.execution.console import status
from te_transform.execution.cuda_graph_pair import noting_waits
from te_transform.execution.distances import distance
from te_transform.execution.rerun import as_it_was, call_on_views, copy_of, gradients_of
from te_transform.graph.errors import in_a_line

log = logging.getLogger(__name__)

# The maximum relative difference of a replay from the function. Some kernels add in any order.
DIFFERENT = 0.02
# The maximum number of reruns of the function, which measure its rounding if a replay differs by more. A few
# reruns are not enough: the gradient of a key's bias consists of rounding only. It is 10% off for some of
# cuDNN's summation orders, and some orders are rare.
REPEATS = 16

_RECORDING = threading.RLock()  # all threads share PyTorch's capture stream


MakeRecording = Callable[[Sequence[Any], Sequence[Any]], Any]  # from the arguments and outputs of a call


def record_call(
    function: Function, signature: CallSignature, arguments: Sequence[Any], make: MakeRecording
) -> Any:
    """Record a call by `make` and compare the recording with the function.

    Returns:
        The recording, or a sentence that says why such calls cannot be replayed.
    """
    why = _why_not_recorded(arguments)
    if not signature.writes <= {*function.changes}:
        why = "it writes to tensors that its operations do not name"
    if (why := function.agreed(why)) is not None:
        return why
    try:
        with status("recording CUDA graphs"), _RECORDING:
            return _record_and_compare(function, signature, arguments, make)
    except Exception as error:
        return _why(error)


def _why(error: Exception) -> str:
    """Return an error in one line."""
    log.debug("the traceback of this error", exc_info=error)
    return in_a_line(error)


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


@dataclass
class _Results:
    """The results of a function for one call."""

    function: Function
    trained: Sequence[int]  # the indices of the arguments that need a gradient
    arguments: Sequence[Any]  # the arguments; those that are not static are copies
    seeds: Mapping[int, Tensor]  # the gradients of outputs, by the indices of the outputs
    expected: Sequence[Any]  # the outputs and the gradients of the trained arguments

    def distances(self, compute: Callable[[], Sequence[Any]]) -> list[float]:
        """Return how far the results that a function computes are from these."""
        with as_it_was(self.arguments, self.function.changes):
            return [*map(distance, compute(), self.expected)]

    def replay(self, recorded: Any, arguments: Sequence[Any]) -> list[Any]:
        """Return the results of a recording."""
        recorded.gradients.is_free(())
        results = recorded.outputs.assemble(recorded.forward(arguments), self.arguments)
        if self.trained:
            results += recorded.backward([self.seeds.get(index) for index in recorded.outputs.tensors])
        return results

    def rerun(self) -> list[Any]:
        """Return the results of another run of the function, with perturbed gradients."""
        outputs, trained = call_on_views(self.function.run, self.arguments, self.trained)
        return _with_gradients(outputs, trained, {i: _rounded_otherwise(s) for i, s in self.seeds.items()})


def _record_and_compare(
    function: Function, signature: CallSignature, arguments: Sequence[Any], make: MakeRecording
) -> Any:
    """Return the recording of a call, or why there is none, or why it is not used."""
    copies = [
        argument if is_static or not isinstance(argument, Tensor) else copy_of(argument)
        for argument, is_static in zip(arguments, function.static_inputs, strict=True)
    ]
    saved: list[Tensor] = []
    with as_it_was(copies, function.changes), noting_waits() as waits:
        with saved_tensors_hooks(
            lambda tensor: saved.append(tensor.detach()) or tensor, lambda tensor: tensor
        ):
            outputs, trained = call_on_views(function.run, copies, signature.trained)
        if (why := _unfit_outputs(outputs, copies)) is not None:  # the same on every rank
            return why
        seeds = {index: torch.randn_like(outputs[index]) for index in sorted(signature.wanted)}
        expected = _with_gradients(outputs, trained, seeds)
    results = _Results(function, signature.trained, copies, seeds, expected)
    recorded = f"it synchronizes with the GPU: {waits[0]}" if waits else None
    recorded = recorded or _recorded(function, copies, outputs, make)
    if (why := function.agreed(recorded if isinstance(recorded, str) else None)) is not None:
        return why
    recorded.watch(saved)
    del outputs, trained  # frees the memory of the backward
    saved.clear()
    off = results.distances(partial(results.replay, recorded, arguments))
    why = _beyond_rounding(results, off)
    return recorded if why is None else why


def _recorded(function: Function, copies: Sequence[Any], outputs: Sequence[Any], make: MakeRecording) -> Any:
    """Return the recording of a call with these arguments and outputs, or why there is none."""
    try:
        with as_it_was(copies, function.changes):
            recorded = make(copies, outputs)
            if function.ranks is not None:
                function.ranks.freed_before_end(recorded.graphs)
            return recorded
    except Exception as error:
        return _why(error)


def _beyond_rounding(results: _Results, off: Sequence[float]) -> str | None:
    """Return a sentence if a result of a recording differs from the function by more than rounding, or None.

    FP8 rounds coarsely, and kernels that add in any order round differently in each call. An embedding's
    gradients add thousands of bf16 numbers to one row and differ by several percent.

    Args:
        results: of the function.
        off: the distances of the recording's results.
    """
    agreed, allowed = results.function.agreed, [DIFFERENT] * len(off)
    for _ in range(REPEATS):
        if agreed(_too_far(off, allowed)) is None:
            return None
        allowed = [*map(max, allowed, [2 * each for each in results.distances(results.rerun)])]
    return agreed(_too_far(off, allowed))


def _too_far(off: Sequence[float], allowed: Sequence[float]) -> str | None:
    """Return a sentence about the result with the largest excess over its allowed distance, or None."""
    each, most = max(zip(off, allowed, strict=True), key=lambda pair: pair[0] / pair[1])
    if each <= most:
        return None
    return f"the recording computes other numbers, off by {each:.2g} where rounding is {most:.2g}"


def _rounded_otherwise(seed: Tensor) -> Tensor:
    """Perturb each number by the rounding error of bf16."""
    return seed * (1 + 2**-8 * (2 * torch.rand_like(seed) - 1))


def _with_gradients(
    outputs: Sequence[Any], trained: Sequence[Tensor], seeds: Mapping[int, Tensor]
) -> list[Any]:
    """Return the outputs and the gradients of the trained arguments for these output gradients."""
    values = [output.detach() if isinstance(output, Tensor) else output for output in outputs]
    if not trained:
        return values
    used, given = [outputs[index] for index in seeds], [*seeds.values()]
    return [*values, *gradients_of(used, trained, given)]


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
