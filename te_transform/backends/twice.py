"""A second derivative for kernels that have none.

The kernels of attention and of Transformer Engine cannot be differentiated twice: PyTorch's raise, and TE's
silently leave their part out. So where a backward is itself recorded (create_graph=True), it computes the
gradients of the same function in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from te_transform.backends.limits import autocast_dtype


def differentiable_twice(
    kernel: Callable[..., Tensor], plain: Callable[..., Tensor], arguments: tuple[Any, ...]
) -> Tensor:
    """kernel(*arguments), whose recorded backward is that of plain(*arguments).

    Tensors that need a gradient reach the kernel as views of what they are.
    """
    places = [place for place, given in enumerate(arguments) if isinstance(given, Tensor)]
    tensors = [arguments[place] for place in places]
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return kernel(*arguments)
    call = _Call(plain, arguments, places)
    out = kernel(*call.arguments_with(_Gate.apply(call, *tensors)))
    out.grad_fn.register_prehook(call.take)
    return out


class _Call:
    """What the plain version of a call needs beside the tensors, which autograd keeps."""

    def __init__(self, plain: Callable[..., Tensor], arguments: tuple[Any, ...], places: list[int]):
        self.plain, self.places = plain, places
        self.others = [None if isinstance(given, Tensor) else given for given in arguments]
        self.autocast = autocast_dtype(arguments[places[0]])
        self.grads: list[Tensor] = []  # of the output, until the gate's backward computes with it

    def arguments_with(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The call's arguments, with these in the place of its tensors."""
        arguments = list(self.others)
        for place, tensor in zip(self.places, tensors, strict=True):
            arguments[place] = tensor
        return arguments

    def take(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """In a recorded backward, keep the output's gradient for the gate, and give the kernel zeros."""
        if not torch.is_grad_enabled():
            return None
        self.grads.append(grads[0])
        return (torch.zeros_like(grads[0]),)

    def gradients(self, tensors: Sequence[Tensor], trained: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """Of the plain version, recorded."""
        own = [tensor.view_as(tensor) for tensor in tensors]  # one of them may be computed from another
        wanted = [tensor for tensor, needed in zip(own, trained, strict=True) if needed]
        with torch.autocast(own[0].device.type, dtype=self.autocast, enabled=self.autocast is not None):
            out = self.plain(*self.arguments_with(own))
        found = iter(
            torch.autograd.grad(out, wanted, self.grads.pop(), create_graph=True, allow_unused=True)
        )
        return tuple(next(found) if needed else None for needed in trained)


class _Gate(torch.autograd.Function):
    """What a call's tensors pass on their way to the kernel, and their gradients on the way back."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.trained = call, [tensor.requires_grad for tensor in tensors]
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)  # a kernel that adds a gradient to main_grad returns none
        passed = tuple(tensor.detach() for tensor in tensors)
        ctx.mark_non_differentiable(*(p for p, trained in zip(passed, ctx.trained, strict=True) if not trained))
        return passed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            grads = ctx.call.gradients(ctx.saved_tensors, ctx.trained)
        return None, *grads
