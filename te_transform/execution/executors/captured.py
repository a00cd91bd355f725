"""The graph as dynamo captured it, for observed calls and for calls that fused products do not speed up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import cached_property
from typing import Any

from te_transform.backends import plain
from te_transform.execution.call_context import CallContext
from te_transform.execution.lower import ScatteredGroups, is_as_captured, lower_unfused
from te_transform.execution.pieces import by_layers
from te_transform.plan.match import Plan, Site
from te_transform.plan.options import Options

log = logging.getLogger(__name__)


class Captured:
    """The executor that runs every call, without fused matrix products.

    It fuses attention, and norms and activations of many operations.

    Args:
        plan: of the captured graph.
        scattered: the list that collects groups of parameters that a call finds scattered, see Join.
        without: sites that run as captured.
        options: of the conversion.
        tell: receives a sentence if the graph cannot be made.
    """

    name = "captured"

    def __init__(
        self,
        plan: Plan,
        scattered: ScatteredGroups,
        without: Collection[Site],
        options: Options,
        tell: Callable[[str], None],
    ):
        self.plan, self.scattered, self.without, self.tell = plan, scattered, without, tell
        self.calls = 0  # the number of calls so far
        products = [site for site in plan.sites if site.is_product and site not in without]
        self.has_rotations = not any(site.fused.gains for site in products)
        # ops that gain if a kernel runs a call, and that count the calls without a kernel
        self.in_kernels = [
            site.fused
            for site in plan.sites
            if site not in without and not site.is_product
            if options.backend.HAS_KERNELS or isinstance(site.fused, plain.PaddedLinear)
        ]

    def refuse(self, call: CallContext) -> None:
        """Return None: the graph runs any call."""

    def run(self, call: CallContext) -> Any:
        """Run the graph. An observed call runs no fused op at all."""
        if call.observe_only:
            return self.plan.captured.forward(*call.args)
        self.calls += 1
        return self.graph(*call.args)

    @cached_property
    def graph(self) -> Callable[..., Any]:
        """The graph, which is made at its first call. If it cannot be made, it is the captured graph."""
        try:
            return by_layers(
                lower_unfused(self.plan, self.scattered, self.without, rotations=self.has_rotations)
            )
        except Exception as error:
            log.warning("a graph runs as captured in calls of few tokens", exc_info=error)
            self.tell(f"{type(error).__name__}: {error}")
            return by_layers(self.plan.captured)

    @cached_property
    def changes_nothing(self) -> bool:
        """True if each operation runs as captured in calls without a kernel."""
        return is_as_captured(self.plan, self.without)
