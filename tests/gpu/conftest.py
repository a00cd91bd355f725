"""Tests of real Transformer Engine: everywhere else they are skipped, with what is missing."""

from collections.abc import Iterator

import pytest
import torch._dynamo

from te_transform.backends import limits, why_missing

MISSING = why_missing()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if MISSING and "gpu" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason=MISSING))


@pytest.fixture(autouse=True)
def _at_any_size() -> Iterator[None]:
    """The models are too small for what pays off: they shall run in the kernels all the same."""
    torch._dynamo.reset()  # all models of a class share dynamo's cache, which has its limit
    with limits.at_any_size:
        yield
