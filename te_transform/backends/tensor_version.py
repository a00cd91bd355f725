"""What has to be the same for a tensor to hold what it held before."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdRef


def version_of(tensor: Tensor) -> int:
    """How often it was written to in place, as PyTorch counts; tensors of inference are not counted."""
    return 0 if tensor.is_inference() else tensor._version


class TensorVersion(NamedTuple):
    """A tensor, its memory and its version, as they were when the stamp was made.

    No two of these are enough: another tensor, or other memory, may have the id or the address of one that is
    gone, an assignment to .data changes no version, and each tensor that .data made has a version of its own.
    A write through .data, in the same memory, leaves no trace at all.
    """

    tensor: WeakIdRef
    storage: StorageWeakRef
    place: int
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> TensorVersion:
        """That of a tensor as it is now."""
        storage = StorageWeakRef(tensor.untyped_storage())
        return cls(WeakIdRef(tensor), storage, tensor.data_ptr(), version_of(tensor))

    def is_of(self, tensor: Tensor) -> bool:
        """Whether it would be made of this tensor again: in a third of the time that a second one takes."""
        same = self.tensor() is tensor and self.storage.cdata == tensor.untyped_storage()._cdata
        return same and self.place == tensor.data_ptr() and self.version == version_of(tensor)

    def __deepcopy__(self, memo: dict) -> TensorVersion:
        return self  # a copied weak reference to the storage would be given back twice
