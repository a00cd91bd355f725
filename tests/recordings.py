"""CUDA graphs without a GPU: a replay runs the function again, from recorded inputs into recorded outputs.

tests/gpu runs the same calls as CUDA graphs.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from te_transform.backends import limits
from te_transform.execution.executors import cuda_graph
from te_transform.plan import options


class Recorder(Counter[str]):
    """Counts of what was "recorded", replayed "forward" and "backward", and "freed".

    Attributes:
        alive: the recordings.
        record: makes a recording; a test may put a function there that raises.
        after_forward: receives each recording after a replay of its forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive: weakref.WeakSet[Recording] = weakref.WeakSet()
        self.record: Callable[..., Recording] = partial(Recording, self)
        self.after_forward: Callable[[Recording], Any] = lambda recording: None

    def __call__(self, *function: Any) -> Recording:
        return self.record(*function)


class Recording:
    """A recording of a forward and its backward, which runs both again when it is replayed."""

    def __init__(
        self,
        recorder: Recorder,
        forward: Callable[[], list[Tensor]],
        backward: Callable[[list[Tensor]], list[Tensor | None]] | None,
        device: torch.device,
    ):
        self.recorder, self.forward, self.backward = recorder, forward, backward
        self.records = torch.is_grad_enabled()
        recorder.alive.add(self)
        recorder["recorded"] += 1
        self.live = forward()
        self.gradients = backward(self.live) if backward else []
        self.outputs = [output.detach().clone() for output in self.live]

    @property
    def first(self) -> SimpleNamespace:
        return SimpleNamespace(replay=self._replay_forward)

    @property
    def second(self) -> SimpleNamespace:
        return SimpleNamespace(replay=self._replay_backward)

    def _replay_forward(self) -> None:
        self.recorder["forward"] += 1
        with torch.set_grad_enabled(self.records):
            self.live = self.forward()
        overwrite(self.outputs, self.live)
        for gradient in self.gradients:  # a forward may use the memory that the backward has left
            if gradient is not None:
                gradient.fill_(torch.nan)
        self.recorder.after_forward(self)

    def _replay_backward(self) -> None:
        self.recorder["backward"] += 1
        with torch.enable_grad():
            overwrite(self.gradients, self.backward(self.live))

    def free(self) -> None:
        self.recorder["freed"] += 1


def overwrite(kept: list[Tensor | None], made: list[Tensor | None]) -> None:
    for old, new in zip(kept, made, strict=True):
        assert (old is None) == (new is None)
        if old is not None:
            old.copy_(new.detach())


def install(patch: pytest.MonkeyPatch | None = None, device: str = "cpu") -> Recorder:
    """Record and replay on a device until `patch` is undone, by default until the process ends."""
    patch = patch or pytest.MonkeyPatch()
    patch.setattr(cuda_graph, "CudaGraphPair", recorder := Recorder())
    patch.setattr(options, "cuda_graphs", lambda: True)
    patch.setattr(limits, "DEVICE", device)
    # the functions themselves count what they write to
    patch.setattr(cuda_graph, "increment_version", lambda tensor: None)
    return recorder
