"""The experts of mixture models, with a kernel each between PyTorch's products by groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_transform.backends import plain
from te_transform.backends.combine import Combined, Sent
from te_transform.backends.limits import without_experts
from te_transform.backends.te.casts import functions_of
from te_transform.backends.tracing import traced
from te_transform.backends.twice import differentiable_twice
from te_transform.graph import ops


class Experts(plain.Experts):
    """Experts whose gated activation, and sum over the choices of a token, are a kernel each."""

    def forward(self, *arguments: Any) -> Tensor:
        """As the op in plain PyTorch."""
        x, _, _, *weights, dtype = arguments
        if traced():
            return super().forward(*arguments)
        if why := without_experts(x, dtype, *weights):
            self.plain_calls[f"experts, {why}"] += 1
            return super().forward(*arguments)
        return differentiable_twice(self._by_kernels, super().forward, arguments)

    def _by_kernels(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        fc1_weight: Tensor,
        fc2_weight: Tensor,
        _: torch.dtype,
    ) -> Tensor:
        order, places, ends = plain.routed(experts, len(fc1_weight))
        places = places.view_as(experts)
        hidden = ops.grouped_mm(Sent.apply(x, order, places), fc1_weight, ends)
        out = ops.grouped_mm(self._activated_by_kernel(hidden), fc2_weight, ends)
        return Combined.apply(out, places, weights)

    def _activated_by_kernel(self, hidden: Tensor) -> Tensor:
        name = plain.GATED_ACTIVATIONS.get(self.activation)
        if name is None or self.gated != plain.GATES[1]:
            return self.activated(hidden)
        return _Activated.apply(hidden, name)


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.activation = activation
        forward, *_ = functions_of(activation)
        return forward(hidden, None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _, backward, _ = functions_of(ctx.activation)
        return backward(grad.contiguous(), *ctx.saved_tensors, None), None
