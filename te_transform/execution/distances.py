"""Distances between results, and the distances that rounding explains."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def rounding(outputs: Iterable[Tensor], in_fp8: bool = False) -> float:
    """Return the largest relative distance that rounding explains, by the dtypes of the outputs."""
    return 0.3 if in_fp8 or any(tensor.dtype.itemsize <= 2 for tensor in outputs) else 0.01


def distance(one: Any, other: Any) -> float:
    """Return the norm of the difference of two results, relative to the norm of `other`."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return 0.0 if one is other or one == other else math.inf
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    if not one.is_floating_point():
        return 0.0 if torch.equal(one, other) else math.inf
    wide = torch.promote_types(other.dtype, torch.float32)  # fp64 copies of logits may not fit into memory
    off, norm = (torch.linalg.vector_norm(t, dtype=wide).item() for t in (one - other, other))
    if off < math.inf and 1e-15 < norm < math.inf:  # all numbers are finite, and no square underflows
        return off / norm
    finite = other.isfinite()
    if not torch.equal(one.isfinite(), finite):
        return math.inf
    off = torch.where(finite, one.double() - other.double(), 0.0).norm().item()
    norm = torch.where(finite, other.double(), 0.0).norm().item()
    return off / norm if norm else math.inf if off else 0.0
