"""The registry of what lasts from call to call for each parameter."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from te_transform.backends.fp8.fp8_only import is_fp8_only
from te_transform.backends.joined import copy_origin, parameters_of
from te_transform.backends.tensor_registry import TensorRegistry


class ParameterState:
    """The state of a parameter. It belongs to the parameter because one captured graph serves many layers.

    Attributes:
        kernels: the backend's kernels for products that begin with the parameter, keyed by the form of the
            call.
        in_fp8: True if such products run in FP8; None if the fused op decides.
        model: the token of the converted model that last set `in_fp8`, `name` and `saved`; several models may
            share a parameter.
        name: the name of the parameter in that model.
        saved: the loaded scales that its products start with, see scale_table.py.
        steps: the steps of optimizers that hold the parameter; fused optimizers write to it without changing
            its version.
        gradients: the GradientSums of a running accumulation.
    """

    def __init__(self) -> None:
        self.kernels: dict[Any, Any] = {}
        self.in_fp8: bool | None = None
        self.model: Any = None
        self.name = ""
        self.saved: Any = None
        self.steps = 0
        self.gradients: Any = None


PARAMETERS: TensorRegistry[ParameterState] = TensorRegistry()


def state_of(weight: Tensor) -> ParameterState:
    """Return the state of a parameter; for joined parameters, the state of the first."""
    owner = parameters_of(weight)[0]
    return PARAMETERS.get(owner) or PARAMETERS.set(owner, ParameterState())


_EMPTY = ParameterState()


def read_state(weight: Tensor) -> ParameterState:
    """Return the state of a parameter for reading, or an empty one that is not stored.

    torch.utils.swap_tensors() refuses tensors with weak references, so a read must not create any.
    """
    return PARAMETERS.get(parameters_of(weight)[0]) or _EMPTY


def share_state(parameter: Tensor, *others: Tensor) -> None:
    """Give the state of a parameter to tensors that hold it or replace it."""
    state = state_of(parameter)
    for other in others:
        PARAMETERS.set(other, state)


def known_as(tensor: Tensor, other: Tensor) -> Tensor:
    """Give `tensor`, which replaces `other` in a rerun of a graph, the origin and state of `other`."""
    copy_origin(tensor, other)
    if (state := PARAMETERS.get(other)) is not None:
        PARAMETERS.set(tensor, state)
    return tensor


def forget_weights(parameters: Iterable[Tensor]) -> None:
    """Free the cached quantized weights of products that begin with one of these parameters."""
    for parameter in parameters:
        for kernel in read_state(parameter).kernels.values():
            kernel.forget_weights()


@dataclass(frozen=True)
class Source:
    """The parameters of a weight, as weak references.

    Attributes:
        references: empty for FP8-only parameters; nn.Module.to() swaps those, which weak references forbid.
        state: the state of the first parameter.
        transposed: True if the parameter is stored transposed.
    """

    references: tuple[Callable[[], Tensor | None], ...]
    state: weakref.ref[ParameterState]
    transposed: bool

    @classmethod
    def of(cls, weight: Tensor) -> Source:
        """Return the source of a weight [out, in]."""
        parameters = parameters_of(weight)
        transposed = len(parameters) == 1 and parameters[0] is not weight and not weight.is_contiguous()
        references = () if is_fp8_only(parameters[0]) else tuple(map(weakref.ref, parameters))
        return cls(references, weakref.ref(state_of(weight)), transposed)

    def parameters(self) -> tuple[Tensor, ...]:
        """Return the parameters, or () if one of them has been freed."""
        living = tuple(parameter for each in self.references if (parameter := each()) is not None)
        return living if len(living) == len(self.references) else ()
