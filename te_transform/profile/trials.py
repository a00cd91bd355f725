"""Slow operations, and the gain of a change: two functions are timed on random tensors of a step's shapes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_transform.execution.timing import wait_for_gpu

log = logging.getLogger(__name__)

EVENT_DTYPES = {  # of floating-point tensors, by the names that the profiler has for them
    "float": torch.float32,
    "double": torch.float64,
    "c10::BFloat16": torch.bfloat16,
    "c10::Half": torch.half,
}
_ROUNDS = 2


class Replacement(NamedTuple):
    """A change to try.

    Attributes:
        shapes: of the arguments of both functions.
        dtype: of the tensors.
        before, after: the operation before and after the change.
        backward: True to time the backward as well.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    before: Callable[..., Tensor]
    after: Callable[..., Tensor]
    backward: bool
    name: str  # equal trials have equal names, shapes and dtypes


class Suspect(NamedTuple):
    """A slow operation of a step.

    Attributes:
        what: the name of the finding.
        label: the number of the module's label.
        evidence: what ran, as a clause.
        advice: what to change.
        taken: the cost in nanoseconds that the change affects.
        trial: the change on tensors of the same shapes, or None if it cannot be tried.
        most: the largest gain in nanoseconds; None means `taken`.
        together: True if one finding names all modules, False for a finding per kind of layer.
    """

    what: str
    label: int
    evidence: str
    advice: str
    taken: int
    trial: Replacement | None = None
    most: int | None = None
    together: bool = False


@dataclass
class Replacements:
    """Replacements on one device, within a limit of time.

    Attributes:
        seconds: the remaining time.
    """

    device: torch.device
    seconds: float
    shares: dict[Any, float | None] = field(default_factory=dict)

    def share(self, trial: Replacement, taken: float) -> float | None:
        """Return the time after the change as a share of the time before, or None if it was not tried.

        Args:
            trial: the change.
            taken: the seconds of one call before the change, as an estimate.
        """
        key = trial.name, trial.shapes, trial.dtype, trial.backward
        if key not in self.shares:
            if 2 * (_ROUNDS + 1) * taken > self.seconds:
                return None
            start = time.perf_counter()
            try:
                self.shares[key] = self._tried(trial)
            except RuntimeError as error:  # out of memory, or no kernel for these shapes
                log.info("a change was not tried: %s", error)
                self.shares[key] = None
            self.seconds -= time.perf_counter() - start
        return self.shares[key]

    def _tried(self, trial: Replacement) -> float:
        with torch.autocast(self.device.type, enabled=False), torch.set_grad_enabled(trial.backward):
            tensors = [
                torch.randn(s, dtype=torch.float32, device=self.device).to(trial.dtype) for s in trial.shapes
            ]
            tensors = [tensor.requires_grad_(trial.backward) for tensor in tensors]
            rounds = [
                [self._seconds(function, tensors, trial.backward) for function in (trial.before, trial.after)]
                for _ in range(_ROUNDS + 1)
            ]
        before, after = map(min, zip(*rounds[1:], strict=True))  # the first round warms up
        return after / before

    def _seconds(self, function: Callable[..., Tensor], tensors: list[Tensor], backward: bool) -> float:
        wait_for_gpu()
        start = time.perf_counter()
        out = function(*tensors)
        if backward:
            torch.autograd.grad(out, tensors, torch.ones_like(out))
        wait_for_gpu()
        return time.perf_counter() - start
