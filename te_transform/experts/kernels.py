"""Compute experts with kernels between PyTorch's grouped matrix products."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from te_transform.backends import plain
from te_transform.backends.double_backward import differentiable_twice
from te_transform.backends.limits import without_kernel
from te_transform.backends.tracing import traced
from te_transform.experts.combine import Combined, Sent
from te_transform.experts.fused import PAIRS, Experts, routed
from te_transform.experts.gated import Gate, Gated
from te_transform.experts.groups import of_groups
from te_transform.graph import ops
from te_transform.graph.nodes import dtype_name


class KernelExperts(Experts):
    """Experts with one kernel for a gated activation, and one for the sum over the choices of a token."""

    def forward(self, *arguments: Any) -> Tensor:
        """Compute the experts, in plain PyTorch if the kernels do not support the arguments."""
        if traced():
            return super().forward(*arguments)
        x, _, _, fc1_weight, fc2_weight, dtype, *biases = arguments
        given = (part for part in (fc1_weight, fc2_weight, *biases) if part is not None)
        if why := _without_kernels(x, dtype, *given):
            self.plain_calls[f"experts, {why}"] += 1
            return super().forward(*arguments)
        return differentiable_twice(self._by_kernels, super().forward, arguments)

    def _by_kernels(self, *arguments: Any) -> Tensor:
        x, experts, weights, fc1_weight, fc2_weight, _, *biases = arguments
        fc1_bias, fc2_bias = biases or (None, None)
        order, places, groups, ends = routed(experts, len(fc1_weight))
        places = places.view_as(experts)
        rows = ops.grouped_mm(Sent.apply(x, order, places), fc1_weight, ends)
        hidden = self._activated_by_kernel(rows, fc1_bias, groups, ends)
        out = ops.grouped_mm(hidden, fc2_weight, ends)
        return Combined.apply(out, places, weights, fc2_bias, experts, groups, ends)

    def _activated_by_kernel(self, rows: Tensor, bias: Tensor | None, groups: Tensor, ends: Tensor) -> Tensor:
        slope, name = plain.SLOPES.get(self.activation), plain.GATED_ACTIVATIONS.get(self.activation)
        is_first = self.gated == plain.GATES[1]
        if bias is None and self.limit is None and name is not None and is_first:
            return _Activated.apply(rows, name)
        if slope is not None and (is_first or self.gated == PAIRS):
            limit = math.inf if self.limit is None else self.limit
            gate = Gate(slope, limit, self.offset, self.gated == PAIRS)
            return Gated.apply(rows, bias, groups, ends, gate)
        return self.activated(rows if bias is None else rows + of_groups(bias, groups, ends))


def _without_kernels(x: Tensor, dtype: torch.dtype, *weights: Tensor) -> str | None:
    """Return why the kernels do not support these tokens and weights, summed in `dtype`, or None."""
    if why := next(filter(None, (without_kernel(x, weight) for weight in weights)), None):
        return why
    return None if dtype is x.dtype else f"a sum in {dtype_name(dtype)}"


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.activation = activation
        forward, *_ = _te_functions(activation)
        return forward(hidden, None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _, backward, _ = _te_functions(ctx.activation)
        return backward(grad.contiguous(), *ctx.saved_tensors, None), None


@cache
def _te_functions(activation: str) -> tuple[Any, ...]:
    """Return TE's functions for an activation; they are imported here, because a plan needs no TE."""
    from te_transform.backends.te.casts import functions_of

    return functions_of(activation)
