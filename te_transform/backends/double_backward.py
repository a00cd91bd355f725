"""Second derivatives and repeated backwards for kernels that support neither.

The kernels of attention and of Transformer Engine cannot be differentiated twice. PyTorch's kernels raise,
and TE's silently leave out their part of the derivative. TE's kernels also free what their backward needs,
and cannot run it again. Here, the gradients of the same function in plain PyTorch are computed instead if the
backward

- is recorded (create_graph=True),
- runs a second time,
- is for several gradients at once (is_grads_batched=True) and belongs to an autograd.Function, whose kernel
  supports one gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from te_transform.backends.limits import autocast_dtype
from te_transform.backends.tracing import batches_gradients, needs_gradient

OptionalGradients = tuple[Tensor | None, ...]
Out = Tensor | tuple[Tensor, ...]


def differentiable_twice(
    kernel: Callable[..., Out], plain: Callable[..., Out], arguments: tuple[Any, ...], linear: bool = False
) -> Out:
    """Return kernel(*arguments), with the backward of plain(*arguments) where the kernel's does not work.

    Args:
        kernel: the function to run. If a tensor needs a gradient, it gets views of the tensors.
        plain: the same function in plain PyTorch.
        arguments: of both functions.
        linear: True if the first argument is the only one with a gradient, and the function is linear in it.
            The first argument is then not saved for the backward.
    """
    indices = [index for index, given in enumerate(arguments) if isinstance(given, Tensor)]
    tensors = [arguments[index] for index in indices]
    if not needs_gradient(*tensors):
        return kernel(*arguments)
    call = _PlainCall(plain, arguments, indices, linear)
    out = kernel(*call.arguments_with(_Gate.apply(call, *tensors)))
    backward = _backward_of(out)
    if isinstance(backward, BackwardCFunction):
        _replace_other_backwards(backward, call.skip)
    else:
        backward.register_prehook(call.give_zeros)
    return out


def _backward_of(out: Out) -> Any:
    """Return the autograd node that computed `out`."""
    return (out[0] if isinstance(out, tuple) else out).grad_fn


def differentiable_once(out: Out, reason: str) -> Out:
    """Return `out`, and let backwards that its autograd.Function does not support raise a RuntimeError.

    Args:
        out: the output of an autograd.Function.
        reason: the message of the error.
    """

    def refuse(inputs: int, grads: OptionalGradients) -> OptionalGradients:
        raise RuntimeError(reason)

    if isinstance(backward := _backward_of(out), BackwardCFunction):
        _replace_other_backwards(backward, refuse)
    return out


def _replace_other_backwards(
    node: Any, instead: Callable[[int, OptionalGradients], OptionalGradients]
) -> None:
    """Call `instead` when the backward of an autograd.Function is recorded, repeated, or batched.

    Args:
        node: the autograd node of the function.
        instead: gets the number of gradients to return, and the gradients of the outputs.
    """
    reference, ran = weakref.ref(node), False  # a strong reference would be a cycle: the node holds apply()

    def apply(*grads: Tensor | None) -> OptionalGradients:
        nonlocal ran
        own = reference()
        if ran or torch.is_grad_enabled() or batches_gradients():
            return instead(len(own.needs_input_grad), grads)
        ran = True
        return type(own).apply(own, *grads)

    node.apply = apply


class _PlainCall:
    """The arguments of a call other than its tensors, which autograd saves, for the plain version."""

    def __init__(
        self, plain: Callable[..., Out], arguments: tuple[Any, ...], indices: list[int], linear: bool
    ):
        self.plain, self.indices, self.linear = plain, indices, linear
        self.others = [None if isinstance(given, Tensor) else given for given in arguments]
        self.autocast = autocast_dtype(arguments[indices[0]])
        self.grads: list[OptionalGradients] = []  # of the outputs, until _Gate's backward

    def arguments_with(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Return the arguments of the call, with its tensors replaced by `tensors`."""
        arguments = list(self.others)
        for index, tensor in zip(self.indices, tensors, strict=True):
            arguments[index] = tensor
        return arguments

    def skip(self, inputs: int, grads: OptionalGradients) -> OptionalGradients:
        """Keep the outputs' gradients for _Gate, without running the kernel's backward."""
        self.grads.append(grads)
        return (None,) * inputs

    def give_zeros(self, grads: OptionalGradients) -> OptionalGradients | None:
        """Keep the output's gradient for _Gate in a recorded backward, and give zeros to the kernel."""
        if not torch.is_grad_enabled():
            return None
        self.grads.append(grads)
        return (torch.zeros_like(grads[0]),)

    def gradients(self, tensors: Sequence[Tensor], trained: Sequence[bool]) -> OptionalGradients:
        """Compute the gradients of the plain version, and record them if this backward is recorded.

        Args:
            tensors: the call's tensors.
            trained: for each of them, True if it needs a gradient.
        """
        with torch.enable_grad():
            own = [tensor.view_as(tensor) for tensor in tensors]  # a tensor may be computed from another one
            wanted = [tensor for tensor, needed in zip(own, trained, strict=True) if needed]
            kind, dtype = own[0].device.type, self.autocast
            with torch.autocast(kind, dtype=dtype, enabled=dtype is not None):
                out = self.plain(*self.arguments_with(own))
        outs = out if isinstance(out, tuple) else (out,)
        grads = self.grads.pop()[: len(outs)]  # a kernel may have further outputs, for its own backward
        gradients = torch.autograd.grad(
            outs, wanted, grads, create_graph=torch.is_grad_enabled(), allow_unused=True
        )
        given = iter(gradients)
        return tuple(next(given) if needed else None for needed in trained)


class _Gate(torch.autograd.Function):
    """The identity between a call's tensors and the kernel, whose backward may compute other gradients."""

    @staticmethod
    def forward(ctx: Any, call: _PlainCall, *tensors: Tensor) -> tuple[Tensor, ...]:
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
    def backward(ctx: Any, *grads: Tensor | None) -> OptionalGradients:
        if ctx.call.grads:
            tensors = ctx.saved_tensors
            if ctx.call.linear:  # the gradient does not depend on the values
                shape, dtype, device = ctx.first
                tensors = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True), *tensors
            grads = ctx.call.gradients(tensors, ctx.trained)
        return None, *grads
