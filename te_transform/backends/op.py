"""What every fused op is: a module without parameters, called with the tensors of one site."""

from __future__ import annotations

from collections import Counter

from torch import nn


class FusedOp(nn.Module):
    """A fused op of a graph: it gets its weights as arguments, because one graph may serve many layers.

    `plain_calls` counts, by reason, the calls that ran in plain PyTorch though the backend has a kernel for them.
    """

    PRODUCTS: tuple[int, ...] = ()  # the positions, among the call's arguments, of the weights [out, in] it multiplies
    in_fp8 = False  # whether the precision plan lets its products run in the recipe

    def __init__(self) -> None:
        super().__init__()
        self.plain_calls: Counter[str] = Counter()
