"""Rotary position embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from te_transform.backends import limits
from te_transform.backends.op import FusedOp
from te_transform.backends.tracing import transformed
from te_transform.graph import ops


class Rotary(FusedOp):
    """Rotary position embedding, rotate-half form, from the angles themselves."""

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """x [batch, heads, length, width], angles [1 or batch, length, width] in fp32 -> as x."""
        return ops.rope(x, *_cos_and_sin(angles, x.dtype))


def _cos_and_sin(angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[1 or batch, 1, length, width], kept with the angles: all layers of a model turn by the same ones.

    A CUDA graph computes them each time: angles that it is given are overwritten before it is replayed.
    """
    stamp = dtype, 0 if angles.is_inference() else angles._version
    kept = None if limits.may_be_replayed() else angles.__dict__.get("_te_transform_rotation")
    if kept is None or kept[0] != stamp:
        kept = stamp, angles.cos().to(dtype).unsqueeze(1), angles.sin().to(dtype).unsqueeze(1)
        if not (angles.requires_grad or transformed() or limits.may_be_replayed()):
            angles._te_transform_rotation = kept
    return kept[1:]
