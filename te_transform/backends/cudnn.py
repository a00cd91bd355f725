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
    """softmax(q k^T * scale) v by cuDNN's kernels, which TE prefers on Hopper, called through PyTorch.

    They are the very kernels that te.DotProductAttention calls there (the same bits come out), for a
    third of its time on the CPU, and from tensors in any order; TE tells packed ones by their offsets,
    and takes it for granted that the other strides fit.
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: plain.Given, *rest: Any) -> Tensor:
        """The attention by cuDNN where that is the best; the reason why it is not is counted."""
        if traced() and not compiling.get():
            return super().attend(query, key, value, mask, *rest)
        query, key, value = as_autocast(query, key, value)
        numbers = tensor_of(mask)
        if why := without_attention(query, key, value, numbers, rest[1]) or self._without(mask):
            self.plain_calls[why] += 1
            return super().attend(query, key, value, mask, *rest)
        with _FIRST:
            if numbers is None:
                return super().attend(query, key, value, None, *rest)
            # unlike PyTorch's other kernels with a mask, cuDNN's take heads that several queries share
            return self._attend(query, key, value, _added(numbers, query.dtype), rest)

    def _without(self, mask: plain.Given) -> str | None:
        """Why cuDNN is not right with this mask, or None."""
        if isinstance(mask, Tensor) and mask.is_floating_point() and self.written_out:
            return "a mask of numbers added to scores that are written out, whose hidden rows have a value"
        return None


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as cuDNN adds it to scores.

    PyTorch fills what a boolean mask hides with a finite number, so that a row that is hidden as a whole gets
    a value that no other kernel gives it (torch 2.11): -inf makes it zero there too. Rows begin where the GPU
    reads 16 bytes at once.
    """
    if mask.dtype is dtype and mask.stride(-1) == 1:
        steps = (mask.storage_offset(), *mask.stride()[:-1])
        if not any(step % ALIGNED for step in steps):
            return mask
    columns = mask.shape[-1]
    added = mask.new_zeros((*mask.shape[:-1], columns + -columns % ALIGNED), dtype=dtype)[..., :columns]
    return added.copy_(mask) if mask.is_floating_point() else added.masked_fill_(~mask, -torch.inf)


class _First:
    """cuDNN before the other kernels: on an H100 twice as fast as FlashAttention 2, which PyTorch prefers.

    sdpa_kernel(set_priority=True) reads and writes each kernel's own switch as well, 30 us of the CPU. The
    order is that of all threads: the first that comes in changes it, the last that leaves puts it back.
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


_FIRST = _First()
