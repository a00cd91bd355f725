"""The executors, one per file. Each is one way to run a captured graph, as a rule is one way to rewrite it.

A graph asks its executors in order, see execution/captured_graph.py. The first executor that does not refuse
runs the call.
"""

from __future__ import annotations

from typing import Any, Protocol

from te_transform.execution.call_context import CallContext


class Executor(Protocol):
    """The protocol of executors, which run captured graphs.

    Attributes:
        name: completes "did not run ..." in the report's table of fallbacks.
    """

    name: str

    def refuse(self, call: CallContext) -> str | None:
        """Return why the executor cannot run the call, or None if it can."""

    def run(self, call: CallContext) -> Any:
        """Run a call that was not refused."""
