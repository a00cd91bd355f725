"""The graph in which fused ops replace the operations of its sites."""

from __future__ import annotations

from typing import Any

from te_transform.execution.call_context import CallContext
from te_transform.execution.graph_version import GraphVersion
from te_transform.execution.lower import lower
from te_transform.execution.pieces import by_layers
from te_transform.execution.small_batch import SmallBatch

_CONVERTING = "the conversion's own calls run as captured"


class Fused:
    """The executor of calls with enough tokens, and of all calls that a faster executor refused.

    Args:
        version: the graph, and its sites that run as captured.
    """

    name = "fused"

    def __init__(self, version: GraphVersion):
        self.graph = by_layers(lower(version.plan, version.scattered, version.disabled))
        self.small_batch = SmallBatch(version)
        self.is_compiled = bool(version.options.compile or version.options.graphs)
        self.calls = 0  # the number of calls so far

    def refuse(self, call: CallContext) -> str | None:
        """Return why the call runs as captured: it is observed, or has too few tokens."""
        if call.observe_only:
            return _CONVERTING
        # calls that a compiler or a recording refused, and observed calls, run with all sites fused
        if call.is_observed or self.is_compiled or call.is_transformed:
            return None
        return self.small_batch.refuse(call)

    def run(self, call: CallContext) -> Any:
        """Run the graph."""
        self.calls += 1
        return self.graph(*call.args)
