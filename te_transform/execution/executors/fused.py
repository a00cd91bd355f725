"""The graph with the ops of its sites in the place of what they match."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from te_transform.execution.call_context import CallContext
from te_transform.execution.lower import ScatteredGroups, lower
from te_transform.execution.pieces import in_pieces
from te_transform.execution.small_batch import SmallBatch
from te_transform.plan.match import Plan, Site
from te_transform.plan.options import Options

_OBSERVED = "the conversion's own calls run as captured"


class Fused:
    """Runs calls of enough tokens, and all that a faster executor has refused.

    Args:
        plan: of the captured graph.
        scattered: where groups are noted that a call finds scattered, see Join.
        without: sites that run as captured.
        options: of the conversion.
    """

    name = "fused"

    def __init__(self, plan: Plan, scattered: ScatteredGroups, without: Collection[Site], options: Options):
        self.graph = in_pieces(lower(plan, scattered, without))
        self.small_batch = SmallBatch(plan, without, options)
        self.is_compiled = bool(options.compile or options.graphs)
        self.calls = 0  # that it ran

    def refuse(self, call: CallContext) -> str | None:
        """Return why the call runs as captured: it is observed, or of too few tokens."""
        if call.observe_only:
            return _OBSERVED
        # what a compiler or a recording refuses, and what somebody looks at, has all sites fused
        if call.is_observed or call.is_transformed or self.is_compiled:
            return None
        return self.small_batch.gains_nothing(call.args)

    def run(self, call: CallContext) -> Any:
        """Run the graph."""
        self.calls += 1
        return self.graph(*call.args)
