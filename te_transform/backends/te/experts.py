"""The experts of mixture models, with a kernel each between PyTorch's products by groups."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from te_transform.backends import plain
from te_transform.backends.combine import Combined, Sent
from te_transform.backends.double_backward import differentiable_twice
from te_transform.backends.gated import Gate, Gated
from te_transform.backends.groups import of_groups
from te_transform.backends.limits import without_experts
from te_transform.backends.te.casts import functions_of
from te_transform.backends.tracing import traced
from te_transform.graph import ops

_SLOPES = {"silu": 1.0, "quick_gelu": 1.702}


class Experts(plain.Experts):
    """Experts whose gated activation, and sum over the choices of a token, are a kernel each."""

    def forward(self, *arguments: Any) -> Tensor:
        """As the op in plain PyTorch."""
        if traced():
            return super().forward(*arguments)
        x, _, _, fc1_weight, fc2_weight, dtype, *biases = arguments
        given = (part for part in (fc1_weight, fc2_weight, *biases) if part is not None)
        if why := without_experts(x, dtype, *given):
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
        fc1_bias: Tensor | None = None,
        fc2_bias: Tensor | None = None,
    ) -> Tensor:
        order, places, groups, ends = plain.routed(experts, len(fc1_weight))
        places = places.view_as(experts)
        rows = ops.grouped_mm(Sent.apply(x, order, places), fc1_weight, ends)
        hidden = self._activated_by_kernel(rows, fc1_bias, groups, ends)
        out = ops.grouped_mm(hidden, fc2_weight, ends)
        return Combined.apply(out, places, weights, fc2_bias, experts, groups, ends)

    def _activated_by_kernel(self, rows: Tensor, bias: Tensor | None, groups: Tensor, ends: Tensor) -> Tensor:
        slope, name = _SLOPES.get(self.activation), plain.GATED_ACTIVATIONS.get(self.activation)
        is_first = self.gated == plain.GATES[1]
        if bias is None and self.limit is None and name is not None and is_first:
            return _Activated.apply(rows, name)
        if slope is not None and (is_first or self.gated == plain.PAIRS):
            limit = math.inf if self.limit is None else self.limit
            gate = Gate(slope, limit, self.offset, self.gated == plain.PAIRS)
            return Gated.apply(rows, bias, groups, ends, gate)
        return self.activated(rows if bias is None else rows + of_groups(bias, groups, ends))


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
