"""Records about tensors, keyed by identity, without attributes on the tensors."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Record = TypeVar("Record")


class TensorRegistry(Generic[Record]):
    """Records of tensors. A record ends with its tensor; copies and pickles of the tensor have none.

    A record must not refer to its tensor, which would then never be freed.
    """

    def __init__(self) -> None:
        self._records: dict[int, tuple[weakref.ref[Tensor], Record]] = {}

    def get(self, tensor: Tensor) -> Record | None:
        """Return the record of the tensor, or None."""
        entry = self._records.get(id(tensor))
        if entry is None and type(tensor) not in _PLAIN_TENSOR_TYPES:
            tensor = _keyed_by(tensor)
            entry = self._records.get(id(tensor))
        return None if entry is None or entry[0]() is not tensor else entry[1]

    def set(self, tensor: Tensor, record: Record) -> Record:
        """Store the record of the tensor, and return it. Several tensors may share a record."""
        key = _keyed_by(tensor)
        number = id(key)
        self._records[number] = weakref.ref(key, lambda reference: self._end(number, reference)), record
        return record

    def _end(self, number: int, reference: weakref.ref[Tensor]) -> None:
        entry = self._records.get(number)
        if entry is not None and entry[0] is reference:  # no new tensor has taken this address yet
            del self._records[number]

    def __len__(self) -> int:
        return len(self._records)


def _keyed_by(tensor: Tensor) -> Tensor:
    """Return the tensor, or the inner tensor of a wrapper such as a DTensor.

    nn.Module.to() swaps wrappers, and torch.utils.swap_tensors() refuses tensors with weak references.
    """
    while type(tensor) not in _PLAIN_TENSOR_TYPES and is_traceable_wrapper_subclass(tensor):
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    return tensor


_PLAIN_TENSOR_TYPES = (torch.Tensor, nn.Parameter)
