"""Where kernels add the gradients of weights: one buffer for each weight, as the products read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from te_transform.backends.joined import parameters_of, state_of
from te_transform.backends.limits import on_kernels_device


@dataclass
class _Sum:
    parameters: tuple[Tensor, ...]
    buffer: Tensor  # [out, in], whether the parameter is stored so or transposed
    transposed: bool


class Gradients:
    """The sums of one accumulation; `dtype` is that of the buffers."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.sums: dict[tuple[int, ...], _Sum] = {}

    def of(self, weight: Tensor) -> Tensor:
        """The buffer of a weight [out, in], which is one parameter, its transpose, or several that are
        joined."""
        parameters = parameters_of(weight)
        key = tuple(map(id, parameters))
        if key not in self.sums:
            buffer = torch.zeros(weight.shape, dtype=self.dtype, device=weight.device)
            self.sums[key] = _Sum(parameters, buffer, parameters[0] is not weight and not weight.is_contiguous())
        return self.sums[key].buffer

    def by_parameter(self) -> dict[Tensor, Tensor]:
        """What was summed up for each parameter, in its own shape."""
        found: dict[Tensor, Tensor] = {}
        for one in self.sums.values():
            stored = one.buffer.t() if one.transposed else one.buffer
            for parameter, part in zip(
                one.parameters, stored.split([len(p) for p in one.parameters]), strict=True
            ):
                found[parameter] = found[parameter] + part if parameter in found else part
        return found


_paused: ContextVar[bool] = ContextVar("_paused", default=False)


@contextmanager
def paused() -> Iterator[None]:
    """Let autograd hand out all gradients meanwhile: of runs that only check what is computed."""
    token = _paused.set(True)
    try:
        yield
    finally:
        _paused.reset(token)


def gradients_of(weights: Sequence[Tensor]) -> Gradients | None:
    """Where the gradients of a call's weights are summed up; None where autograd hands them out as always.

    TE's modules have one switch for all their weights, so all of them have to be such that a kernel can add
    to a
    buffer: whole parameters, trained, on a GPU, in a dtype of their own.
    """
    gradients = None if _paused.get() else state_of(weights[0]).gradients
    return gradients if gradients is not None and all(map(_takes_part, weights)) else None


def _takes_part(weight: Tensor) -> bool:
    parameters = parameters_of(weight)
    whole = sum(parameter.numel() for parameter in parameters) == weight.numel()
    return whole and all(
        type(p) is nn.Parameter and type(p.data) is Tensor and on_kernels_device(p) and p.requires_grad
        and state_of(p).gradients is not None
        for p in parameters
    )  # fmt: skip
