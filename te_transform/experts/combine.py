"""Sum the weighted results of each token's experts in one pass, in fp32.

PyTorch weights, sorts and sums in three passes over [tokens * choices, width]. TE's kernel is less exact: the
error of a sum over three choices is 4.4e-3 in TE 2.20, and 3.4e-3 in PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_transform.experts.groups import summed_by_group


def combine_rows(
    y: Tensor,
    places: Tensor,
    weights: Tensor | None,
    bias: Tensor | None = None,
    experts: Tensor | None = None,
) -> Tensor:
    """Return the weighted sum of each token's rows: [tokens, width] in the dtype of y.

    Args:
        y: the rows, [tokens * choices, width].
        places: the rows of each token, [tokens, choices].
        weights: the weight of each choice, [tokens, choices]; None: all are 1.
        bias: a bias per expert, [experts, width], added to the rows of that expert.
        experts: the expert of each choice, [tokens, choices]; needed with a bias.
    """
    if y.is_cuda:
        from te_transform.experts import combine_kernel

        return combine_kernel.combine_rows(*_without_gaps(y, places, weights, bias, experts))
    rows = _gathered_rows(y, places, bias, experts)
    return (rows if weights is None else rows * weights.float().unsqueeze(-1)).sum(1).to(y.dtype)


def combine_backward(
    grad: Tensor, y: Tensor, places: Tensor, weights: Tensor, bias: Tensor | None, experts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of y and of the weights."""
    if y.is_cuda:
        from te_transform.experts import combine_kernel

        given = _without_gaps(grad, y, places, weights, bias, experts)
        return combine_kernel.combine_backward(*given)
    wide = grad.float().unsqueeze(1)
    rows = torch.empty_like(y)
    rows[places] = (wide * weights.float().unsqueeze(-1)).to(y.dtype)
    return rows, (wide * _gathered_rows(y, places, bias, experts)).sum(-1).to(weights.dtype)


def _without_gaps(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _gathered_rows(y: Tensor, places: Tensor, bias: Tensor | None, experts: Tensor | None) -> Tensor:
    return y[places].float() if bias is None else y[places].float() + bias[experts].float()


class Combined(torch.autograd.Function):
    """The function combine(), with gradients.

    `groups` [rows] has the expert of each row of y, `ends` [experts] the first row after each expert.
    """

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
        return combine_rows(y, places, weights, bias, experts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, groups, ends = ctx.saved_tensors
        rows, of_weights = combine_backward(grad, *saved)
        of_bias = summed_by_group(rows, groups, ends) if ctx.needs_input_grad[3] else None
        return rows, None, of_weights, of_bias, None, None, None


class Sent(torch.autograd.Function):
    """The function x[order // choices]: a row per choice, sorted by expert. Its gradient is a combine().

    `places` [tokens, choices] has the rows of each token.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x[order // places.shape[-1]]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return combine_rows(grad, *ctx.saved_tensors, None), None, None
