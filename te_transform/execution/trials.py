"""Whether calls in which nothing gains run captured graphs or the user's own code: whichever is faster.

Where every operation runs as it was captured, both compute the same. Captured graphs leave out what modules
do around their operations, and cost dynamo's guards: where the CPU sets the pace, a call of 12 layers takes
from 0.9 to 1.2 times as long as its own code does (H100, docs/benchmarks.md). So the first calls of each kind
are timed, in either way by turns, and later ones run in the faster one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from te_transform.backends.gradients import accumulating
from te_transform.backends.limits import ignore_size_limits, whole_logits
from te_transform.execution.call_context import ModuleCall
from te_transform.execution.captured_graph import CapturedGraph

IN_A_ROW = 5  # calls of one way, of which the first does not count: caches hold the work of the other one
ROWS = 4  # by turns; the fastest call of a way counts, for what delays a call is not its own
LASTS = 1000  # calls that a choice is for: dtypes, what is trained and the machine's load may change
MOST = 64  # kinds of calls that are known at a time

TOLD = "nothing gains in the call, and the user's own code takes less time than captured graphs"


@dataclass
class Trial:
    """The calls of one kind, of a model on `device`: what they ran, the user's own code (True) or captured
    graphs, and when they began and ended."""

    device: torch.device
    calls: list[tuple[bool, Any, Any]] = field(default_factory=list)
    own: bool = False  # what the next call runs
    left: int = 0  # calls for which that has been chosen

    def note(self, own: bool, began: Any, ended: Any) -> None:
        """Take a call into account, and say what the next one runs."""
        self.calls.append((own, began, ended))
        self.own = bool(len(self.calls) // IN_A_ROW % 2)
        if len(self.calls) >= IN_A_ROW * ROWS:
            counted = [call for number, call in enumerate(self.calls) if number % IN_A_ROW]
            taken = [[seconds(*when) for way, *when in counted if way is one] for one in (True, False)]
            fastest_own, fastest_captured = (min(each, default=math.inf) for each in taken)
            self.choose(fastest_own < fastest_captured)

    def choose(self, own: bool) -> None:
        """Settle what calls run, until there is another trial."""
        self.calls.clear()
        self.own, self.left = own, LASTS

    def count_down(self) -> None:
        """Begin anew after the last of the calls that the choice was for."""
        self.left -= 1
        if self.left <= 0:
            self.own, self.left = False, 0


class Trials:
    """Those of a converted model, by what tells the kinds of its calls apart."""

    def __init__(self) -> None:
        self.trials: dict[tuple, Trial] = {}
        self.own_calls = 0  # for which the user's own code has been chosen

    def of(self, call: ModuleCall) -> Trial | None:
        """Return the trial of a call, or None if it has to run captured graphs.

        So it has where a checkpoint will repeat a call, which has to save as many tensors then, and does;
        where a call is looked at, or recorded; in accumulate(); and where all calls are to compute the same
        bits.
        """
        looked_at = ignore_size_limits or whole_logits or call.is_transformed or call.is_seen_below
        is_repeated = call.is_checkpointed or call.in_backward
        if looked_at or call.is_recorded or is_repeated or accumulating or call.is_deterministic:
            return None
        # what is inside of lists and caches does not count: this is looked up in each call
        kinds = *map(_kind, call.args), *call.kwargs, *map(_kind, call.kwargs.values())
        autocast = torch._C._is_any_autocast_enabled()
        key = (call.module.training, call.records_gradients, autocast, kinds)
        trial = self.trials.get(key)
        if trial is None:
            if len(self.trials) >= MOST:
                self.trials.clear()
            device = call.tensors[0].device if call.tensors else torch.device("cpu")
            trial = self.trials[key] = Trial(device)
        return trial

    def choice(self, trial: Trial) -> bool | None:
        """Whether a call runs the user's own code; None while the trial goes on."""
        if not trial.left:
            return None
        own = trial.own
        self.own_calls += own
        trial.count_down()
        return own

    def run(
        self,
        trial: Trial,
        own: Callable[[], Any],
        captured: Callable[[], Any],
        graphs: Sequence[CapturedGraph],
    ) -> Any:
        """A call of a trial that goes on; `graphs` gets those that it captures."""
        is_own = trial.own
        call = own if is_own else captured
        # other threads may capture graphs at any moment
        before, began = [(graph, graph.calls()) for graph in graphs], now(trial.device)
        out, ended = call(), now(trial.device)
        if len(graphs) > len(before):  # the call was captured
            return out
        if any(graph.has_gained(calls) for graph, calls in before):
            trial.choose(False)
        else:
            trial.note(is_own, began, ended)
        return out


def now(device: torch.device) -> Any:
    """This moment in the work of a device. A GPU comes to it when it has done what was launched before: of
    the CPU and the GPU that one counts which sets the pace."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds(began: Any, ended: Any) -> float:
    """Those between two moments, for which the GPU is waited for."""
    if isinstance(began, float):
        return ended - began
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3


def _kind(given: Any) -> Any:
    """What of an argument decides which kind of call it is. Sizes of subclasses may be symbols, which have no
    hash, and neither need values and classes of the user's own."""
    if type(given) in (Tensor, nn.Parameter):
        return given.shape, given.dtype, given.device
    return given if type(given) in (bool, int, str) else id(type(given))
