"""Compute a gated activation with biases or limits in one pass.

PyTorch adds the bias, clamps, activates and multiplies in separate passes over [tokens * choices, width].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_transform.experts.groups import summed_by_group


class Gate(NamedTuple):
    """The function gate * sigmoid(slope * gate) * (beside + offset).

    `beside` is clamped to [-limit, limit], the gate from above only. With `pairs`, gates are every other
    column, else the first half.
    """

    slope: float
    limit: float
    offset: int
    pairs: bool


def gated(hidden: Tensor, bias: Tensor | None, groups: Tensor, gate: Gate) -> Tensor:
    """Compute the gate of each row: [rows, width] in the dtype of `hidden`.

    Args:
        hidden: gates and what is beside them, [rows, 2 * width], in 16 bits.
        bias: a bias per expert, [experts, 2 * width].
        groups: the expert of each row, [rows].
        gate: the function.
    """
    if hidden.is_cuda:
        from te_transform.experts import gated_kernel

        return gated_kernel.gated(hidden, bias, groups, *gate)
    first, beside = _gate_and_up(hidden, bias, groups, gate)
    first, beside = first.clamp(max=gate.limit), beside.clamp(-gate.limit, gate.limit)
    return (first * (gate.slope * first).sigmoid() * (beside + gate.offset)).to(hidden.dtype)


def gated_backward(grad: Tensor, hidden: Tensor, bias: Tensor | None, groups: Tensor, gate: Gate) -> Tensor:
    """Return the gradient of `hidden`; the gradient of each row's bias is the same."""
    if hidden.is_cuda:
        from te_transform.experts import gated_kernel

        return gated_kernel.gated_backward(grad.contiguous(), hidden, bias, groups, *gate)
    first, beside = _gate_and_up(hidden, bias, groups, gate)
    counts, beside_counts = first <= gate.limit, beside.abs() <= gate.limit
    first, beside = first.clamp(max=gate.limit), beside.clamp(-gate.limit, gate.limit)
    share = (gate.slope * first).sigmoid()
    slope = share * (1 + gate.slope * first * (1 - share))
    parts = (  # a clamped value has no gradient, even if its factor is NaN
        torch.where(counts, grad * slope * (beside + gate.offset), 0.0),
        torch.where(beside_counts, grad * first * share, 0.0),
    )
    joined = torch.stack(parts, -1).flatten(-2) if gate.pairs else torch.cat(parts, -1)
    return joined.to(hidden.dtype)


def _gate_and_up(hidden: Tensor, bias: Tensor | None, groups: Tensor, gate: Gate) -> tuple[Tensor, Tensor]:
    wide = hidden.float() if bias is None else hidden.float() + bias[groups].float()
    return (wide[:, ::2], wide[:, 1::2]) if gate.pairs else wide.chunk(2, -1)


class Gated(torch.autograd.Function):
    """The function gated(), with gradients."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, bias: Tensor | None, groups: Tensor, ends: Tensor, gate: Gate
    ) -> Tensor:
        hidden = hidden.contiguous()
        ctx.save_for_backward(hidden, bias, groups, ends)
        ctx.gate = gate
        return gated(hidden, bias, groups, gate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, bias, groups, ends = ctx.saved_tensors
        rows = gated_backward(grad, hidden, bias, groups, ctx.gate)
        of_bias = summed_by_group(rows, groups, ends) if ctx.needs_input_grad[1] else None
        return rows, of_bias, None, None, None
