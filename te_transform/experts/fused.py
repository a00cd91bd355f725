"""Compute experts of mixture models by grouped matrix products."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, fx

from te_transform.backends.op import FusedOp, StepMemory
from te_transform.backends.plain.products import GATES, gate_times
from te_transform.backends.tracing import transformed
from te_transform.experts.groups import Indexed, of_groups
from te_transform.graph import ops
from te_transform.graph.nodes import bytes_of, dtype_of, numel_of, shape_of

PAIRS = "pairs"  # gates are every other column


class Experts(FusedOp):
    """The weighted sum of fc2(activation(fc1(x))) over the experts that each token chose.

    Args:
        activation: the name of an op of graph/ops.py.
        gated: the part of fc1's columns that is activated, and multiplied with the rest; "pairs" means every
            other column, from the first on.
        limit: the maximum of the gate, and the maximum absolute value of the rest.
        offset: a number that is added to the rest.
    """

    OUTSIDE_RECIPE = (
        "with a recipe, too, experts compute in their weights' own dtype: casts to FP8 would take most of "
        "the time that FP8 products save"
    )

    def __init__(self, *, activation: str, gated: str = "no", limit: float | None = None, offset: int = 0):
        super().__init__()
        self.activation, self.gated, self.limit, self.offset = activation, gated, limit, offset

    def forward(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        fc1_weight: Tensor,
        fc2_weight: Tensor,
        dtype: torch.dtype,
        fc1_bias: Tensor | None = None,
        fc2_bias: Tensor | None = None,
    ) -> Tensor:
        """Compute the experts: [tokens, hidden] in `dtype`.

        Args:
            x: the tokens, [tokens, hidden].
            experts: the indices of the experts that each token chose, [tokens, choices].
            weights: the weight of each choice, [tokens, choices].
            fc1_weight: [experts, hidden, ffn], or twice as wide if gated.
            fc2_weight: [experts, ffn, hidden].
            dtype: the dtype of the result.
            fc1_bias: a bias per expert.
            fc2_bias: a bias per expert.
        """
        order, places, groups, ends = routed(experts, len(fc1_weight))
        rows = ops.grouped_mm(taken(x, order, places, experts.shape[-1]), fc1_weight, ends)
        if fc1_bias is not None:
            # models add a float32 bias in place, so the sum is in 16 bits again
            rows = (rows + of_groups(fc1_bias, groups, ends)).to(rows.dtype)
        out = ops.grouped_mm(self.activated(rows), fc2_weight, ends)
        if fc2_bias is not None:
            out = out + of_groups(fc2_bias, groups, ends)
        chosen = taken(out, places, order).unflatten(0, experts.shape)
        return (chosen * weights.unsqueeze(-1)).sum(1).to(dtype)

    def activated(self, hidden: Tensor) -> Tensor:
        """Apply the activation, and the gate, to the first product."""
        activate = getattr(ops, self.activation)
        if self.gated == GATES[0]:
            return activate(hidden)
        first, second = (hidden[..., ::2], hidden[..., 1::2]) if self.gated == PAIRS else hidden.chunk(2, -1)
        gate, beside = (second, first) if self.gated == GATES[2] else (first, second)
        return gate_times(activate, gate, beside, self.limit, self.offset)

    def step_memory(self, *arguments: fx.Node) -> StepMemory:
        """Predict the memory of a training step.

        Saved are the input and output of each product, one row per choice of an expert, and the order of the
        rows.
        """
        experts, fc1, fc2 = arguments[1], *arguments[3:5]
        size, rows = dtype_of(fc1).itemsize, numel_of(experts)
        inner, outs, hidden = shape_of(fc2)[1], shape_of(fc1)[2], shape_of(fc1)[1]
        kept = rows * ((inner + outs + 2 * hidden) * size + 8 + 4)
        return StepMemory(kept, rows * (inner + outs) * size, bytes_of(fc1) + bytes_of(fc2))

    def extra_repr(self) -> str:
        return self.activation


def routed(experts: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort the choices of experts [tokens, choices] by expert.

    Returns:
        The order of the choices by expert, the row of each choice, the expert of each row, and the first row
        after each expert.
    """
    chosen, order = experts.flatten().sort()
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), dtype=torch.int64, device=order.device)
    numbers = torch.arange(groups, device=chosen.device, dtype=chosen.dtype)
    return order, places, chosen, torch.searchsorted(chosen, numbers, right=True, out_int32=True)


def taken(x: Tensor, order: Tensor, places: Tensor, choices: int = 1) -> Tensor:
    """Return x[order // choices]. The gradient is gathered by `places`, the inverse of the order."""
    tokens, gradient = order // choices, partial(_taken_back, choices)
    return x[tokens] if transformed() else Indexed.apply(x, tokens, gradient, order, places)


def _taken_back(choices: int, grad: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """Return the gradient of taken()."""
    rows = taken(grad, places, order)
    # reshape also works for several gradients at once, under vmap
    return rows if choices == 1 else rows.reshape(-1, choices, rows.shape[-1]).sum(1)
