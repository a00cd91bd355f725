"""Sum groups of rows, such as the gradients of a bias per expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from te_transform.backends.tracing import transformed
from te_transform.graph.bound import F

_ROWS_OF_ONES = 8  # PyTorch's grouped products need rows of at least 16 bytes


def of_groups(values: Tensor, groups: Tensor, ends: Tensor) -> Tensor:
    """Return values[groups], the value [width] of each row's group: values [number, width], groups [rows].

    The rows are sorted by group; `ends` [number] has the first row after each group. The gradient is
    summed_by_group().
    """
    return values[groups] if transformed() else Indexed.apply(values, groups, summed_by_group, groups, ends)


def summed_by_group(rows: Tensor, groups: Tensor, ends: Tensor) -> Tensor:
    """Return the sum of the rows [rows, width] of each group: [number, width]."""
    return _summed(rows, groups, ends) if transformed() else _Summed.apply(rows, groups, ends)


def _summed(rows: Tensor, groups: Tensor, ends: Tensor) -> Tensor:
    return rows.new_zeros(len(ends), rows.shape[-1]).index_add(0, groups, rows)


@torch.library.custom_op("te_transform::sum_by_group", mutates_args=())
def _sum_by_group(rows: Tensor, groups: Tensor, ends: Tensor) -> Tensor:
    """Sum rows in an operation that inductor does not trace: its layout of the ones has no product."""
    if rows.dtype is not torch.bfloat16:
        return _summed(rows, groups, ends)
    ones = rows.new_ones(len(rows), _ROWS_OF_ONES).t()
    return F.grouped_mm(ones, rows, offs=ends)[:, 0].contiguous()


@_sum_by_group.register_fake
def _of_shape(rows: Tensor, groups: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(len(ends), rows.shape[-1])


class Indexed(torch.autograd.Function):
    """The function x[index], whose gradient is gradient(grad, *saved).

    PyTorch would add up the rows of the gradient one by one.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, index: Tensor, gradient: Callable[..., Tensor], *saved: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*saved)
        ctx.gradient = gradient
        return x[index]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        return ctx.gradient(grad, *saved), None, None, *(None for _ in saved)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, groups: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(groups, ends)
        return _sum_by_group(rows.contiguous(), groups, ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return of_groups(grad, *ctx.saved_tensors), None, None
