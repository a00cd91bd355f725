"""What models of a test's size would not do by themselves: joined norms, kernels in spite of few tokens."""

from collections.abc import Callable, Iterator

import pytest

from te_transform.backends import limits
from te_transform.backends import torch as plain


@pytest.fixture(params=["apart", "joined"])
def norms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways: joined is how Transformer Engine's modules do it, and the harder case for slots."""
    monkeypatch.setattr(plain, "PLAIN", request.param == "apart")
    return request.param


@pytest.fixture
def at_any_size() -> Iterator[None]:
    """Kernels take calls that are too small to gain from them."""
    with limits.at_any_size():
        yield


def only_joined(test: Callable) -> Callable:
    """A test of what only joined norms can do, or get wrong."""
    return pytest.mark.usefixtures("norms")(pytest.mark.parametrize("norms", ["joined"], indirect=True)(test))
