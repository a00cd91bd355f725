"""Where norms run: apart, in their own place, as PyTorch alone has it, or joined with what reads them."""

from collections.abc import Callable

import pytest

from te_transform.backends import torch as plain


@pytest.fixture(params=["apart", "joined"])
def norms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways: joined is how Transformer Engine's modules do it, and the harder case for slots."""
    monkeypatch.setattr(plain, "PLAIN", request.param == "apart")
    return request.param


def only_joined(test: Callable) -> Callable:
    """A test of what only joined norms can do, or get wrong."""
    return pytest.mark.usefixtures("norms")(pytest.mark.parametrize("norms", ["joined"], indirect=True)(test))
