"""What the experts of a token have made, summed up by their weights in fp32, in one pass.

PyTorch weights, sorts and sums in three passes over all tokens times their choices. TE's kernel is less exact
(TE 2.20: of three choices off by 4.4e-3, where PyTorch is by 3.4e-3).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def combine(y: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """For each token the sum of its rows of y [rows, width], each times its weight or one.

    places [tokens, choices] are the rows, weights [tokens, choices] -> [tokens, width] in the dtype of y.
    """
    if y.is_cuda:
        from te_transform.backends import combine_kernel

        held = None if weights is None else weights.contiguous()
        return combine_kernel.combine(y.contiguous(), places.contiguous(), held)
    rows = y[places].float()
    return (rows if weights is None else rows * weights.float().unsqueeze(-1)).sum(1).to(y.dtype)


def combine_backward(grad: Tensor, y: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of y, each row of which is one choice's, and of the weights."""
    if y.is_cuda:
        from te_transform.backends import combine_kernel

        given = grad.contiguous(), y.contiguous(), places.contiguous(), weights.contiguous()
        return combine_kernel.combine_backward(*given)
    wide = grad.float().unsqueeze(1)
    rows = torch.empty_like(y)
    rows[places] = (wide * weights.float().unsqueeze(-1)).to(y.dtype)
    return rows, (wide * y[places].float()).sum(-1).to(weights.dtype)


class Combined(torch.autograd.Function):
    """combine() of weights, with its gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(y, places, weights)
        return combine(y, places, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        rows, weights = combine_backward(grad, *ctx.saved_tensors)
        return rows, None, weights


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
