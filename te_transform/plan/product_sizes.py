"""The sizes of fused matrix products, and the size from which each is faster than the captured operations.

execution/small_batch.py applies the limit at run time, active.py explains it for the example's sizes, and
cost.py predicts by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import fx

from te_transform.backends import limits
from te_transform.graph.nodes import shape_of
from te_transform.plan.match import Site


class ProductSize(NamedTuple):
    """The size of a fused product.

    Attributes:
        rows: the rows of its input, which may be symbolic.
        width: the smaller side of its weight.
        gains: True if the product is faster fused without FP8 and without CUDA graphs.
    """

    rows: Any
    width: int
    gains: bool

    def least_rows(self, in_fp8: bool, in_cuda_graphs: bool) -> float:
        """Return the number of rows from which the product is faster fused, or infinity."""
        if not (self.gains or in_fp8 or in_cuda_graphs):
            return math.inf
        return limits.break_even_rows(self.width, in_fp8, in_cuda_graphs)


def size_of_product(site: Site, sizes: Callable[[fx.Node], Sequence[Any]] = shape_of) -> ProductSize:
    """Return the size of a site's first product; `sizes` returns the shape of a node."""
    x, weight = site.node.args[0], site.node.args[site.fused.PRODUCTS[0]]
    return ProductSize(math.prod(sizes(x)[:-1]), min(sizes(weight)), site.fused.gains)
