"""The functions of te_transform/experts/triton_kernels.py in plain PyTorch, for tests without a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_transform.experts.kernels import Gate


def combine_rows(
    y: Tensor, places: Tensor, weights: Tensor | None, bias: Tensor | None, experts: Tensor | None
) -> Tensor:
    """Return the weighted sum of each token's rows."""
    rows = _gathered_rows(y, places, bias, experts)
    return (rows if weights is None else rows * weights.float().unsqueeze(-1)).sum(1).to(y.dtype)


def combine_backward(
    grad: Tensor, y: Tensor, places: Tensor, weights: Tensor, bias: Tensor | None, experts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of y and of the weights."""
    wide = grad.float().unsqueeze(1)
    rows = torch.empty_like(y)
    rows[places] = (wide * weights.float().unsqueeze(-1)).to(y.dtype)
    return rows, (wide * _gathered_rows(y, places, bias, experts)).sum(-1).to(weights.dtype)


def _gathered_rows(y: Tensor, places: Tensor, bias: Tensor | None, experts: Tensor | None) -> Tensor:
    return y[places].float() if bias is None else y[places].float() + bias[experts].float()


def gated(hidden: Tensor, bias: Tensor | None, groups: Tensor, *fields: Any) -> Tensor:
    """Compute the gate of each row."""
    gate = Gate(*fields)
    first, beside = _gate_and_up(hidden, bias, groups, gate)
    first, beside = first.clamp(max=gate.limit), beside.clamp(-gate.limit, gate.limit)
    return (first * (gate.slope * first).sigmoid() * (beside + gate.offset)).to(hidden.dtype)


def gated_backward(grad: Tensor, hidden: Tensor, bias: Tensor | None, groups: Tensor, *fields: Any) -> Tensor:
    """Return the gradient of `hidden`."""
    gate = Gate(*fields)
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
