"""Fixtures of the tests of executors."""

from collections.abc import Callable
from typing import Any

import pytest

from te_transform.execution import partition
from te_transform.execution.call_context import ModuleCall
from te_transform.execution.executors.captured import Captured
from te_transform.execution.executors.cuda_graph import CudaGraph
from te_transform.execution.executors.fused import Fused
from te_transform.execution.executors.inductor import Inductor
from te_transform.execution.executors.user_code import UserCode


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the executors that run calls, in the order of the calls."""
    found: list[str] = []

    def noting(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: (found.append(name), run(*given))[1]

    for kind, method in (
        (ModuleCall, "run_original"),
        *((kind, "run") for kind in (Captured, Fused, Inductor, CudaGraph)),
    ):
        name = UserCode.name if kind is ModuleCall else kind.name
        monkeypatch.setattr(kind, method, noting(name, getattr(kind, method)))
    return found


@pytest.fixture
def deep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile graphs of four layers layer by layer, as graphs of 24 layers for users."""
    monkeypatch.setattr(partition, "FEWEST", 4)
