"""Run steps of a model, timed and profiled, and restore the model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._profiler import _RecordFunctionFast
from torch._dynamo.utils import get_compilation_metrics
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

from te_transform.backends.ranks import gathered
from te_transform.execution.attach import runners, with_setting
from te_transform.execution.timing import scalar_of, wait_for_gpu
from te_transform.execution.trials import graphs_only
from te_transform.graph.inputs import Inputs, TraceError
from te_transform.graph.preserve import preserved
from te_transform.profile.converted import labeled_graphs
from te_transform.profile.events import Event, events_of
from te_transform.profile.ranges import STEP, Label, Ranges, is_compiled_inside
from te_transform.profile.watch import Watch

TIMED = 3  # steps that are timed without the profiler
# The timed steps are the first ones in a row that take alike: lazy initialization, captures, compilation and
# the first scales are over by then. CUDA graphs are recorded after fewer steps than these.
_ALIKE = 1.15  # the slowest of them, relative to the fastest
_MOST_EAGER, _MOST_COMPILED, _MOST_CONVERTED = 5, 6, 9  # steps, if no three take alike


@dataclass
class RecordedSteps:
    """The steps of a model.

    Attributes:
        is_training: True if the steps have a backward.
        seconds: of each timed step, without the profiler.
        events: of one more step under the profiler.
        labels: the modules and sites of the ranges in `events`.
        watch: the torch calls of the first step; None for a converted or compiled model.
        recompiled: metrics of dynamo for each compilation after the first steps.
    """

    is_training: bool
    seconds: Sequence[float]
    events: Sequence[Event]
    labels: Sequence[Label]
    watch: Watch | None = None
    recompiled: Sequence[Any] = ()


def device_of(model: nn.Module) -> torch.device:
    """Return the first device of the model that is not a CPU, or the CPU."""
    devices = (tensor.device for tensor in (*model.parameters(), *model.buffers()))
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def record(model: nn.Module, samples: Sequence[Inputs]) -> RecordedSteps:
    """Run the steps, each on the next sample, and restore the model, its gradients and the random state.

    Raises:
        TraceError: the model fails on a sample.
    """
    trained = [p for p in model.parameters() if p.requires_grad] if model.training else []
    ranges, watch = Ranges(model), None
    steps = _Steps(model, samples, trained)
    with preserved(model), _own_gradients(model), graphs_only:
        most = _MOST_CONVERTED if runners(model) else _MOST_COMPILED
        if not (runners(model) or is_compiled_inside(model)):
            most, watch = _MOST_EAGER - 1, Watch(ranges)
            with ranges.on(), watch:
                steps.run()
        compiled, seconds = [], []
        while len(seconds) < most and not all(gathered(_take_alike(seconds))):
            compiled.append(get_compilation_metrics())
            seconds.append(steps.run())
        recompiled = [each for each in get_compilation_metrics() if each not in compiled[-TIMED]]
        events = _profiled(model, ranges, steps)
    return RecordedSteps(steps.have_backward, seconds[-TIMED:], events, ranges.labels, watch, recompiled)


def _take_alike(seconds: Sequence[float]) -> bool:
    """Return True if the last steps may be the timed ones."""
    last = seconds[-TIMED:]
    return len(last) == TIMED and max(last) <= _ALIKE * min(last)


def _profiled(model: nn.Module, ranges: Ranges, steps: _Steps) -> list[Event]:
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device_of(model).type == "cuda" else []
    with ExitStack() as stack:
        stack.enter_context(ranges.on())
        stack.enter_context(labeled_graphs(model, ranges))
        profiled = stack.enter_context(profiler(activities=activities, record_shapes=True))
        with _RecordFunctionFast("te_transform.first"):  # the first range takes milliseconds
            torch.zeros(1, dtype=torch.float32, device="cpu").add_(1)
        steps.run(_RecordFunctionFast(STEP))
    return events_of(profiled)


@contextmanager
def _own_gradients(model: nn.Module) -> Iterator[None]:
    """Keep the user's gradients unchanged, and do not run hooks that may step an optimizer."""
    parameters = [*model.parameters()]
    kept = [
        (p, p.grad, p.grad.detach().clone()) for p in parameters if p.grad is not None and p.grad._is_view()
    ]
    hooks = [(own, dict(own)) for p in parameters if (own := p._post_accumulate_grad_hooks)]
    for own, _ in hooks:
        own.clear()
    try:
        with with_setting(parameters, "grad", None):
            yield
    finally:
        for own, was in hooks:
            own.update(was)
        for _, gradient, values in kept:  # DDP's buckets hold these gradients
            gradient.detach().copy_(values)


class _Steps:
    """The steps of a model, each on the next sample."""

    def __init__(self, model: nn.Module, samples: Sequence[Inputs], trained: Sequence[Tensor]):
        self.model, self.samples, self.trained = model, cycle(samples), trained
        self.have_backward = False

    def run(self, within: Any = None) -> float:
        """Run a step and return its seconds."""
        sample = next(self.samples)
        args, kwargs = sample.clone()
        for parameter in self.trained:
            parameter.grad = None
        wait_for_gpu()
        start = time.perf_counter()
        try:
            with within or nullcontext(), torch.set_grad_enabled(bool(self.trained)):
                out = self.model(*args, **kwargs)
                if self.trained and (loss := scalar_of(out)).requires_grad:
                    loss.backward()
                    self.have_backward = True
                del out
                wait_for_gpu()
        except Exception as error:
            raise TraceError.of(self.model, sample, error) from error
        return time.perf_counter() - start
