"""A second derivative, and a second backward, for kernels that have none.

The kernels of attention and of Transformer Engine cannot be differentiated twice: PyTorch's raise, and TE's
silently leave their part out. TE's cannot even run their backward again, for they free what it needs. So
where a backward is itself recorded (create_graph=True), or comes a second time, it computes the gradients of
the same function in plain PyTorch. That of an autograd.Function, whose kernel takes one gradient, also does
where it is for several at once (is_grads_batched=True).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from te_transform.backends.limits import autocast_dtype
from te_transform.backends.tracing import batches_gradients

Gradients = tuple[Tensor | None, ...]
Out = Tensor | tuple[Tensor, ...]


def differentiable_twice(
    kernel: Callable[..., Out], plain: Callable[..., Out], arguments: tuple[Any, ...], linear: bool = False
) -> Out:
    """kernel(*arguments), whose other backwards than the usual one are those of plain(*arguments).

    Tensors that need a gradient reach the kernel as views of what they are. What is `linear` in its first
    argument, the only one with a gradient, does not keep it.
    """
    places = [place for place, given in enumerate(arguments) if isinstance(given, Tensor)]
    tensors = [arguments[place] for place in places]
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return kernel(*arguments)
    call = _Call(plain, arguments, places, linear)
    out = kernel(*call.arguments_with(_Gate.apply(call, *tensors)))
    backward = _backward_of(out)
    if isinstance(backward, BackwardCFunction):
        _replace_other_backwards(backward, call.skip)
    else:
        backward.register_prehook(call.give_zeros)
    return out


def _backward_of(out: Out) -> Any:
    """The node that computes the gradients of what has computed `out`, all of it."""
    return (out[0] if isinstance(out, tuple) else out).grad_fn


def differentiable_once(out: Out, reason: str) -> Out:
    """`out`, which an autograd.Function has computed; other backwards of it than the usual one raise
    `reason`."""

    def refuse(inputs: int, grads: Gradients) -> Gradients:
        raise RuntimeError(reason)

    if isinstance(backward := _backward_of(out), BackwardCFunction):
        _replace_other_backwards(backward, refuse)
    return out


def _replace_other_backwards(node: Any, instead: Callable[[int, Gradients], Gradients]) -> None:
    """Let `instead` run where the backward of an autograd.Function is recorded, comes a second time, or is
    for several gradients.

    It is called with the number of gradients to return, and with those of the outputs.
    """
    reference, ran = weakref.ref(node), False  # the node holds the function

    def apply(*grads: Tensor | None) -> Gradients:
        nonlocal ran
        own = reference()
        if ran or torch.is_grad_enabled() or batches_gradients():
            return instead(len(own.needs_input_grad), grads)
        ran = True
        return type(own).apply(own, *grads)

    node.apply = apply


class _Call:
    """What the plain version of a call needs beside the tensors, which autograd keeps."""

    def __init__(
        self, plain: Callable[..., Out], arguments: tuple[Any, ...], places: list[int], linear: bool
    ):
        self.plain, self.places, self.linear = plain, places, linear
        self.others = [None if isinstance(given, Tensor) else given for given in arguments]
        self.autocast = autocast_dtype(arguments[places[0]])
        self.grads: list[Gradients] = []  # of the outputs, until the gate's backward computes with it

    def arguments_with(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The call's arguments, with these in the place of its tensors."""
        arguments = list(self.others)
        for place, tensor in zip(self.places, tensors, strict=True):
            arguments[place] = tensor
        return arguments

    def skip(self, inputs: int, grads: Gradients) -> Gradients:
        """Keep the outputs' gradients for the gate; the kernel's own backward is not run."""
        self.grads.append(grads)
        return (None,) * inputs

    def give_zeros(self, grads: Gradients) -> Gradients | None:
        """In a recorded backward, keep the output's gradient for the gate, and give the kernel zeros."""
        if not torch.is_grad_enabled():
            return None
        self.grads.append(grads)
        return (torch.zeros_like(grads[0]),)

    def gradients(self, tensors: Sequence[Tensor], trained: Sequence[bool]) -> Gradients:
        """Those of the plain version, recorded if this backward is."""
        with torch.enable_grad():
            own = [tensor.view_as(tensor) for tensor in tensors]  # one of them may be computed from another
            wanted = [tensor for tensor, needed in zip(own, trained, strict=True) if needed]
            kind, dtype = own[0].device.type, self.autocast
            with torch.autocast(kind, dtype=dtype, enabled=dtype is not None):
                out = self.plain(*self.arguments_with(own))
        outs = out if isinstance(out, tuple) else (out,)
        grads = self.grads.pop()[: len(outs)]  # a kernel may return more, for its own backward
        found = torch.autograd.grad(
            outs, wanted, grads, create_graph=torch.is_grad_enabled(), allow_unused=True
        )
        given = iter(found)
        return tuple(next(given) if needed else None for needed in trained)


class _Gate(torch.autograd.Function):
    """What a call's tensors pass on their way to the kernel, and their gradients on the way back."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.trained = call, [tensor.requires_grad for tensor in tensors]
        ctx.save_for_backward(*tensors[call.linear :])
        ctx.first = tensors[0].shape, tensors[0].dtype, tensors[0].device
        ctx.set_materialize_grads(False)  # a kernel that adds a gradient to main_grad returns none
        passed = tuple(tensor.detach() for tensor in tensors)
        ctx.mark_non_differentiable(
            *(tensor for tensor, trained in zip(passed, ctx.trained, strict=True) if not trained)
        )
        return passed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Gradients:
        if ctx.call.grads:
            tensors = ctx.saved_tensors
            if ctx.call.linear:  # in which any values have the same gradient
                shape, dtype, device = ctx.first
                tensors = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True), *tensors
            grads = ctx.call.gradients(tensors, ctx.trained)
        return None, *grads
