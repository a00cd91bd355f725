"""The version of a captured graph that its executors are made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from te_transform.canonicalize import written
from te_transform.execution.division import RankGroup
from te_transform.execution.lower import ScatteredGroups
from te_transform.plan.match import Plan, Site
from te_transform.plan.options import Options


@dataclass(frozen=True, eq=False)
class GraphVersion:
    """A captured graph with a choice of sites that run as captured.

    Attributes:
        plan: the plan of the captured graph.
        disabled: the sites that run as captured.
        options: the options of the conversion.
        scattered: the list that collects groups of parameters that a call finds scattered, see Join.
        tell: receives sentences for the report.
        ranks: the ranks of a divided model, or None.
    """

    plan: Plan
    disabled: frozenset[Site]
    options: Options
    scattered: ScatteredGroups
    tell: Callable[[str], None]
    ranks: RankGroup | None

    @property
    def sites(self) -> list[Site]:
        """The sites that run fused."""
        return [site for site in self.plan.sites if site not in self.disabled]

    @cached_property
    def writes(self) -> list[int]:
        """The indices of the arguments that the graph writes to."""
        graph = self.plan.captured.graph
        seen = written(graph)
        return [index for index, node in enumerate(graph.find_nodes(op="placeholder")) if node in seen]
