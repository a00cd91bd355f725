"""The tests of rules run calls with few tokens fused."""

import pytest


@pytest.fixture(autouse=True)
def _fused(at_any_size: None) -> None:
    """Ignore the size limits that users have."""
