"""Ranks as threads of this process: captured graphs on shards, without process groups."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

from te_transform.parallel.collectives import Ranks


class Meeting:
    """The meeting point of threads, which exchange tensors in turns."""

    def __init__(self, count: int):
        self.count, self.barrier, self.brought = count, Barrier(count, timeout=60), [None] * count

    def exchange(self, own: int, x: Tensor) -> list[Tensor]:
        """Return the tensors of all threads, in order."""
        self.brought[own] = x.detach()
        self.barrier.wait()
        found = list(self.brought)
        self.barrier.wait()
        return found


class Thread(Ranks):
    """Ranks as one of the threads sees them."""

    def __init__(self, meeting: Meeting, own: int):
        object.__setattr__(self, "meeting", meeting)
        object.__setattr__(self, "place", own)

    @property
    def count(self) -> int:
        return self.meeting.count

    @property
    def own(self) -> int:
        return self.place

    def summed(self, x: Tensor, op: str = "sum") -> Tensor:
        found = torch.stack(self.meeting.exchange(self.own, x))
        return found.sum(0) if op == "sum" else found.amax(0)

    def joined(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self.meeting.exchange(self.own, x), dim)

    def summed_block(self, x: Tensor, dim: int) -> Tensor:
        return self.summed(x).chunk(self.count, dim)[self.own].contiguous()


def in_threads(count: int, prepare: Callable[[Ranks], Callable[[], Any]]) -> list[Any]:
    """Return the results of the functions of `prepare` on each of this many ranks."""
    meeting = Meeting(count)
    works = [prepare(Thread(meeting, own)) for own in range(count)]

    def run(own: int) -> Any:
        try:
            return works[own]()
        except BaseException:
            meeting.barrier.abort()  # the others need not wait
            raise

    with ThreadPoolExecutor(count) as pool:
        return [done.result() for done in [pool.submit(run, own) for own in range(count)]]
