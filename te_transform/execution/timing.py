"""Time the calls of a model in each mode, and cache the timings in a file."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from te_transform.backends.ranks import gathered
from te_transform.execution.calibrate import loss_of
from te_transform.graph.inputs import Inputs
from te_transform.graph.preserve import preserved

log = logging.getLogger(__name__)

UNTIMED_CALLS = 6  # untimed calls, in which compilation, calibration and recording end
CALLS = 3  # calls that are timed together, without a synchronization in between, as in training
SECONDS = 1.0  # the minimum duration of timed calls, which are at least three
SECONDS_IN_ALL = 300.0  # no further mode is timed after this duration
PACKAGES = ("te_transform", "torch", "transformer_engine", "transformers")  # reports show their versions
CLEARLY = 0.99  # a mode must take less than this share of the time of a simpler mode


@dataclass(frozen=True)
class Timing:
    """The time of a call in one mode.

    Attributes:
        name: of the mode.
        seconds: of a call, with the backward in training; None if it was not timed.
        why: why there is no time, or the source of a time that was not measured.
    """

    name: str
    seconds: float | None
    why: str = ""

    def __str__(self) -> str:
        taken = "" if self.seconds is None else duration(self.seconds)
        return f"{self.name}: {', '.join(filter(None, (taken, self.why)))}"


def duration(seconds: float) -> str:
    """Format a duration with three digits."""
    unit, scale = next((one for one in (("s", 1.0), ("ms", 1e3)) if seconds * one[1] >= 1), ("us", 1e6))
    return f"{scale * seconds:.3g} {unit}"


def seconds_of(model: nn.Module, sample: Inputs) -> float:
    """Return the median time of a call, with its backward in training mode. The model is restored."""
    args, kwargs = sample.clone()
    trained = [p for p in model.parameters() if p.requires_grad] if model.training else []

    def step() -> None:
        with torch.set_grad_enabled(bool(trained)):
            out = model(*args, **kwargs)
        if trained:
            torch.autograd.grad(scalar_of(out), trained, allow_unused=True)

    with preserved(model):
        for _ in range(UNTIMED_CALLS):
            step()
        times: list[float] = []
        while len(times) < 3 or sum(times) * CALLS < SECONDS:
            times.append(_time_calls(step) / CALLS)
    return statistics.median(times)


def _time_calls(step: Callable[[], None]) -> float:
    wait_for_gpu()
    start = time.perf_counter()
    for _ in range(CALLS):
        step()
    wait_for_gpu()
    return time.perf_counter() - start


def wait_for_gpu() -> None:
    """Wait until all work on the GPU is done, if there is a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def scalar_of(out: Any) -> Tensor:
    """Return the loss among the outputs, or a scalar that depends on all outputs."""
    loss = loss_of(out)
    if loss is not None:
        return loss
    found = tree_leaves(list(out.values()) if isinstance(out, dict) else out)
    leaves = [leaf for leaf in found if isinstance(leaf, Tensor) and leaf.requires_grad]
    start = torch.zeros((), dtype=torch.float32, device="cpu")
    return sum((leaf.float().square().mean() for leaf in leaves), start)


def fastest(timings: Sequence[Timing]) -> Timing | None:
    """Return the fastest timing. A later, more complex mode must be clearly faster."""
    best = None
    for timing in timings:
        if timing.seconds is None:
            continue
        if best is None or timing.seconds < CLEARLY * best.seconds:
            best = timing
    return best


def of_all_ranks(key: str, timings: Sequence[Timing]) -> Sequence[Timing]:
    """Return for each mode the timing of the slowest of the ranks with this key; all ranks must call this.

    Ranks with the same key then run in the same mode. The result is empty if one of them has no timings. A
    mode that fails on one rank has no time.
    """
    alike = [each for other, each in gathered((key, timings)) if other == key]
    by_mode = zip(*alike, strict=True) if all(alike) else ()
    return [max(each, key=lambda t: math.inf if t.seconds is None else t.seconds) for each in by_mode]


def key_of(model: nn.Module, sample: Inputs, *more: Any) -> str:
    """Return the cache key: the GPU, versions, and the model's tensors, inputs and mode."""
    return hashlib.sha256(told_of(model, sample, *more).encode()).hexdigest()


def told_of(model: nn.Module, sample: Inputs, *more: Any) -> str:
    """Return a text about the GPU, versions, model, inputs and mode that is the same in every process."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    tensors = [
        (name, tuple(t.shape), str(t.dtype), t.device.type, t.requires_grad)
        for name, t in model.named_parameters()
    ]
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    versions = [torch.__version__, *map(installed_version, ("te_transform", "transformer_engine"))]
    facts = device, versions, kind, model.training, repr(model), tensors, str(sample), more
    return re.sub(r" at 0x[0-9a-f]+", "", repr(facts))  # addresses of functions


def installed_version(package: str) -> str:
    """Return the installed version of a package, or "" if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def versions() -> str:
    """Return the installed versions of the packages that a conversion depends on."""
    return ", ".join(f"{name} {installed_version(name)}" for name in PACKAGES if installed_version(name))


def kept_timings(key: str) -> list[Timing]:
    """Return the cached timings, or none."""
    try:
        return [Timing(**each) for each in _everything().get(key, ())]
    except TypeError:  # written by another version
        return []


def keep(key: str, timings: Sequence[Timing]) -> None:
    """Cache timings for later processes. A failure is only logged."""
    path, everything = file(), _everything()
    everything[key] = [asdict(timing) for timing in timings]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps(everything, indent=1), encoding="utf-8")
        written.replace(path)
    except OSError as error:
        log.warning("timings are not cached, %s: %s", type(error).__name__, error)


def _everything() -> dict[str, Any]:
    try:
        timings = json.loads(file().read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no file, or a damaged file
        return {}
    return timings if isinstance(timings, dict) else {}


def file() -> Path:
    """Return the path of the cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "te_transform" / "timings.json"
