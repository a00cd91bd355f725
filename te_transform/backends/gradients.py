"""Where kernels add the gradients of weights: one buffer for each weight, as the products read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from te_transform.backends.joined import Source, parameters_of, state_of
from te_transform.backends.limits import Switch, on_kernels_device


@dataclass
class _Sum:
    """The buffer [out, in] of a weight, and the parameters that it was made of."""

    parameters: tuple[Tensor, ...]
    buffer: Tensor
    transposed: bool  # whether the one parameter is stored as [in, out]
    used: list[list[bool]] = field(default_factory=list)  # by call: which parts got a gradient, see Split

    def parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter that got a gradient, with its sum."""
        stored = self.buffer.t() if self.transposed else self.buffer
        if len(self.parameters) == 1:  # which may have another shape
            stored = stored.reshape(self.parameters[0].shape)
        sums = stored.split([len(parameter) for parameter in self.parameters])
        for number, (parameter, part) in enumerate(zip(self.parameters, sums, strict=True)):
            if any(not used or used[number] for used in self.used):
                yield parameter, part


class Gradients:
    """The sums of one accumulation; `dtype` is that of the buffers."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.sums: dict[tuple[Any, ...], _Sum] = {}

    def of(self, weight: Tensor) -> Tensor:
        """The buffer for a call's weight [out, in]: one parameter, its transpose, or several joined ones."""
        parameters, transposed = parameters_of(weight), Source.of(weight).transposed
        # a tied parameter may be read both ways, or in several shapes
        key = transposed, weight.shape, *map(id, parameters)
        if key not in self.sums:
            buffer = torch.zeros(weight.shape, dtype=self.dtype, device=weight.device)
            self.sums[key] = _Sum(parameters, buffer, transposed)
        self.sums[key].used.append(weight.__dict__.get("_te_transform_used", []))
        return self.sums[key].buffer

    def by_parameter(self) -> dict[Tensor, Tensor]:
        """What was summed up for each parameter, in its own shape."""
        found: dict[Tensor, Tensor] = {}
        for one in self.sums.values():
            for parameter, part in one.parts():
                found[parameter] = found[parameter] + part if parameter in found else part
        return found


accumulating = Switch()
"""An accumulation is going on."""
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
    to a buffer: whole parameters, trained, on a GPU, in a dtype of their own.
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
