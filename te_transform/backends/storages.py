"""Detection of tensors whose memory has other holders."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import shared_cache


def is_sole_owner(tensor: Tensor, imported: bool) -> bool:
    """Return True if nothing but `tensor` reads or writes its memory.

    Views, detached tensors, arrays and exports through DLPack count as holders of the storage, and so does
    the Python object of the storage. Imported memory (of an array, a file or another library) may have other
    holders. PyTorch marks such a storage as not resizable, and also a storage that an array of numpy reads.

    Args:
        tensor: the tensor.
        imported: True if this library allocated the memory, although it came through DLPack.
    """
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.numel() * tensor.element_size():
        return False
    if not (imported or storage.resizable()) or _is_sent(storage):
        return False
    del storage
    return is_held_by_tensors(tensor, 1)


def is_held_by_tensors(tensor: Tensor, number: int) -> bool:
    """Return True if so many tensors hold the memory of `tensor`, itself included, and nothing else does."""
    # PyTorch's versions count references to a storage differently: compare with a new tensor
    with torch.inference_mode(False), torch.enable_grad():
        fresh = torch.empty(1, dtype=torch.float32, device="cpu", requires_grad=tensor.requires_grad)
        others = [fresh.detach() for _ in range(number - 1)]
        is_same = holders(tensor) == holders(fresh)
    del others  # held until here
    return is_same


def sole_owners_needed(names: Sequence[str]) -> str:
    """Return the report's sentence on parameters that stay because their memory has other holders."""
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return (
        f"expected parameters with memory of their own, got {shown}, which a storage, a view, an array, a "
        "file or another process holds too; drop the holder before convert(), or pass inplace=False. Until "
        "then, each call joins them by a copy"
    )


def holders(tensor: Tensor) -> tuple[int, ...]:
    """Return the counts of whatever refers to the storage's Python object, the storage, and the tensor.

    Weak references and attributes end with the Python object, and the object with the storage. An export
    through DLPack holds the tensor. So does the node that accumulates its gradient, which this function
    creates if there is none.
    """
    edge = get_gradient_edge(tensor) if tensor.requires_grad else None
    of_tensor, storage = tensor._use_count(), tensor.untyped_storage()
    of_object = sys.getrefcount(storage), weakref.getweakrefcount(storage), len(vars(storage))
    of_storage = torch._C._storage_Use_Count(storage._cdata)
    del edge
    return *of_object, of_storage, of_tensor


def _is_sent(storage: torch.UntypedStorage) -> bool:
    """Return True if other processes may have the storage. For PyTorch, all storages on a GPU are shared."""
    if storage.device.type == "cpu":
        return storage.is_shared()
    sent = list(shared_cache.values())
    return any(reference.cdata == storage._cdata for reference in sent if hasattr(reference, "cdata"))
