"""Gradient accumulation on TE's fused kernels, for any torch optimizer.

The weights do not change during one accumulation, so FP8 weights are quantized once. The kernel that computes
the gradient of a weight also adds it to a buffer. Parameters that no such kernel reads (norms, biases,
embeddings) get their gradients from autograd as usual.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from te_transform.backends.fp8.gradient_sums import GradientSums, accumulating
from te_transform.backends.fp8.registry import forget_weights, read_state, state_of
from te_transform.backends.limits import on_kernels_device
from te_transform.backends.ranks import is_in_ddp
from te_transform.backends.tracing import in_backward
from te_transform.execution.attach import is_divided
from te_transform.graph.keywords import suggests
from te_transform.plan.model import check_module


class AccumulationError(RuntimeError):
    """The error for arguments, models and steps with which gradients cannot be accumulated."""


@dataclass(eq=False)
class Accumulation:
    """A running accumulation: its `fused` parameters so far, and those `left_out`, with the reasons."""

    steps: int
    parameters: dict[str, nn.Parameter]
    gradients: GradientSums
    taken: int = field(default=0, init=False)  # forward calls so far

    @property
    def fused(self) -> tuple[str, ...]:
        """The names of the parameters whose gradients are accumulated in kernels."""
        summed = self.gradients.by_parameter()
        return tuple(name for name, parameter in self.parameters.items() if parameter in summed)

    @property
    def left_out(self) -> dict[str, str]:
        """The names of the parameters that get gradients from autograd as usual, with the reasons."""
        fused = set(self.fused)
        return {
            name: _why_not_accumulated(parameter)
            for name, parameter in self.parameters.items()
            if name not in fused
        }


@suggests
@contextlib.contextmanager
def accumulate(model: nn.Module, steps: int, dtype: torch.dtype = torch.float32) -> Iterator[Accumulation]:
    """Accumulate the gradients of `steps` forward and backward passes into `.grad`.

        with te_transform.accumulate(model, steps=4):
            for batch in batches:  # 4 of them
                (model(**batch).loss / 4).backward()
        optimizer.step()

    Args:
        model: A model returned by te_transform.convert(), on any backend, or a module that contains it.
        steps: The number of forward passes in training mode. Fewer are fine, such as the last batches of an
            epoch.
        dtype: The dtype of the buffers that accumulate the gradients, one buffer per fused weight.

    Yields:
        An Accumulation: the parameters that take part, and the reasons for the others. The others get
        their gradients from autograd as usual.

    Raises:
        AccumulationError: there are more than `steps` forward passes, or `steps` or `dtype` is invalid. DDP
            wraps the model, whose hooks do not see gradients that a kernel adds. Another framework set
            main_grad. If the body raises, the buffers are dropped, and `.grad` keeps the gradients of other
            parameters.
        RuntimeError: a backward runs after the context, or returns gradients, as torch.autograd.grad() does.
        te_transform.ModelError: `model` is not a module.
    """
    _check_arguments(model, steps, dtype)
    gradients, parameters = GradientSums(dtype), dict(model.named_parameters(remove_duplicate=False))
    running = Accumulation(steps, parameters, gradients)
    hook = model.register_forward_pre_hook(  # a copy of the model gets a copy of the hook
        lambda module, _: _count(module, running) if module is model else None
    )
    try:
        for parameter in parameters.values():
            state_of(parameter).gradients = gradients
        with accumulating:
            yield running
        for parameter, total in gradients.by_parameter().items():
            total = total if parameter.grad is None else total + parameter.grad
            parameter.grad = total.to(parameter.dtype)
    finally:
        hook.remove()
        gradients.is_open = False
        for parameter in parameters.values():
            state_of(parameter).gradients = None
        forget_weights(parameters.values())


def _check_arguments(model: nn.Module, steps: int, dtype: torch.dtype) -> None:
    check_module(model, "accumulate")
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise AccumulationError(
            f"expected 1 or more forward passes for steps, got {steps!r}; pass an integer"
        )
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise AccumulationError(
            f"expected a floating-point dtype to accumulate gradients, got {dtype!r}; pass torch.float32"
        )
    _check_ddp(any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()))
    if is_divided(model):
        raise AccumulationError(
            "expected plain tensors as gradients, got a model divided among ranks, whose gradients are "
            "DTensors; leave accumulate() out, gradients add up in .grad"
        )
    if taken := [name for name, p in model.named_parameters() if "main_grad" in p.__dict__]:
        raise AccumulationError(
            f"expected parameters without main_grad, got one on {taken[0]}; delete the attribute, or leave "
            "accumulate() out if a framework accumulates gradients in it"
        )
    if any(read_state(parameter).gradients is not None for parameter in model.parameters()):
        raise AccumulationError(
            "expected one accumulate() of this model at a time, got a nested one; leave the outer one first"
        )


def _check_ddp(is_wrapped: bool) -> None:
    if is_wrapped:
        raise AccumulationError(
            "expected a model without DistributedDataParallel, whose hooks do not see gradients that kernels "
            "add to a buffer, got a wrapped one; use its no_sync() instead"
        )


def _why_not_accumulated(parameter: nn.Parameter) -> str:
    if not parameter.requires_grad:
        return "it is frozen"
    if not on_kernels_device(parameter):
        return "it is not on the GPU"
    if parameter.dim() > 1:
        return "no fused product reads it"
    return "it is not a matrix, so its gradient is not a matrix product"


def _count(module: nn.Module, running: Accumulation) -> None:
    if module.training and torch.is_grad_enabled() and not in_backward():  # not a rerun
        _check_ddp(is_in_ddp())
        running.taken += 1
        if running.taken > running.steps:
            raise AccumulationError(
                f"expected at most {running.steps} forward passes in accumulate(steps={running.steps}), got "
                f"{running.taken}; leave the context and step the optimizer, or pass the right number of "
                "steps"
            )
