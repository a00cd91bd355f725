"""The buffers that kernels add the gradients of weights to: one for each weight of a product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from te_transform.backends.fp8.registry import Source, read_state
from te_transform.backends.joined import parameters_of, used_of
from te_transform.backends.limits import Switch, on_kernels_device
from te_transform.graph.context import set_to


@dataclass
class _Sum:
    """The buffer [out, in] of a weight.

    Attributes:
        parameters: the parameters that the weight consists of.
        buffer: the sum.
        transposed: True if the only parameter is stored as [in, out].
        used: for each call, which parameters got a gradient, see Split.
    """

    parameters: tuple[Tensor, ...]
    buffer: Tensor
    transposed: bool
    used: list[list[bool]] = field(default_factory=list)

    def parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter that got a gradient, with its sum."""
        stored = self.buffer.t() if self.transposed else self.buffer
        if len(self.parameters) == 1:  # its shape may differ
            stored = stored.reshape(self.parameters[0].shape)
        sums = stored.split([len(parameter) for parameter in self.parameters])
        for number, (parameter, part) in enumerate(zip(self.parameters, sums, strict=True)):
            if any(not used or used[number] for used in self.used):
                yield parameter, part


class GradientSums:
    """The sums of one accumulation; `dtype` is the dtype of the buffers. `is_open` until they are read."""

    def __init__(self, dtype: torch.dtype):
        self.dtype, self.is_open = dtype, True
        self.sums: dict[tuple[Any, ...], _Sum] = {}

    def of(self, weight: Tensor) -> Tensor:
        """Return the buffer for a weight [out, in]: a parameter, its transpose, or joined parameters."""
        parameters, transposed = parameters_of(weight), Source.of(weight).transposed
        # a tied parameter may be read as stored and transposed, or in several shapes
        key = transposed, weight.shape, *map(id, parameters)
        if key not in self.sums:
            buffer = torch.zeros(weight.shape, dtype=self.dtype, device=weight.device)
            self.sums[key] = _Sum(parameters, buffer, transposed)
        self.sums[key].used.append(used_of(weight))
        return self.sums[key].buffer

    def watch(self, out: Tensor, weights: Sequence[Tensor]) -> None:
        """Check in the backward of a product that `.grad` gets what its kernel adds to the sums."""
        if out.grad_fn is not None:
            parameters = [parameter for weight in weights for parameter in parameters_of(weight)]
            out.grad_fn.register_prehook(lambda _: self._check_backward(parameters))

    def _check_backward(self, parameters: Sequence[Tensor]) -> None:
        """Raise RuntimeError unless the running backward accumulates gradients into all parameters."""
        if not self.is_open:
            raise RuntimeError(
                "expected backward() within accumulate(), got one after it, whose gradients would be lost; "
                "call backward() before the context ends"
            )
        if not all(map(_gets_gradient, parameters)):
            raise RuntimeError(
                "expected backward() of all weights within accumulate(), got torch.autograd.grad() or "
                "backward(inputs=...), for which kernels add the gradients of other weights too; leave "
                "accumulate() out"
            )

    def by_parameter(self) -> dict[Tensor, Tensor]:
        """Return the sum for each parameter, in the parameter's shape."""
        sums: dict[Tensor, Tensor] = {}
        for each in self.sums.values():
            for parameter, part in each.parts():
                sums[parameter] = sums[parameter] + part if parameter in sums else part
        return sums


accumulating = Switch()
"""True within te_transform.accumulate()."""
_paused: ContextVar[bool] = ContextVar("_paused", default=False)


def paused() -> AbstractContextManager[None]:
    """Make autograd return all gradients, for runs that only check results."""
    return set_to(_paused, True)


def gradient_sums_of(weights: Sequence[Tensor]) -> GradientSums | None:
    """Return the sums for the weights of a call, or None if autograd returns their gradients.

    A TE module has one switch for all its weights. So all of them must be whole, trained, plain parameters on
    a GPU.
    """
    sums = None if _paused.get() else read_state(weights[0]).gradients
    return sums if sums is not None and all(map(_takes_part, weights)) else None


def _gets_gradient(parameter: Tensor) -> bool:
    """Return True if the running backward accumulates into `.grad` of a parameter."""
    if not parameter.requires_grad:  # frozen since the forward
        return True
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    except RuntimeError:  # torch.autograd.grad() returns the gradient
        return False


def _takes_part(weight: Tensor) -> bool:
    parameters = parameters_of(weight)
    whole = sum(parameter.numel() for parameter in parameters) == weight.numel()
    return whole and all(
        type(p) is nn.Parameter and type(p.data) is Tensor and on_kernels_device(p) and p.requires_grad
        and read_state(p).gradients is not None
        for p in parameters
    )  # fmt: skip
