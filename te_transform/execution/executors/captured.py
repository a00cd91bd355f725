"""The graph as dynamo captured it: for calls in which fused products gain nothing, and for observed calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import cached_property
from typing import Any

from te_transform.backends import plain
from te_transform.execution.call_context import CallContext
from te_transform.execution.lower import ScatteredGroups, is_as_captured, lower_unfused
from te_transform.execution.pieces import in_pieces
from te_transform.plan.match import Plan, Site
from te_transform.plan.options import Options

log = logging.getLogger(__name__)


class Captured:
    """Runs every call: attention is fused, and norms and activations of many operations; products are not.

    Args:
        plan: of the captured graph.
        scattered: where groups are noted that a call finds scattered, see Join.
        without: sites that run as captured.
        options: of the conversion.
        tell: gets a sentence if the graph cannot be made.
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
        self.calls = 0  # that it ran
        products = [site for site in plan.sites if site.is_product and site not in without]
        self.has_rotations = not any(site.fused.gains for site in products)
        # what gains where a kernel takes a call, and counts the calls that none takes
        self.in_kernels = [
            site.fused
            for site in plan.sites
            if site not in without and not site.is_product
            if options.backend.HAS_KERNELS or isinstance(site.fused, plain.PaddedLinear)
        ]

    def refuse(self, call: CallContext) -> None:
        """Return None: the graph runs any call."""

    def run(self, call: CallContext) -> Any:
        """Run the graph; an observed call runs nothing fused at all."""
        if call.observe_only:
            return self.plan.captured.forward(*call.args)
        self.calls += 1
        return self.graph(*call.args)

    @cached_property
    def graph(self) -> Callable[..., Any]:
        """The graph, made when it first runs; one that cannot be made is what was captured."""
        try:
            return in_pieces(
                lower_unfused(self.plan, self.scattered, self.without, rotations=self.has_rotations)
            )
        except Exception as error:
            log.warning("a graph of few tokens runs as it was captured", exc_info=error)
            self.tell(f"{type(error).__name__}: {error}")
            return in_pieces(self.plan.captured)

    @cached_property
    def changes_nothing(self) -> bool:
        """True if each operation runs as it was captured, where no kernel takes a call."""
        return is_as_captured(self.plan, self.without)
