"""The graph as dynamo captured it, for observed calls and for calls that fused products do not speed up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property
from typing import Any

from te_transform.backends import plain
from te_transform.execution.call_context import CallContext
from te_transform.execution.graph_version import GraphVersion
from te_transform.execution.lower import is_as_captured, lower_unfused
from te_transform.execution.pieces import by_layers
from te_transform.graph.errors import in_full

log = logging.getLogger(__name__)


class Captured:
    """The executor that runs every call, without fused matrix products.

    It fuses attention, and norms and activations of many operations.

    Args:
        version: the graph, and its sites that run as captured.
    """

    name = "captured"

    def __init__(self, version: GraphVersion):
        self.version = version
        self.calls = 0  # the number of calls so far
        products = [site for site in version.sites if site.is_product]
        self.fuses_rotations = not any(site.fused.gains for site in products)
        # ops that are faster in a kernel, and count their calls without one
        self.kernel_ops = [
            site.fused
            for site in version.sites
            if not site.is_product
            if version.options.backend.HAS_KERNELS or isinstance(site.fused, plain.PaddedLinear)
        ]

    def refuse(self, call: CallContext) -> None:
        """Return None: the graph runs any call."""

    def run(self, call: CallContext) -> Any:
        """Run the graph. An observed call runs no fused op at all."""
        if call.observe_only:
            return self.version.plan.captured.forward(*call.args)
        self.calls += 1
        return self.graph(*call.args)

    @cached_property
    def graph(self) -> Callable[..., Any]:
        """The graph, which is made at its first call. If it cannot be made, it is the captured graph."""
        version = self.version
        try:
            plan, scattered, disabled = version.plan, version.scattered, version.disabled
            return by_layers(lower_unfused(plan, scattered, disabled, rotations=self.fuses_rotations))
        except Exception as error:
            log.warning("a graph runs as captured in calls of few tokens", exc_info=error)
            version.tell(in_full(error))
            return by_layers(version.plan.captured)

    @cached_property
    def changes_nothing(self) -> bool:
        """True if each operation runs as captured in calls without a kernel."""
        return is_as_captured(self.version.plan, self.version.disabled)
