"""The events of torch.profiler as plain records."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.autograd import DeviceType

_OF_THE_DRIVER = re.compile(r"(?:cuda|cu|hip)[A-Z]")  # calls that launch kernels or wait for them


@dataclass(frozen=True, slots=True)
class Event:
    """An operation on the CPU, a range, a collective in the background, or a kernel on a GPU.

    Times are in nanoseconds. `sequence` is the number of an autograd node: of the node that a forward
    operation makes, or of a node in the backward. `forward_thread` is above 0 for nodes in the backward.
    """

    name: str
    start: int
    end: int
    thread: int = 1
    sequence: int = -1
    forward_thread: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    identity: int = 0  # of an operation on the CPU
    launcher: int = 0  # of a kernel: the identity of the operation that launched it
    is_kernel: bool = False
    is_async: bool = False  # runs beside the operations of its thread


def events_of(profiler: Any) -> list[Event]:
    """Return the events of a torch.profiler.profile, without the calls of the GPU's driver."""
    return [*_without_annotations(map(_event, profiler.profiler.kineto_results.events()))]


def _event(event: Any) -> Event:
    is_kernel = event.device_type() != DeviceType.CPU
    return Event(
        event.name(),
        event.start_ns(),
        event.start_ns() + event.duration_ns(),
        event.start_thread_id(),
        event.sequence_nr(),
        event.fwd_thread_id(),
        tuple(map(tuple, event.shapes())),
        tuple(event.dtypes()),
        event.correlation_id(),
        event.linked_correlation_id(),
        is_kernel,
        event.is_async(),
    )


def _without_annotations(events: Iterable[Event]) -> Iterator[Event]:
    """Leave out calls of the driver, and ranges that the profiler repeats on the GPU's timeline."""
    all_events = [*events]
    on_cpu = {event.name for event in all_events if not event.is_kernel}
    for event in all_events:
        is_annotation = event.is_kernel and event.name in on_cpu
        if not is_annotation and (event.is_kernel or not _OF_THE_DRIVER.match(event.name)):
            yield event
