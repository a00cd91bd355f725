"""What all tests run with: fused products too, which calls of a test's size are too small for."""

import gc
import logging
from collections.abc import Iterator
from importlib import import_module
from itertools import count

import pytest
import torch._dynamo.guards
import torch._dynamo.utils
import transformers  # noqa: F401  what is there is taken out of the garbage collector's sight below

from te_transform.backends import limits

# A capture makes objects by the hundred thousand, and dynamo keeps many of them: Python would look through
# all of them, and all of PyTorch, again and again. What a few tests have left is looked through once.
gc.collect()
gc.freeze()
gc.set_threshold(100_000, 20, 1_000_000)
TESTS_BETWEEN = 80
numbers = count(1)
last_group: list[torch.distributed.ProcessGroup] = []

# Half of the time of a small capture goes into logs: dynamo times its guards for them, after it has emptied
# the CPU's caches, and writes all settings of the compiler as text.
logging.getLogger("torch.__trace").handlers.clear()
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
torch._dynamo.utils._get_dynamo_config_for_logging = lambda: None
torch._dynamo.utils._scrubbed_inductor_config_for_logging = lambda: None

# A seed for a device that is not there is kept for the day that it is, with the stack of calls as text.
for device in (torch.cuda, torch.xpu, torch.mtia):
    if not device.is_available():
        device.manual_seed_all = lambda seed: None


def pytest_runtest_teardown() -> None:
    if next(numbers) % TESTS_BETWEEN == 0:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def ignore_size_limits() -> Iterator[None]:
    """Calls of the few tokens that tests have run fused, in kernels where there are any."""
    with limits.ignore_size_limits:
        yield


@pytest.fixture
def process_group() -> Iterator[None]:
    """This process alone, as a group.

    The group is kept until there is another one: the DistributedDataParallel of a test, if it were the last
    that has it, would end its threads while it holds the GIL, for which one of them may wait.
    """
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    last_group[:] = [torch.distributed.group.WORLD]
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def by_size(ignore_size_limits: None) -> Iterator[None]:
    """Calls run as they do outside of tests."""
    before, limits.ignore_size_limits.entered = limits.ignore_size_limits.entered, 0
    yield
    limits.ignore_size_limits.entered = before


@pytest.fixture
def as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """verify() compares on the example inputs alone. That it varies them is test_verify.py's, and most of its
    time: captures at other sizes."""
    module = import_module("te_transform.verify.verify")
    own = module.variations
    monkeypatch.setattr(module, "variations", lambda model, samples: [*own(model, samples)][: len(samples)])
