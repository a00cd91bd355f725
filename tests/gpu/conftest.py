"""Tests of real Transformer Engine: everywhere else they are skipped, with what is missing."""

import pytest

from te_transform import backends

MISSING = backends._missing()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if MISSING and "gpu" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason=MISSING))


@pytest.fixture(autouse=True)
def _at_any_size(at_any_size: None) -> None:
    """The models are too small for what pays off: they shall run in the kernels all the same."""
