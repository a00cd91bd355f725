"""Rotary position embedding by TE's kernel."""

from __future__ import annotations

from torch import Tensor
from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

from te_transform.backends import plain
from te_transform.backends.double_backward import differentiable_twice
from te_transform.backends.limits import without_rotary
from te_transform.backends.tracing import traced


class Rotary(plain.Rotary):
    """A rotary position embedding in one kernel, which computes cosines and sines from the angles."""

    def turn(self, x: Tensor, angles: Tensor) -> Tensor:
        """Rotate x [batch, heads, length, width]."""
        if traced():
            return super().turn(x, angles)
        if why := without_rotary(x, angles):
            self.plain_calls[f"the rotary embedding, {why}"] += 1
            return super().turn(x, angles)
        return differentiable_twice(self._rotated, super().turn, (x, angles), linear=True)

    def _rotated(self, x: Tensor, angles: Tensor) -> Tensor:
        columns = angles.reshape(-1, 1, 1, angles.shape[-1])
        if self.factor != 1:  # the kernel has no such parameter
            x = x * self.factor
        rows = x.transpose(1, 2)
        if len(columns) > x.shape[2]:  # each sequence has its own angles: rotate all as one sequence
            rows = rows.reshape(1, -1, *rows.shape[2:])
        out = apply_rotary_pos_emb(rows, columns, tensor_format="bshd", interleaved=self.in_pairs, fused=True)
        return out.reshape(x.transpose(1, 2).shape).transpose(1, 2)
