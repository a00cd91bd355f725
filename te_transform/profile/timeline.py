"""Divide the time of a step among its operations, so that each instant counts once."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from te_transform.profile.classes import COMMUNICATION, IDLE, OVERHEAD, kernel_class, operation_class
from te_transform.profile.events import Event
from te_transform.profile.tree import Op


class Slice(NamedTuple):
    """A stretch of time in nanoseconds, its operation, and its class."""

    start: int
    end: int
    op: Op
    kind: str

    @property
    def taken(self) -> int:
        return self.end - self.start


def slices_of(ops: Sequence[Op], events: Iterable[Event]) -> list[Slice]:
    """Return the slices of a step, which cover it exactly.

    If kernels ran on a GPU, its timeline is divided. Each instant belongs to the newest kernel, to a
    collective if no other kernel runs, or to waiting. Otherwise the timeline of the CPU's thread is divided.

    Args:
        ops: of the step; the step itself is first.
        events: all events, for kernels and collectives in the background.
    """
    step, all_events = ops[0], [*events]
    kernels = [event for event in all_events if event.is_kernel and event.start < step.event.end]
    if kernels:
        return [*_on_gpu(step, kernels, {op.event.identity: op for op in ops})]
    beside = [(e.start, e.end) for e in all_events if e.is_async and operation_class(e.name) == COMMUNICATION]
    return [*_exposed(_innermost(step), sorted(beside))]


def _innermost(op: Op) -> Iterator[Slice]:
    """Yield the time in which an operation is the innermost one of its thread."""
    at = op.event.start
    for inner in op.inside:
        if inner.event.start > at:  # before an autograd node, the engine prepares it
            is_between = inner.is_backward and not op.is_backward
            yield Slice(at, inner.event.start, inner if is_between else op, op.kind)
        yield from _innermost(inner)
        at = max(at, inner.event.end)
    if op.event.end > at:
        yield Slice(at, op.event.end, op, op.kind)


def _exposed(slices: Iterable[Slice], collectives: Sequence[tuple[int, int]]) -> Iterator[Slice]:
    """Turn the parts of overhead in which a collective runs into communication."""
    first = 0
    for each in slices:
        while first < len(collectives) and collectives[first][1] <= each.start:
            first += 1
        at = each.start
        if each.kind == OVERHEAD:
            for start, end in collectives[first:]:
                if start >= each.end:
                    break
                start, end = max(start, at), min(end, each.end)
                if start < end:
                    yield from [each._replace(start=at, end=start)] * (start > at)
                    yield Slice(start, end, each.op, COMMUNICATION)
                    at = end
        if at < each.end:
            yield each._replace(start=at)


class _Running(NamedTuple):
    """A running kernel. The smallest of several running kernels gets the time."""

    is_communication: bool
    newest_first: int
    number: int
    end: int
    op: Op
    kind: str


def _on_gpu(step: Op, kernels: list[Event], launchers: dict[int, Op]) -> Iterator[Slice]:
    at, end = step.event.start, step.event.end
    in_order = sorted(kernels, key=lambda kernel: kernel.start)
    pending = [_owned(number, kernel, launchers, step) for number, kernel in enumerate(in_order)][::-1]
    running: list[_Running] = []
    while at < end:
        while pending and -pending[-1].newest_first <= at:
            heapq.heappush(running, pending.pop())
        while running and running[0].end <= at:
            heapq.heappop(running)
        stop = min(end, -pending[-1].newest_first if pending else end)
        if running:
            stop = min(stop, running[0].end)
            yield Slice(at, stop, running[0].op, running[0].kind)
        else:
            yield Slice(at, stop, pending[-1].op if pending else step, IDLE)
        at = stop


def _owned(number: int, kernel: Event, launchers: dict[int, Op], step: Op) -> _Running:
    """Return a kernel with the operation that launched it."""
    op = launchers.get(kernel.launcher, step)
    kind = kernel_class(kernel.name) if op.kind == OVERHEAD else op.kind
    return _Running(kind == COMMUNICATION, -kernel.start, number, kernel.end, op, kind)
