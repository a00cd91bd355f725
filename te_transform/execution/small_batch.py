"""The size rule: calls with few tokens run as captured, because the CPU is the bottleneck.

Fused matrix products do not speed up such calls, neither in TE's kernels nor in plain PyTorch. The checks of
each fused op also take CPU time. Without gated MLPs, fused products are not faster at any size, except in a
recipe and in CUDA graphs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from te_transform.backends import limits
from te_transform.backends.fp8.fp8_only import is_fp8_only
from te_transform.backends.fp8.registry import read_state
from te_transform.execution.call_context import CallContext
from te_transform.execution.call_sizes import expression_of, size_in_call, symbols_of
from te_transform.execution.graph_version import GraphVersion
from te_transform.graph.nodes import value
from te_transform.plan.product_sizes import ProductSize, size_of_product

_GAINS_NOTHING = "a graph without gated MLPs, which is as fast as captured"
_DATA_DEPENDENT = "the sizes of the call depend on its values"
_KNOWN = 4096  # the maximum number of cached sizes; generation adds one per length


class SmallBatch:
    """The size rule of one captured graph.

    Args:
        version: the graph, and its sites that run as captured.
    """

    def __init__(self, version: GraphVersion):
        plan, options = version.plan, version.options
        self.backend = options.backend
        self.products = [site for site in version.sites if site.is_product]
        self.gains = any(site.fused.gains for site in self.products)
        self.fuses_all = options.recipe is not None or options.graphs
        placeholders = plan.captured.graph.find_nodes(op="placeholder")
        names = {node.name: index for index, node in enumerate(placeholders)}
        weights = [weight for site in self.products for group in site.weights for weight in group]
        self.first_weight = names[weights[0].meta["origin"]] if weights else 0
        # FP8-only weights have kernels of their own at any size
        self.is_possible = bool(weights) and not any(is_fp8_only(value(weight)) for weight in weights)
        self.symbols = symbols_of(placeholders)
        self.sizes = {
            size._replace(rows=expression_of(size.rows)) for size in map(size_of_product, self.products)
        }
        # by the sizes in the arguments: the last answer of refuse(), and the sizes of the products
        self.known: dict[tuple[int, ...], tuple[str | None, list[ProductSize] | None]] = {}

    @property
    def never_gains(self) -> bool:
        """True if fused products gain nothing at any size."""
        return self.is_possible and not (self.gains or self.fuses_all or limits.ignore_size_limits)

    def refuse(self, call: CallContext) -> str | None:
        """Return why fused products gain nothing in a call, or None if they gain.

        Counts the products as plain calls. A checkpoint repeats the forward's decision, because the recipe
        may no longer be active.
        """
        if not self.is_possible or limits.ignore_size_limits:
            return None
        arguments = call.args
        sizes = tuple(arguments[index] for index in self.symbols)
        if not all(isinstance(size, int) for size in sizes):  # sizes of nested and fake tensors are symbols
            return _DATA_DEPENDENT
        known = self.known.get(sizes)
        if known is not None and call.in_backward:
            return known[0]
        if known is None and len(self.known) >= _KNOWN:
            self.known.clear()
        products = self._products_at(sizes) if known is None else known[1]
        self.known[sizes] = why, _ = self._why(products, arguments), products
        return why

    def _why(self, products: list[ProductSize] | None, arguments: Sequence[Any]) -> str | None:
        # under accumulate(), kernels must add gradients to its buffers
        if products is None or read_state(arguments[self.first_weight]).gradients is not None:
            return None
        in_fp8 = self.backend.recipe_now() is not None
        is_replayed = bool(limits.replayed)
        gaining = [size for size in products if size.least_rows(in_fp8, is_replayed) < math.inf]
        reasons = [limits.too_small(size.rows, size.width, in_fp8) for size in gaining]
        if None in reasons:
            return None
        why = reasons[0] if reasons else _GAINS_NOTHING
        if self.backend.HAS_KERNELS:
            for site in self.products:
                site.fused.plain_calls[why] += 1
        return why

    def _products_at(self, sizes: Sequence[int]) -> list[ProductSize] | None:
        """Return the sizes of the products in a call of these sizes, or None if they depend on the data."""
        known = dict(zip(self.symbols.values(), sizes, strict=True))
        sizes_now = [size._replace(rows=size_in_call(size.rows, known)) for size in self.sizes]
        return None if any(size.rows is None for size in sizes_now) else sizes_now
