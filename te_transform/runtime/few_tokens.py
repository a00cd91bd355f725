"""A captured graph for calls of so few tokens that the CPU sets the pace.

Fused products gain nothing there, in TE's kernels nor in plain PyTorch, and each of them asks first what it
may do: what was captured is faster. Without a gated MLP it is for any number of them, but in a recipe, and
where CUDA graphs launch the kernels.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

from te_transform.backends import limits, plain
from te_transform.backends.joined import state_of
from te_transform.backends.quantized import is_quantized
from te_transform.backends.tracing import in_backward
from te_transform.graph.nodes import shape_of, value
from te_transform.plan.match import Plan, Site
from te_transform.plan.options import Options
from te_transform.runtime.lower import Apart, is_as_captured, lower_unfused
from te_transform.runtime.pieces import in_pieces

log = logging.getLogger(__name__)

_GAINS_NOTHING = "a graph without gated MLPs, as fast as it was captured"
_KNOWN = 4096  # sizes whose answers are kept: one for each length that a generation goes through


class Work(NamedTuple):
    """The rows of a product, the smaller side of its weight, and whether it gains in the weights' dtype."""

    rows: Any
    width: int
    gains: bool


class FewTokens:
    """The graph as it was captured, but for attention, and for norms and activations of many operations.

    Args:
        plan: of the captured graph.
        apart: where groups are noted that a call finds apart, see Join.
        without: its sites that run as they were captured.
        options: of the conversion.
        failures: gets a sentence if the graph cannot be made.
    """

    def __init__(
        self, plan: Plan, apart: Apart, without: Collection[Site], options: Options, failures: list[str]
    ):
        self.plan, self.apart, self.without, self.backend = plan, apart, without, options.backend
        self.failures = failures
        self.products = [site for site in plan.sites if site.is_product and site not in without]
        self.gains = any(site.fused.gains for site in self.products)
        self.fuses_all = options.recipe is not None or options.graphs
        placeholders = [node for node in plan.captured.graph.nodes if node.op == "placeholder"]
        names = {node.name: place for place, node in enumerate(placeholders)}
        weights = [weight for site in self.products for group in site.weights for weight in group]
        self.first = names[weights[0].meta["origin"]] if weights else 0
        # the kernels of weights that are held in FP8 alone read bytes, at any size
        self.is_possible = bool(weights) and not any(is_quantized(value(weight)) for weight in weights)
        self.symbols = {
            place: value(node).node.expr
            for place, node in enumerate(placeholders)
            if isinstance(value(node), torch.SymInt)
        }
        # what gains where a kernel takes a call, and counts the calls that none takes
        self.in_kernels = [
            site.fused
            for site in plan.sites
            if site not in without and not site.is_product
            if self.backend.HAS_KERNELS or isinstance(site.fused, plain.PaddedLinear)
        ]
        self.work = {
            Work(
                _expression(math.prod(shape_of(site.node.args[0])[:-1])),
                min(shape_of(site.node.args[site.fused.PRODUCTS[0]])),
                site.fused.gains,
            )
            for site in self.products
        }
        # by the sizes of a call: the work of its products, and what the last one was told
        self.rows: dict[tuple[int, ...], list[Work] | None] = {}
        self.told: dict[tuple[int, ...], bool] = {}

    @cached_property
    def run(self) -> Callable[..., Any]:
        """The graph, made when it first runs; one that cannot be made is what was captured."""
        try:
            return in_pieces(lower_unfused(self.plan, self.apart, self.without, rotations=not self.gains))
        except Exception as error:
            log.warning("a graph of few tokens runs as it was captured", exc_info=error)
            self.failures.append(f"{type(error).__name__}: {error}")
            return in_pieces(self.plan.captured)

    @cached_property
    def changes_nothing(self) -> bool:
        """Whether each operation runs as it was captured, where no kernel takes a call."""
        return is_as_captured(self.plan, self.without)

    @property
    def takes_any_number(self) -> bool:
        """Whether no call gains from fused products, however many tokens it has."""
        return self.is_possible and not (self.gains or self.fuses_all or limits.at_any_size)

    def takes(self, arguments: Sequence[Any]) -> bool:
        """Whether a call with these arguments has so few tokens; counts its products as plain calls then.

        A checkpoint repeats what the forward did, whose recipe need not be on any more.
        """
        if not self.is_possible or limits.at_any_size:
            return False
        sizes = tuple(arguments[place] for place in self.symbols)
        if not all(isinstance(size, int) for size in sizes):  # nested and fake tensors have symbols
            return True
        if sizes not in self.rows:
            if len(self.rows) >= _KNOWN:
                self.rows.clear()
                self.told.clear()
            self.rows[sizes] = self._rows(sizes)
        if not (in_backward() and sizes in self.told):
            self.told[sizes] = self._has_few(self.rows[sizes], arguments)
        return self.told[sizes]

    def _has_few(self, rows: list[Work] | None, arguments: Sequence[Any]) -> bool:
        # kernels add gradients to buffers that accumulate() made
        if rows is None or state_of(arguments[self.first]).gradients is not None:
            return False
        in_fp8 = self.backend.recipe_now() is not None
        gaining = [each for each in rows if each.gains or in_fp8 or limits.replayed]
        reasons = [limits.too_small(each.rows, each.width, in_fp8) for each in gaining]
        if None in reasons:
            return False
        if self.backend.HAS_KERNELS:
            for site in self.products:
                site.fused.plain_calls[reasons[0] if reasons else _GAINS_NOTHING] += 1
        return True

    def _rows(self, sizes: Sequence[int]) -> list[Work] | None:
        """The work of the products at these sizes."""
        known = dict(zip(self.symbols.values(), sizes, strict=True))
        found = [each._replace(rows=_number(each.rows, known)) for each in self.work]
        return None if any(each.rows is None for each in found) else found


def _expression(size: int | torch.SymInt) -> Any:
    """A number, or what sympy has for it."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _number(expression: Any, known: dict[Any, int]) -> int | None:
    """None where only the values of a call tell."""
    if isinstance(expression, int):
        return expression
    return int(expression.xreplace(known)) if expression.free_symbols <= known.keys() else None
