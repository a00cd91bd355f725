"""Measure time and memory so that changes in the speed of the machine cancel out."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLEAR = Path("/proc/self/clear_refs")  # writing 5 resets the recorded peak of this process


@dataclass(frozen=True)
class Ratio:
    """The ratio of `other` to `one`: median seconds of each; median and quartiles of neighboring ratios."""

    one: float
    other: float
    ratio: float
    low: float
    high: float
    rounds: int


def interleaved(
    one: Callable[[], Any], other: Callable[[], Any], calls: int = 1, seconds: float = 10.0
) -> Ratio:
    """Time two calls by turns for about `seconds`, in samples of `calls`; the order alternates."""
    for function in (one, other, one, other):
        _sample(function, calls)
    ones, others = [], []
    end = time.perf_counter() + seconds
    while len(ones) < 10 or time.perf_counter() < end:
        order = ((one, ones), (other, others))
        for function, times in order if len(ones) % 2 else reversed(order):
            times.append(_sample(function, calls))
    ratios = [b / a for a, b in zip(ones, others, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Ratio(statistics.median(ones), statistics.median(others), middle, low, high, len(ratios))


def _sample(function: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


def in_a_row(step: Callable[[], Any], steps: int) -> float:
    """Return the seconds of a step among consecutive steps on a GPU, which is waited for after the last."""
    import torch  # other benchmarks run without torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


@dataclass
class Memory:
    """Resident bytes: before, at the peak, after."""

    before: int = 0
    peak: int = 0
    after: int = 0


@contextlib.contextmanager
def memory() -> Iterator[Memory]:
    """Record the peak of resident memory while the body runs, from the kernel's counter (Linux)."""
    gc.collect()
    CLEAR.write_text("5")
    used = Memory(before=_status("VmRSS"))
    yield used
    used.peak, used.after = _status("VmHWM"), _status("VmRSS")


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return 1024 * int(line.split()[1])


@dataclass
class Load:
    """The mean number of cores that other processes kept busy (Linux)."""

    others: float = 0.0


@contextlib.contextmanager
def load() -> Iterator[Load]:
    """Measure the load by other processes while the body runs, because it slows the body down."""
    found = Load()
    start, busy, own = time.perf_counter(), _busy(), _own()
    yield found
    seconds = time.perf_counter() - start
    found.others = max(0.0, (_busy() - busy - (_own() - own)) / seconds)


def _busy() -> float:
    user, nice, system, _, _, irq, soft, *_ = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    return sum(map(int, (user, nice, system, irq, soft))) / os.sysconf("SC_CLK_TCK")


def _own() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


@contextlib.contextmanager
def stopwatch(module: Any, names: tuple[str, ...]) -> Iterator[dict[str, float]]:
    """Sum the seconds spent in each of the functions `names` that `module` calls."""
    spent = dict.fromkeys(names, 0.0)
    originals = {name: getattr(module, name) for name in names}
    for name, function in originals.items():
        setattr(module, name, _timed(function, name, spent))
    try:
        yield spent
    finally:
        for name, function in originals.items():
            setattr(module, name, function)


def _timed(function: Callable, name: str, spent: dict[str, float]) -> Callable:
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent[name] += time.perf_counter() - start

    return timed
