"""What models of a test's size would not do by themselves: kernels in spite of few tokens."""

from collections.abc import Iterator

import pytest

from te_transform.backends import limits


@pytest.fixture
def at_any_size() -> Iterator[None]:
    """Kernels take calls that are too small to gain from them."""
    with limits.at_any_size:
        yield
