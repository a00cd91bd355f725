"""Linear layers with 16-bit inputs and results in fp32, on tensor cores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_transform.backends import plain
from te_transform.backends.double_backward import differentiable_twice
from te_transform.backends.limits import WIDE_TERMS, without_wide_product
from te_transform.backends.plain.products import product_in_fp32
from te_transform.backends.tracing import traced


class WideLinear(plain.WideLinear):
    """The op y = x W^T + b in fp32, of x and W in bfloat16, without a cast of x and W to fp32."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convert x [..., in] to [..., out] in fp32."""
        if traced():
            return super().forward(x, weight, bias)
        if why := without_wide_product(x, weight):
            self.plain_calls[f"the linear in fp32, {why}"] += 1
            return super().forward(x, weight, bias)
        product = differentiable_twice(_WideProduct.apply, self._in_fp32, (x, weight))
        return product if bias is None else product + bias.float()

    def _in_fp32(self, x: Tensor, weight: Tensor) -> Tensor:
        return super().forward(x, weight, None)


class _WideProduct(torch.autograd.Function):
    """The product x W^T in fp32, x [..., in] and W [out, in] in bfloat16.

    A gradient in fp32 is split into its rounding to bfloat16 and the rest in bfloat16, 16 bits together.
    Products of both with bfloat16 run on tensor cores.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _exact_product(x.reshape(-1, x.shape[-1]), weight.t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])
        rounded = grad.to(x.dtype)
        parts = torch.cat((rounded, (grad - rounded).to(x.dtype)), -1)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = (parts @ torch.cat((weight, weight))).view(x.shape)
        if ctx.needs_input_grad[1]:
            both = product_in_fp32(torch.mm, parts.t(), x.reshape(-1, x.shape[-1]))
            of_weight = both.view(2, *weight.shape).sum(0).to(weight.dtype)
        return of_x, of_weight


def _exact_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a [rows, terms] times b [terms, columns] with the error of a product in fp32.

    Tensor cores round each partial sum toward zero, so the error grows with the number of terms: a sum of
    7,168 is 8e-6 off, one of 128 is 1e-7 off (H200). Sums of 128 terms are added in fp32.
    """
    parts = a.unflatten(1, (-1, WIDE_TERMS)).transpose(0, 1), b.unflatten(0, (-1, WIDE_TERMS))
    return product_in_fp32(torch.bmm, *parts).sum(0)
