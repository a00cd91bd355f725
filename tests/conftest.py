"""Fixtures of all tests. The size limits are those that users have, except in tests with `at_any_size`."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from te_transform.backends import banded_attention, few_rows, limits
from te_transform.backends.bands import Band
from te_transform.execution import specializations, timing
from te_transform.plan import options
from te_transform.verify import compare
from tests import fast_captures, recordings, stand_in  # noqa: F401  fast_captures has effects

if TYPE_CHECKING:
    from tests.compilers import Compiler

TESTS_BETWEEN = 80
numbers = count(1)
last_group: list[torch.distributed.ProcessGroup] = []

# PyTorch queues seeds for missing devices, each with a formatted stack trace.
for device in (torch.cuda, torch.xpu, torch.mtia):
    if not device.is_available():
        device.manual_seed_all = lambda seed: None


def pytest_runtest_teardown() -> None:
    if next(numbers) % TESTS_BETWEEN == 0:
        gc.collect()
        gc.freeze()


@pytest.fixture
def at_any_size() -> Iterator[None]:
    """Run calls with few tokens fused, in kernels if there are any."""
    with limits.ignore_size_limits:
        yield


@pytest.fixture
def by_size(at_any_size: None) -> Iterator[None]:
    """Apply the size limits that users have, in a module whose other tests ignore them."""
    before, limits.ignore_size_limits.entered = limits.ignore_size_limits.entered, 0
    yield
    limits.ignore_size_limits.entered = before


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Turn automatic garbage collections off."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def kernels_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run kernels on the CPU."""
    monkeypatch.setattr(limits, "DEVICE", "cpu")


@pytest.fixture
def kernels_of_hopper(kernels_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernels of a Hopper GPU on the CPU, cuDNN's attention among them."""
    monkeypatch.setattr(limits, "_is_hopper", lambda device: True)


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return te_transform.backends.te, imported on the stand-in for Transformer Engine."""
    yield stand_in.install(monkeypatch)
    torch._dynamo.reset()  # all models of a class share dynamo's cache, which has its limit


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Return the list of compiled graphs: AOTAutograd traces, and no code is generated."""
    from tests import compilers  # imports inductor, which takes a second

    return compilers.install(patch=monkeypatch)


@pytest.fixture
def cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> recordings.Recorder:
    """Record and replay without a GPU, and count both."""
    torch._dynamo.reset()  # captures of other tests count toward dynamo's limit for a forward
    return recordings.install(monkeypatch)


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return an empty working folder; modules that are imported from it are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    path = [*sys.path]
    yield tmp_path
    sys.path[:] = path
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", None)).startswith(f"{tmp_path}/"):
            del sys.modules[name]


@pytest.fixture
def timings_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the file with timings, which does not exist yet, and time few calls."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(timing, "SECONDS", 0.0)
    return tmp_path / "te_transform/timings.json"


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare FP8 in verify() on three draws of the inputs."""
    for name in ("DRAWS", "NEAR_DRAWS"):
        monkeypatch.setattr(compare, name, 3)


@pytest.fixture
def bands(monkeypatch: pytest.MonkeyPatch) -> list[Band]:
    """Return the bands of keys that attention is computed in."""
    found: list[Band] = []
    attended = banded_attention.attended

    def noted(*arguments: Any) -> Tensor:
        found.append(arguments[4])
        return attended(*arguments)

    monkeypatch.setattr(banded_attention, "attended", noted)
    return found


@pytest.fixture
def buckets(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets the bytes of a bucket of gradients, as DDP does while it runs a model."""

    def set_size(size: int) -> None:
        monkeypatch.setattr(specializations, "bucket_size", lambda: size)

    return set_size


@pytest.fixture
def process_group() -> Iterator[None]:
    """Make this process a group.

    The group lives until the next one: the DistributedDataParallel of a test, if it held the last reference,
    would join its threads under the GIL, for which one of them may wait.
    """
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    last_group[:] = [torch.distributed.group.WORLD]
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare in verify() on the example inputs alone.

    Most of its time goes into captures at other sizes, which test_verify.py tests.
    """
    module = import_module("te_transform.verify.verify")
    own = module.variations
    monkeypatch.setattr(module, "variations", lambda model, samples: [*own(model, samples)][: len(samples)])


@pytest.fixture
def as_if_te_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan in convert(backend="te") as on a machine with TE, until TE itself is needed."""
    real = options.choose

    def choose(name: str, model: nn.Module, planning: bool, **rest: Any) -> tuple[Any, str]:
        return real(name, model, planning=True, **rest)

    monkeypatch.setattr(options, "choose", choose)


@pytest.fixture
def products_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return the shapes of x in products with FP8-only weights that read the bytes of the weights."""
    shapes: list[tuple[int, ...]] = []
    original = few_rows.op

    def noted(x: Tensor, *rest: Tensor | None) -> Tensor:
        shapes.append(tuple(x.shape))
        return original(x, *rest)

    monkeypatch.setattr(few_rows, "op", noted)
    return shapes
