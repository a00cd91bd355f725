"""Tests of real Transformer Engine: everywhere else they are skipped, with what is missing."""

import pytest
import torch._dynamo

from te_transform.backends import why_missing

MISSING = why_missing()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if MISSING and "gpu" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason=MISSING))


@pytest.fixture(autouse=True)
def _fused_and_captured_anew(at_any_size: None) -> None:
    torch._dynamo.reset()  # all models of a class share dynamo's cache, which has its limit
