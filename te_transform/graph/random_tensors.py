"""Random tensors for generated inputs, which are drawn on the CPU, so they are equal for every device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def random_floats(sizes: Sequence[int], like: Tensor) -> Tensor:
    """Return floats of the normal distribution with the dtype and device of `like`."""
    return torch.randn(sizes, dtype=torch.float32, device="cpu").to(like)


def random_ids(count: int, sizes: Sequence[int]) -> Tensor:
    """Return int64 ids below `count`, on the CPU."""
    return torch.randint(count, sizes, dtype=torch.int64, device="cpu")
