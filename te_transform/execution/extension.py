"""The protocol of extensions that change calls from outside of the core, such as layer dropping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from te_transform.execution.call_context import ModuleCall
from te_transform.execution.executors import Executor


class Extension(Protocol):
    """An extension of one converted model."""

    def is_on(self) -> bool:
        """Return True if calls of this step may compute something different from the user's own code."""

    def run(self, call: ModuleCall, run: Callable[[ModuleCall], Any]) -> Any:
        """Run a call of the model, of a part of it, or of a block, and return its output."""

    def executor(self, graph: Any) -> Executor:
        """Return the executor that a captured graph asks before its own."""

    def attach(self, block: nn.Module) -> None:
        """Note a block that is captured separately from now on."""
