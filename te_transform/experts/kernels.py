"""Compute experts with kernels between PyTorch's grouped matrix products.

PyTorch activates, weights, sorts and sums in separate passes over [tokens * choices, width]. TE's kernel for
the sum is less exact: the error of a sum over three choices is 4.4e-3 in TE 2.20, and 3.4e-3 in PyTorch.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_transform.backends import plain
from te_transform.backends.double_backward import differentiable_twice
from te_transform.backends.limits import without_kernel
from te_transform.backends.tracing import traced
from te_transform.experts.fused import PAIRS, Experts, routed
from te_transform.experts.groups import Indexed, of_groups, summed_by_group
from te_transform.graph import ops
from te_transform.graph.nodes import dtype_name


class Gate(NamedTuple):
    """The function gate * sigmoid(slope * gate) * (beside + offset).

    `beside` is clamped to [-limit, limit], the gate from above only. With `pairs`, gates are every other
    column, else the first half.
    """

    slope: float
    limit: float
    offset: int
    pairs: bool


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
        # a row per choice, sorted by expert
        sent = Indexed.apply(x, order // places.shape[-1], _summed_choices, places)
        rows = ops.grouped_mm(sent, fc1_weight, ends)
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


class Gated(torch.autograd.Function):
    """A gate of the rows `hidden` with the biases of their experts, in one pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, bias: Tensor | None, groups: Tensor, ends: Tensor, gate: Gate
    ) -> Tensor:
        hidden = hidden.contiguous()
        ctx.save_for_backward(hidden, bias, groups, ends)
        ctx.gate = gate
        return _kernels().gated(hidden, bias, groups, *gate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, bias, groups, ends = ctx.saved_tensors
        rows = _kernels().gated_backward(grad, hidden, bias, groups, *ctx.gate)
        of_bias = summed_by_group(rows, groups, ends) if ctx.needs_input_grad[1] else None
        return rows, of_bias, None, None, None


class Combined(torch.autograd.Function):
    """The weighted sum of each token's rows of y, in fp32.

    `places` [tokens, choices] has the rows of each token, `groups` [rows] the expert of each row, `ends`
    [experts] the first row after each expert.
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
        return _kernels().combine_rows(y, places, weights, bias, experts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, groups, ends = ctx.saved_tensors
        rows, of_weights = _kernels().combine_backward(grad, *saved)
        of_bias = summed_by_group(rows, groups, ends) if ctx.needs_input_grad[3] else None
        return rows, None, of_weights, of_bias, None, None, None


def _summed_choices(rows: Tensor, places: Tensor) -> Tensor:
    """Return the sum of each token's rows; `places` [tokens, choices] has the rows of each token."""
    return _kernels().combine_rows(rows, places, None, None, None)


def _kernels() -> ModuleType:
    """Return the Triton kernels; they are imported here, because a plan needs no Triton."""
    from te_transform.experts import triton_kernels

    return triton_kernels


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


def _te_functions(activation: str) -> tuple[Any, ...]:
    """Return TE's functions for an activation; they are imported here, because a plan needs no TE."""
    from te_transform.backends.te.casts import functions_of

    return functions_of(activation)
