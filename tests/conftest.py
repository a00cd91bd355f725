"""What all tests run with; and kernels, which models of a test's size would not run in by themselves."""

import gc
from collections.abc import Iterator

import pytest
import torch._dynamo.guards
import transformers  # noqa: F401  what is there is taken out of the garbage collector's sight below

from te_transform.backends import limits

# A capture makes objects by the hundred thousand, and Python would look through all of PyTorch each time.
gc.collect()
gc.freeze()
gc.set_threshold(100_000, 20, 50)

# Dynamo times the guards of each capture, for its log, after it has emptied the CPU's caches.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0


@pytest.fixture
def at_any_size() -> Iterator[None]:
    """Kernels take calls that are too small to gain from them."""
    with limits.at_any_size:
        yield
