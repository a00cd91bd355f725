"""Rotary position embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from te_transform.backends import limits
from te_transform.backends.op import FusedOp
from te_transform.backends.stamp import version_of
from te_transform.backends.tracing import transformed
from te_transform.graph import ops


class Rotary(FusedOp):
    """Rotary position embedding, rotate-half form, from the angles themselves.

    Args:
        factor: that cosines and sines are multiplied by, as in YaRN (Peng et al. 2023).
    """

    def __init__(self, factor: float = 1.0):
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """x [batch, heads, length, width], angles [length, width], with a batch or 1 in front or without, in
        fp32 -> as x."""
        return ops.rope(x, *_cos_and_sin(angles, self.factor, x.dtype))


def _cos_and_sin(angles: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Both as x is multiplied by them, kept with the angles: all layers of a model turn by the same ones.

    A CUDA graph computes them each time: angles that it is given are overwritten before it is replayed.
    """
    stamp = dtype, factor, version_of(angles)
    kept = None if limits.may_be_replayed() else angles.__dict__.get("_te_transform_rotation")
    if kept is None or kept[0] != stamp:
        both = angles.cos(), angles.sin()
        if factor != 1:
            both = tuple(part * factor for part in both)
        kept = stamp, *(part.to(dtype).unsqueeze(-3) for part in both)
        if not (angles.requires_grad or transformed() or limits.may_be_replayed()):
            angles._te_transform_rotation = kept
    return kept[1:]
