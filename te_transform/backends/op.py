"""What every op of a graph is, and every fused one: a module without parameters, called with the tensors of
one site."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn


class GraphOp(nn.Module):
    """A module that stands in a captured graph for operations, and is none of the user's model.

    A call of it is one of its forward alone: hooks for all modules of a process, and what somebody has put in
    the place of nn.Module.__call__, are for the modules of the model, and the graph has what they do there.
    """

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.forward(*arguments, **keywords)


class FusedOp(GraphOp):
    """A fused op of a graph: it gets its weights as arguments, because one graph may serve many layers.

    `PRODUCTS` has the positions, among the call's arguments, of the weights [out, in] of its matrix products.
    These run in a recipe that is on if `in_fp8` is true, unless the state of a parameter says otherwise.
    `gains` tells whether they are faster than what was captured in the weights' own dtype, uncompiled, too:
    norms, and activations without a gate, are one kernel of PyTorch's each (H100, docs/benchmarks.md).
    `plain_calls` counts, by reason, the calls that ran in plain PyTorch though the backend has a kernel for
    them.
    """

    PRODUCTS: tuple[int, ...] = ()
    in_fp8 = True
    gains = False

    def __init__(self) -> None:
        super().__init__()
        self.plain_calls: Counter[str] = Counter()
