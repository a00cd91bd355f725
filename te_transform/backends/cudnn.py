"""Attention by cuDNN's kernels, called through PyTorch."""

from __future__ import annotations

import contextlib
from collections import Counter

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from te_transform.backends import torch as plain
from te_transform.backends.limits import small_attention, without_attention
from te_transform.slots import traced

_CUDNN = int(SDPBackend.CUDNN_ATTENTION)


class _First:
    """cuDNN before the other kernels: on an H100 twice as fast as FlashAttention 2, which PyTorch prefers.

    sdpa_kernel(set_priority=True) reads and writes each kernel's own switch as well, 30 us of the CPU.
    """

    def __enter__(self) -> None:
        self.order = torch._C._get_sdp_priority_order()
        torch._C._set_sdp_priority_order([_CUDNN, *(kernel for kernel in self.order if kernel != _CUDNN)])

    def __exit__(self, *_: object) -> None:
        torch._C._set_sdp_priority_order(self.order)


class DotProductAttention(plain.DotProductAttention):
    """softmax(q k^T * scale) v by cuDNN's kernels, which TE prefers on Hopper, called through PyTorch.

    They are the very kernels that te.DotProductAttention calls there (the same bits come out), for a
    third of its time on the CPU, and from tensors in any order; TE tells packed ones by their offsets,
    and takes it for granted that the other strides fit.
    """

    stands_for = ("eager", "sdpa")

    def __init__(self):
        super().__init__()
        self.plain_calls: Counter[str] = Counter()

    def why_plain(self, hidden: Tensor) -> str | None:
        """Why a module whose core this is runs as it did on these hidden states, rotations too, or None."""
        return small_attention(hidden)

    def takes(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
        """Whether this is a call that cuDNN is the best for; if not, it is counted."""
        if traced():
            return False
        why = without_attention(query, key, value, mask, is_causal)
        if why:
            self.plain_calls[why] += 1
        return why is None

    def kernels(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
    ) -> contextlib.AbstractContextManager:
        """cuDNN's first where they are the best."""
        if self.takes(query, key, value, mask, is_causal):
            return _First()
        return super().kernels(query, key, value, mask, is_causal)
