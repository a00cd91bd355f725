"""The version of a tensor, which detects whether its contents changed, and tensors that may be written."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdRef


def version_of(tensor: Tensor) -> int:
    """Return PyTorch's count of in-place writes to a tensor, or 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version


class TensorVersion(NamedTuple):
    """The tensor, storage, address and version of a tensor at one time.

    All of them are needed. A new tensor or storage may reuse the id or the address of a freed one. An
    assignment to .data does not change the version, and each tensor from .data has its own version. A write
    to the same memory through .data cannot be detected.
    """

    tensor: WeakIdRef
    storage: StorageWeakRef
    address: int
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> TensorVersion:
        """Return the current version of a tensor."""
        storage = StorageWeakRef(tensor.untyped_storage())
        return cls(WeakIdRef(tensor), storage, tensor.data_ptr(), version_of(tensor))

    def is_of(self, tensor: Tensor) -> bool:
        """Return True if this is the current version of `tensor`, in a third of the time that of() takes."""
        same = self.tensor() is tensor and self.storage.cdata == tensor.untyped_storage()._cdata
        return same and self.address == tensor.data_ptr() and self.version == version_of(tensor)

    def __deepcopy__(self, memo: dict) -> TensorVersion:
        return self  # a copy of the weak reference would release the storage's reference twice


def writable(tensor: Tensor) -> Tensor:
    """Return a tensor in the same memory that is no view, so that code may write to it in place.

    Autograd forbids writes to views from a Function. After a write, a view has lost its hooks.
    """
    return torch.ops.aten._unsafe_view(tensor, tensor.shape)
