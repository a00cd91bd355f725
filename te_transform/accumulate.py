"""Gradient accumulation on TE's fused kernels, for any torch optimizer.

Over the calls of one accumulation the weights do not change: FP8 weights are quantized once, and each product
adds the weight's gradient to a buffer in the kernel that computes it. Parameters that no such kernel reads
(norms, biases, embeddings) get their gradients as always.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from te_transform.backends.gradients import Gradients, accumulating
from te_transform.backends.joined import state_of
from te_transform.backends.limits import on_kernels_device
from te_transform.backends.running import forget_weights
from te_transform.backends.tracing import in_backward
from te_transform.execution.runner import is_divided
from te_transform.graph.keywords import suggests
from te_transform.plan.model import check_module


class AccumulationError(RuntimeError):
    """Gradients cannot be accumulated here, or not as they were."""


@dataclass(eq=False)
class Accumulation:
    """What takes part so far, by the parameters' names, and what is `left_out`, with the reasons."""

    steps: int
    parameters: dict[str, nn.Parameter]
    gradients: Gradients
    taken: int = field(default=0, init=False)  # forward calls so far

    @property
    def fused(self) -> tuple[str, ...]:
        """The parameters to whose sums kernels add."""
        summed = self.gradients.by_parameter()
        return tuple(name for name, parameter in self.parameters.items() if parameter in summed)

    @property
    def left_out(self) -> dict[str, str]:
        """Those that get their gradients as always, with the reasons."""
        fused = set(self.fused)
        return {name: _reason(parameter) for name, parameter in self.parameters.items() if name not in fused}


@suggests
@contextlib.contextmanager
def accumulate(model: nn.Module, steps: int, dtype: torch.dtype = torch.float32) -> Iterator[Accumulation]:
    """Accumulate the gradients of `steps` forward and backward passes; afterwards they are in `.grad`.

        with te_transform.accumulate(model, steps=4):
            for batch in batches:  # 4 of them
                (model(**batch).loss / 4).backward()
        optimizer.step()

    Args:
        model: what te_transform.convert() returned, on any backend, or something that contains it.
        steps: the number of forward passes in training mode; fewer are fine (the last batches of an epoch).
        dtype: of the buffers the gradients are summed up in, one for each fused weight.

    Yields:
        Which parameters take part, and why the others do not: those get their gradients as always.

    Raises:
        AccumulationError: a step too many was taken; the model is wrapped by DDP, whose hooks see no gradient
            that a kernel adds; somebody else keeps main_grad; or steps or dtype is none. Where the body
            raises, the buffers are dropped and `.grad` keeps what other parameters got.
        te_transform.ModelError: `model` is no module.
    """
    _check(model, steps, dtype)
    gradients, parameters = Gradients(dtype), dict(model.named_parameters(remove_duplicate=False))
    running = Accumulation(steps, parameters, gradients)
    hook = model.register_forward_pre_hook(lambda module, _: _count(module, running))
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
        for parameter in parameters.values():
            state_of(parameter).gradients = None
        forget_weights(parameters.values())


def _check(model: nn.Module, steps: int, dtype: torch.dtype) -> None:
    check_module(model, "accumulate")
    if not isinstance(steps, int) or steps < 1:
        raise AccumulationError(f"steps is {steps!r}, a number of forward passes from 1 on is needed")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise AccumulationError(
            f"dtype is {dtype!r}, one of floating point is needed to sum up gradients in: torch.float32"
        )
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise AccumulationError(
            "the model is wrapped by DistributedDataParallel, which reduces gradients as autograd hands "
            "them out, and kernels that add them to a buffer hand out none: use its no_sync() instead"
        )
    if is_divided(model):
        raise AccumulationError(
            "the model is divided among ranks, its gradients are DTensors, and buffers of plain tensors are "
            "summed up here: leave accumulate() out, gradients add up in .grad"
        )
    if taken := [name for name, p in model.named_parameters() if "main_grad" in p.__dict__]:
        raise AccumulationError(
            f"{taken[0]} has a main_grad already, one of accumulate()'s own is needed: delete the attribute, "
            "or leave accumulate() out if a framework sums up gradients in it"
        )
    if any(state_of(parameter).gradients is not None for parameter in model.parameters()):
        raise AccumulationError(
            "an accumulate() of this model is running already, one at a time can be: leave the outer one"
        )


def _reason(parameter: nn.Parameter) -> str:
    if not parameter.requires_grad:
        return "it is frozen"
    if not on_kernels_device(parameter):
        return "it is not on the GPU"
    if parameter.dim() > 1:
        return "no fused product reads it"
    return "it is no matrix, its gradient is no product"


def _count(module: nn.Module, running: Accumulation) -> None:
    if module.training and torch.is_grad_enabled() and not in_backward():  # as a checkpoint repeats it
        running.taken += 1
        if running.taken > running.steps:
            raise AccumulationError(
                f"this is forward pass {running.taken} of accumulate(steps={running.steps}): leave the "
                "context and step the optimizer, or give the number of steps that there are"
            )
