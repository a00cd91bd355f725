"""Functions with backwards of their own."""

from typing import Any

import torch
from torch import Tensor


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


class Doubled(torch.autograd.Function):
    """Hands its input on; only its gradient is twice what it was."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Tripled(torch.autograd.Function):
    """Changes its input in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad
