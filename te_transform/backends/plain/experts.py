"""The experts of mixture models, as products by groups of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_transform.backends.groups import of_groups
from te_transform.backends.op import FusedOp
from te_transform.backends.plain.products import GATES
from te_transform.backends.tracing import transformed
from te_transform.graph import ops

PAIRS = "pairs"  # gates in every other column


class Experts(FusedOp):
    """fc2(activation(fc1(x))) by the experts that each token was sent to, summed up by their weights.

    Args:
        activation: an op of graph/ops.py.
        gated: which part of fc1's columns is activated, and multiplied with the rest; "pairs" has gates in
            every other column, from the first one on.
        limit: what the gate may be at most, and the rest at most and at least.
        offset: is added to the rest.
    """

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
        """x [tokens, hidden], experts and weights [tokens, choices], fc1_weight [experts, hidden, ffn],
        fc2_weight [experts, ffn, hidden], a bias of each expert -> [tokens, hidden] in `dtype`."""
        order, places, groups, ends = routed(experts, len(fc1_weight))
        rows = ops.grouped_mm(taken(x, order, places, experts.shape[-1]), fc1_weight, ends)
        if fc1_bias is not None:
            # a bias in float32 is added in place, so that what it is added to is in 16 bits again
            rows = (rows + of_groups(fc1_bias, groups, ends)).to(rows.dtype)
        out = ops.grouped_mm(self.activated(rows), fc2_weight, ends)
        if fc2_bias is not None:
            out = out + of_groups(fc2_bias, groups, ends)
        found = taken(out, places, order).unflatten(0, experts.shape)
        return (found * weights.unsqueeze(-1)).sum(1).to(dtype)

    def activated(self, hidden: Tensor) -> Tensor:
        """The activation of what the first product has made."""
        activate = getattr(ops, self.activation)
        if self.gated == GATES[0]:
            return activate(hidden)
        first, second = (hidden[..., ::2], hidden[..., 1::2]) if self.gated == PAIRS else hidden.chunk(2, -1)
        gate, beside = (second, first) if self.gated == GATES[2] else (first, second)
        if self.limit is not None:
            gate, beside = gate.clamp(max=self.limit), beside.clamp(-self.limit, self.limit)
        return activate(gate) * (beside + self.offset if self.offset else beside)

    def extra_repr(self) -> str:
        return self.activation


def routed(experts: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """How tokens get to their experts [tokens, choices], and back: see ops.

    Returns:
        The order of the choices by expert, the place of each choice in it, the expert of each place, and
        where the group of each expert ends.
    """
    chosen, order = experts.flatten().sort()
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), dtype=torch.int64, device=order.device)
    numbers = torch.arange(groups, device=chosen.device, dtype=chosen.dtype)
    return order, places, chosen, torch.searchsorted(chosen, numbers, right=True, out_int32=True)


def taken(x: Tensor, order: Tensor, places: Tensor, choices: int = 1) -> Tensor:
    """x[order // choices], whose gradient is gathered by the inverse of the order, `places`, where PyTorch
    would add up rows one by one."""
    return x[order // choices] if transformed() else _Taken.apply(x, order, places, choices)


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(order, places)
        ctx.choices = choices
        return x[order // choices]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        order, places = ctx.saved_tensors
        rows = taken(grad, places, order)
        if ctx.choices > 1:  # by a reshape, which several gradients at once have too
            rows = rows.reshape(-1, ctx.choices, rows.shape[-1]).sum(1)
        return rows, None, None, None
