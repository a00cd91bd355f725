"""Gradient accumulation on TE's fused kernels, for any torch optimizer.

Over the calls of one accumulation the weights do not change: FP8 weights are quantised once, and each
product adds the weight's gradient to a buffer, parameter.main_grad, in the kernel that computes it.
Parameters that no such kernel reads (norms, biases, embeddings) get their gradients as always.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from te_transform.autocast import precisions
from te_transform.originals import fusions, original_parameters


class AccumulationError(RuntimeError):
    """Gradients cannot be accumulated here, or not as they were."""


@dataclass(eq=False)
class Accumulation:
    """What takes part, by the original parameters' names, and what is `left_out`, with the reasons."""

    steps: int
    fused: tuple[str, ...]
    left_out: dict[str, str]
    taken: int = field(default=0, init=False)  # forward calls so far


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
            that a kernel adds; or somebody else keeps main_grad. Where the body raises, the buffers are
            dropped and `.grad` keeps what other parameters got.
    """
    _check(model, steps)
    weights = _weights(model)
    held = dict.fromkeys(weight for _, weight in weights)
    originals = original_parameters(model)
    names = tuple(name for name, original in originals.items() if original.held in held)
    left_out = {name: _reason(o.held) for name, o in originals.items() if o.held not in held}
    running = Accumulation(steps, names, left_out)
    hook = model.register_forward_pre_hook(lambda module, _: _count(module, running))
    try:
        for weight in held:
            weight.main_grad = torch.zeros_like(weight, dtype=dtype)
        _switch(model, weights, on=True)
        yield running
        for weight in held:
            _hand_over(weight)
    finally:
        hook.remove()
        _switch(model, weights, on=False)
        for weight in held:
            weight.__dict__.pop("main_grad", None)


def _check(model: nn.Module, steps: int) -> None:
    if not isinstance(steps, int) or steps < 1:
        raise AccumulationError(f"steps is {steps!r}, a number of forward passes from 1 on is needed")
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise AccumulationError(
            "the model is wrapped by DistributedDataParallel, which reduces gradients as autograd hands "
            "them out, and kernels that add them to a buffer hand out none: use its no_sync() instead"
        )
    if taken := [name for name, p in model.named_parameters() if hasattr(p, "main_grad")]:
        raise AccumulationError(
            f"{taken[0]} has a main_grad already, it is needed here: leave the outer accumulate(), or the "
            "framework that keeps it"
        )


def _weights(model: nn.Module) -> list[tuple[nn.Module, nn.Parameter]]:
    """The fused modules whose kernels can add to a buffer, with each of their weights."""
    found = []
    for fusion in fusions(model):
        fused = fusion.fused
        if fusion.enabled and hasattr(fused, "fuse_wgrad_accumulation"):
            weights = [getattr(fused, name) for name in fused.weight_names]
            if all(_takes_part(weight) for weight in weights):  # the module has one switch for all
                found += [(fused, weight) for weight in weights]
    return found


def _takes_part(weight: Tensor) -> bool:
    plain = isinstance(weight, nn.Parameter) and type(weight.data) is Tensor
    return plain and weight.is_cuda and weight.requires_grad


def _reason(held: Tensor) -> str:
    if not held.requires_grad:
        return "it is frozen"
    if not held.is_cuda:
        return "it is not on the GPU"
    return "no fused product reads it" if held.dim() > 1 else "it is no matrix, its gradient is no product"


def _count(module: nn.Module, running: Accumulation) -> None:
    if module.training and torch.is_grad_enabled():
        running.taken += 1
        if running.taken > running.steps:
            raise AccumulationError(
                f"this is forward pass {running.taken} of accumulate(steps={running.steps}): leave the "
                "context and step the optimizer, or give the number of steps that there are"
            )


def _switch(model: nn.Module, weights: list[tuple[nn.Module, nn.Parameter]], on: bool) -> None:
    for fused, _ in weights:
        fused.fuse_wgrad_accumulation = on
    for precision in precisions(model).values():
        precision.accumulating = on
        precision.forget()


def _hand_over(weight: nn.Parameter) -> None:
    """Let the sum be the parameter's gradient, with what came to that on another way."""
    total = weight.main_grad
    if weight.grad is not None:
        total += weight.grad
    weight.grad = None
    del weight.main_grad
    weight.grad = total.to(weight.dtype)
