"""Choose the faster of captured graphs and the user's own code for calls that fusion does not speed up.

If every operation runs as captured, both compute the same. Captured graphs skip the Python code of modules,
but run dynamo's guards. If the CPU is the bottleneck, a call of 12 layers takes 0.9 to 1.2 times as long as
the user's own code (H100, docs/benchmarks.md). The first calls with the same shapes and mode are therefore
timed, alternately with graphs and with the user's own code. Later calls run the faster code.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from te_transform.backends.fp8.gradient_sums import accumulating
from te_transform.backends.limits import Switch, ignore_size_limits, whole_logits
from te_transform.execution.call_context import ModuleCall
from te_transform.execution.captured_graph import CapturedGraph

IN_A_ROW = 5  # consecutive timed calls; the first is dropped (cold caches)
ROUNDS = 4  # alternating runs of such calls; the fastest call counts, because delays have other causes
CALLS_UNTIL_NEXT = 1000  # calls until the next trial: dtypes, trained parameters and the load may change
MAX_TRIALS = 64  # the maximum number of trials

graphs_only = Switch()
"""Calls run captured graphs where the user's own code may be faster, too: a profile labels graphs."""

OWN_IS_FASTER = "fusion does not speed up the call, and the user's own code is faster than captured graphs"


@dataclass
class Trial:
    """The timed calls with the same shapes and mode.

    Attributes:
        device: of the model.
        calls: True for the user's own code, False for captured graphs, with start and end.
    """

    device: torch.device
    calls: list[tuple[bool, Any, Any]] = field(default_factory=list)
    own: bool = False  # True if the next call runs the user's own code
    left: int = 0  # calls until the next trial

    def note(self, own: bool, began: Any, ended: Any) -> None:
        """Add a timed call and choose the code of the next call."""
        self.calls.append((own, began, ended))
        self.own = bool(len(self.calls) // IN_A_ROW % 2)
        if len(self.calls) >= IN_A_ROW * ROUNDS:
            counted = [call for number, call in enumerate(self.calls) if number % IN_A_ROW]
            taken = {True: [math.inf], False: [math.inf]}  # seconds, True: of the user's own code
            for is_own, *times in counted:
                taken[is_own].append(seconds(*times))
            fastest_own, fastest_captured = min(taken[True]), min(taken[False])
            self.choose(fastest_own < fastest_captured)

    def choose(self, own: bool) -> None:
        """Choose the code until the next trial."""
        self.calls.clear()
        self.own, self.left = own, CALLS_UNTIL_NEXT


class Trials:
    """The trials of a converted model by shapes and mode."""

    def __init__(self) -> None:
        self.clock: Callable[[torch.device], Any] = now
        self.trials: dict[tuple, Trial] = {}

    def of(self, call: ModuleCall) -> Trial | None:
        """Return the trial of a call, or None if the call must run captured graphs.

        Captured graphs must run:

        - if a checkpoint repeats the call, because both runs must save equally many tensors;
        - if the call is observed, profiled or recorded;
        - inside accumulate();
        - with deterministic algorithms.
        """
        is_watched = (
            ignore_size_limits or whole_logits or graphs_only or call.is_transformed or call.is_seen_below
        )
        is_repeated = call.is_checkpointed or call.in_backward
        if is_watched or call.is_recorded or is_repeated or accumulating or call.is_deterministic:
            return None
        # contents of lists and caches are ignored: this lookup runs in each call
        kinds = (
            *map(_argument_properties, call.args),
            *call.kwargs,
            *map(_argument_properties, call.kwargs.values()),
        )
        autocast = torch._C._is_any_autocast_enabled()
        key = (call.module.training, call.records_gradients, autocast, kinds)
        trial = self.trials.get(key)
        if trial is None:
            if len(self.trials) >= MAX_TRIALS:
                self.trials.clear()
            device = call.tensors[0].device if call.tensors else torch.device("cpu")
            trial = self.trials[key] = Trial(device)
        return trial

    def choice(self, trial: Trial) -> bool | None:
        """Return True if a call runs the user's own code, or None during the trial."""
        if not trial.left:
            return None
        own = trial.own
        trial.left -= 1
        if trial.left <= 0:  # the next trial starts
            trial.own, trial.left = False, 0
        return own

    def run(
        self,
        trial: Trial,
        own: Callable[[], Any],
        captured: Callable[[], Any],
        graphs: Sequence[CapturedGraph],
    ) -> Any:
        """Run and time a call of an unfinished trial; new captures are appended to `graphs`."""
        is_own = trial.own
        call = own if is_own else captured
        # other threads may capture graphs meanwhile
        before, began = [(graph, graph.calls()) for graph in graphs], self.clock(trial.device)
        out, ended = call(), self.clock(trial.device)
        if len(graphs) > len(before):  # the call was captured
            return out
        if any(graph.has_gained(calls) for graph, calls in before):
            trial.choose(False)
        else:
            trial.note(is_own, began, ended)
        return out


def now(device: torch.device) -> Any:
    """Return a timestamp of a device. A GPU reaches it after all work launched before."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds(began: Any, ended: Any) -> float:
    """Return the seconds between two timestamps. Synchronizes with the GPU."""
    if isinstance(began, float):
        return ended - began
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3


def _argument_properties(given: Any) -> Any:
    """Return a hashable key of an argument.

    Sizes of tensor subclasses may be symbols without a hash, and the user's values may have no hash either.
    """
    if type(given) in (Tensor, nn.Parameter):
        return given.shape, given.dtype, given.device
    return given if type(given) in (bool, int, str) else id(type(given))
