"""Attention by cuDNN's kernels, called through PyTorch."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from te_transform.backends import plain
from te_transform.backends.bands import tensor_of
from te_transform.backends.limits import ALIGNED, as_autocast, without_attention
from te_transform.backends.tracing import compiling, traced

_CUDNN = int(SDPBackend.CUDNN_ATTENTION)


class DotProductAttention(plain.DotProductAttention):
    """Attention, softmax(q k^T * scale) v, by cuDNN's kernels, called through PyTorch.

    On Hopper, te.DotProductAttention calls the same kernels, and the results are bitwise equal. A call
    through PyTorch takes a third of the CPU time, and supports tensors of any strides. TE recognizes packed
    tensors by their offsets, and does not check their other strides.
    """

    def too_small(self, query: Tensor, key: Tensor, mask: Tensor | None) -> str | None:
        """Return why cuDNN's kernel would not be faster, or None; count the reason."""
        if why := super().too_small(query, key, mask):
            self.plain_calls[why] += 1
        return why

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: plain.Given, *rest: Any) -> Tensor:
        """Compute attention by cuDNN if its kernel is the best one; otherwise count the reason."""
        if traced() and not compiling.get():
            return super().attend(query, key, value, mask, *rest)
        query, key, value = as_autocast(query, key, value)
        numbers = tensor_of(mask)
        if why := without_attention(query, key, value, numbers, rest[1]) or self._without(mask):
            self.plain_calls[why] += 1
            return super().attend(query, key, value, mask, *rest)
        with _CUDNN_FIRST:
            if numbers is None:
                return super().attend(query, key, value, None, *rest)
            # with a mask, cuDNN's kernels support grouped-query attention, unlike PyTorch's other kernels
            return self._attend(query, key, value, _aligned_mask(numbers, query.dtype), rest)

    def _without(self, mask: plain.Given) -> str | None:
        """Return why cuDNN's kernels would be wrong with this mask, or None."""
        if isinstance(mask, Tensor) and mask.is_floating_point() and self.written_out:
            return "a floating-point mask in attention of separate operations, whose masked rows are not zero"
        return None


def _aligned_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask as numbers that cuDNN adds to the scores, with rows aligned to 16 bytes.

    PyTorch fills the False entries of a boolean mask with a finite number. A fully masked row then gets a
    value that no other kernel computes (torch 2.11). With -inf, its result is zero, as in the other kernels.
    """
    if mask.dtype is dtype and mask.stride(-1) == 1:
        steps = (mask.storage_offset(), *mask.stride()[:-1])
        if not any(step % ALIGNED for step in steps):
            return mask
    columns = mask.shape[-1]
    added = mask.new_zeros((*mask.shape[:-1], columns + -columns % ALIGNED), dtype=dtype)[..., :columns]
    return added.copy_(mask) if mask.is_floating_point() else added.masked_fill_(~mask, -torch.inf)


class _CudnnFirst:
    """A context manager that puts cuDNN first in PyTorch's priority order of attention kernels.

    PyTorch prefers FlashAttention 2, which takes twice as long as cuDNN on an H100.
    sdpa_kernel(set_priority=True) would also read and write each kernel's own flag, which takes 30 us of CPU
    time. All threads share the order: the first thread to enter changes it, the last one to leave restores
    it.
    """

    def __init__(self) -> None:
        self.lock, self.inside, self.order = threading.Lock(), 0, []

    def __enter__(self) -> None:
        with self.lock:
            if not self.inside:
                self.order = torch._C._get_sdp_priority_order()
                others = [kernel for kernel in self.order if kernel != _CUDNN]
                torch._C._set_sdp_priority_order([_CUDNN, *others])
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                torch._C._set_sdp_priority_order(self.order)


_CUDNN_FIRST = _CudnnFirst()
