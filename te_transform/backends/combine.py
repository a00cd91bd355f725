"""What the experts of a token have made, summed up by their weights in fp32, in one pass.

PyTorch weights, sorts and sums in three passes over all tokens times their choices. TE's kernel is less exact
(TE 2.20: of three choices off by 4.4e-3, where PyTorch is by 3.4e-3).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_transform.backends.groups import summed_by_group


def combine(
    y: Tensor,
    places: Tensor,
    weights: Tensor | None,
    bias: Tensor | None = None,
    experts: Tensor | None = None,
) -> Tensor:
    """For each token the sum of its rows of y [rows, width], each times its weight or one.

    places [tokens, choices] are the rows, weights [tokens, choices] -> [tokens, width] in the dtype of y. A
    bias [experts, width] is added to the rows that are of the `experts` [tokens, choices].
    """
    if y.is_cuda:
        from te_transform.backends import combine_kernel

        return combine_kernel.combine(*_without_gaps(y, places, weights, bias, experts))
    rows = _read(y, places, bias, experts)
    return (rows if weights is None else rows * weights.float().unsqueeze(-1)).sum(1).to(y.dtype)


def combine_backward(
    grad: Tensor, y: Tensor, places: Tensor, weights: Tensor, bias: Tensor | None, experts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of y, each row of which is one choice's, and of the weights."""
    if y.is_cuda:
        from te_transform.backends import combine_kernel

        given = _without_gaps(grad, y, places, weights, bias, experts)
        return combine_kernel.combine_backward(*given)
    wide = grad.float().unsqueeze(1)
    rows = torch.empty_like(y)
    rows[places] = (wide * weights.float().unsqueeze(-1)).to(y.dtype)
    return rows, (wide * _read(y, places, bias, experts)).sum(-1).to(weights.dtype)


def _without_gaps(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _read(y: Tensor, places: Tensor, bias: Tensor | None, experts: Tensor | None) -> Tensor:
    return y[places].float() if bias is None else y[places].float() + bias[experts].float()


class Combined(torch.autograd.Function):
    """combine() of weights, and of biases, with its gradient; `groups` [rows] are the experts of the rows of
    y, and `ends` where they end."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        places: Tensor,
        weights: Tensor,
        bias: Tensor | None,
        experts: Tensor,
        groups: Tensor,
        ends: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(y, places, weights, bias, experts, groups, ends)
        return combine(y, places, weights, bias, experts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, groups, ends = ctx.saved_tensors
        rows, of_weights = combine_backward(grad, *saved)
        of_bias = summed_by_group(rows, groups, ends) if ctx.needs_input_grad[3] else None
        return rows, None, of_weights, of_bias, None, None, None


class Sent(torch.autograd.Function):
    """x[order // choices]: the rows of the tokens as their experts get them, of which each has `places`
    [tokens, choices]. Its gradient is summed up by combine()."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x[order // places.shape[-1]]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return combine(grad, *ctx.saved_tensors, None), None, None
