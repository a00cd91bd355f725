"""The arguments and the outputs of a recorded call."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_transform.execution.rerun import unexpanded


@dataclass(frozen=True, eq=False)
class RecordedInputs:
    """The tensors among the arguments of a recorded call, by the indices of the arguments.

    Attributes:
        copies: the tensors that the recorded kernels read instead of the arguments of a later call.
        static: the addresses of the other tensors, which the recorded kernels read in place.
        parameters: weak references to the parameters among these, with their addresses. CUDA graphs read raw
            addresses, so the recording does not keep parameters alive.
        unchanged: the indices of the tensors that a call does not write to.
    """

    copies: Mapping[int, Tensor]
    static: Mapping[int, int]
    parameters: Sequence[tuple[weakref.ref[Tensor], int]]
    unchanged: Sequence[int]

    @classmethod
    def of(
        cls, arguments: Sequence[Any], static_inputs: Sequence[bool], changes: Collection[int]
    ) -> RecordedInputs:
        """Describe the arguments of a call.

        Args:
            arguments: of the call.
            static_inputs: for each argument, True if all calls share its memory.
            changes: the indices of the arguments that the call writes to.
        """
        tensors = {index: a for index, a in enumerate(arguments) if isinstance(a, Tensor)}
        copies = {index: unexpanded(tensor) for index, tensor in tensors.items() if not static_inputs[index]}
        static = {index: tensor.data_ptr() for index, tensor in tensors.items() if static_inputs[index]}
        parameters = [
            (weakref.ref(tensors[index]), address)
            for index, address in static.items()
            if isinstance(tensors[index], torch.nn.Parameter)
        ]
        return cls(copies, static, parameters, sorted(tensors.keys() - {*changes}))

    def copy_from(self, arguments: Sequence[Any]) -> None:
        """Copy the arguments of a call to the tensors that the recorded kernels read."""
        for index, copy in self.copies.items():
            copy.copy_(unexpanded(arguments[index]), non_blocking=True)

    def keep_addresses(self, arguments: Sequence[Any]) -> bool:
        """Return True if the static inputs of a call have the recorded addresses."""
        return all(arguments[index].data_ptr() == address for index, address in self.static.items())

    def have_moved(self) -> bool:
        """Return True if parameters are gone or have new addresses."""
        recorded = ((reference(), address) for reference, address in self.parameters)
        return any(parameter is None or parameter.data_ptr() != address for parameter, address in recorded)

    def static_within(self, tensors: Sequence[Tensor]) -> list[int]:
        """Return the indices of the static inputs that share a storage with one of the tensors."""
        spans = [(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors]
        return [
            index
            for index, address in self.static.items()
            if any(start <= address < start + length for start, length in spans)
        ]


@dataclass(frozen=True, eq=False)
class RecordedOutputs:
    """The outputs of a recorded call: arguments, new tensors, and constants.

    Attributes:
        given: the indices of the arguments that are outputs, by the indices of the outputs.
        tensors: the indices of the outputs that are new tensors.
        constants: the other outputs, at their indices; None at the indices of arguments and new tensors.
        wanted: positions in `tensors` of the outputs that get gradients.
        without: positions in `tensors` of the outputs that do not require gradients.
    """

    given: Mapping[int, int]
    tensors: Sequence[int]
    constants: Sequence[Any]
    wanted: Sequence[int]
    without: Sequence[int]

    @classmethod
    def of(
        cls, outputs: Sequence[Any], arguments: Sequence[Any], wanted: Collection[int], is_trained: bool
    ) -> RecordedOutputs:
        """Describe the outputs of a call.

        Args:
            outputs: of the call.
            arguments: of the call.
            wanted: the indices of the outputs that got gradients in earlier calls.
            is_trained: True if the call has a backward.
        """
        numbers = {id(argument): index for index, argument in enumerate(arguments)}
        given = {index: numbers[id(out)] for index, out in enumerate(outputs) if id(out) in numbers}
        new = {index for index, out in enumerate(outputs) if isinstance(out, Tensor)} - given.keys()
        constants = [None if p in new or p in given else out for p, out in enumerate(outputs)]
        tensors = sorted(new)
        differentiable = [n for n, p in enumerate(tensors) if is_trained and outputs[p].requires_grad]
        get_gradients = [number for number in differentiable if tensors[number] in wanted]
        without = sorted({*range(len(tensors))} - {*differentiable})
        return cls(given, tensors, constants, get_gradients, without)

    def assemble(self, tensors: Sequence[Tensor], arguments: Sequence[Any]) -> list[Any]:
        """Return the outputs of a call with these arguments, which computed these new tensors."""
        outputs = list(self.constants)
        for index, number in self.given.items():
            outputs[index] = arguments[number]
        for index, tensor in zip(self.tensors, tensors, strict=True):
            outputs[index] = tensor
        return outputs
