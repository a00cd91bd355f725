"""The base classes of ops in a graph: modules without parameters, called with the tensors of a site."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from torch import nn


class GraphOp(nn.Module):
    """A module that replaces operations in a captured graph. It does not belong to the user's model.

    Calling it runs its forward only. Global module hooks and replacements of nn.Module.__call__ apply to the
    modules of the model, and the captured graph already contains their operations.
    """

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.forward(*arguments, **keywords)


class StepMemory(NamedTuple):
    """The bytes of one fused op in a training step."""

    kept: int  # saved for the backward, besides the inputs
    transient: int  # allocated and freed within the backward
    gradients: int  # of the weights


class FusedOp(GraphOp):
    """A fused op of a graph. It gets its weights as arguments, because one graph may serve many layers.

    Attributes:
        PRODUCTS: the positions of the weights [out, in] of its matrix products among the arguments of a call.
        in_fp8: True if its matrix products run in the active recipe, unless the state of a parameter says
            otherwise.
        gains: True if the op is also faster than the captured code in the dtype of the weights, uncompiled.
            Norms, and activations without a gate, are already one kernel each in PyTorch (H100,
            docs/benchmarks.md).
        plain_calls: the number of calls that ran in plain PyTorch although the backend has a kernel, by
            reason.
        OUTSIDE_RECIPE: a note for the report of a conversion with a recipe, if the op computes products
            outside of the recipe.
    """

    PRODUCTS: tuple[int, ...] = ()
    in_fp8 = True
    gains = False
    OUTSIDE_RECIPE = ""

    def __init__(self) -> None:
        super().__init__()
        self.plain_calls: Counter[str] = Counter()

    def step_memory(self, *arguments: Any) -> StepMemory | None:
        """Return the predicted memory of a call in a training step, or None to derive it from `PRODUCTS`.

        Args:
            arguments: The graph nodes of the call's arguments; constants as they are.
        """
        return None
