"""Rotary position embeddings, in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_transform.backends import limits
from te_transform.backends.op import FusedOp
from te_transform.backends.tensor_registry import TensorRegistry
from te_transform.backends.tensor_version import version_of
from te_transform.backends.tracing import transformed
from te_transform.graph import ops


class Rotary(FusedOp):
    """A rotary position embedding, which computes cosines and sines from the angles.

    Args:
        factor: the factor of cosines and sines, as in YaRN (Peng et al. 2023).
        wide: True if x is rotated in fp32 and rounded once.
        length_first: True if x is [batch, length, heads, width].
        in_pairs: True if neighboring columns of x rotate together, False if its halves do.
    """

    def __init__(
        self, factor: float = 1.0, wide: bool = False, length_first: bool = False, in_pairs: bool = False
    ):
        super().__init__()
        self.factor, self.wide, self.length_first, self.in_pairs = factor, wide, length_first, in_pairs

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Rotate x.

        Args:
            x: [batch, heads, length, width], or [batch, length, heads, width] if `length_first`.
            angles: [length, width], [1, length, width] or [batch, length, width], in fp32.
        """
        if self.length_first:
            return self.turn(x.transpose(1, 2), angles).transpose(1, 2)
        return self.turn(x, angles)

    def turn(self, x: Tensor, angles: Tensor) -> Tensor:
        """Rotate x [batch, heads, length, width]."""
        dtype = torch.float32 if self.wide else x.dtype
        return ops.rope(x, *_cos_and_sin(angles, self.factor, dtype), self.wide, self.in_pairs)


def _cos_and_sin(angles: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines, and cache them for this tensor of angles, which all layers share.

    A CUDA graph does not use the cache, because its inputs are overwritten before each replay.
    """
    stamp = dtype, factor, version_of(angles)
    kept = None if limits.may_be_replayed() else ROTATIONS.get(angles)
    if kept is None or kept[0] != stamp:
        both = angles.cos(), angles.sin()
        if factor != 1:
            both = tuple(part * factor for part in both)
        kept = stamp, *(part.to(dtype).unsqueeze(-3) for part in both)
        if not (angles.requires_grad or transformed() or limits.may_be_replayed()):
            ROTATIONS.set(angles, kept)
    return kept[1:]


ROTATIONS: TensorRegistry[tuple[Any, ...]] = TensorRegistry()  # by angles
