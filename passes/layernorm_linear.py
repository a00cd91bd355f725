"""A linear that reads a norm becomes LayerNormLinear."""

from collections.abc import Iterator

import torch
from torch import nn

from te_transform.graph.pattern import Linear, Norm, Var
from te_transform.plan.rule import Operation, Rule

NORMALIZATION = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}


def refuse(norm: Operation) -> Iterator[str]:
    """No reason of its own: where a norm has no scale or no bias, ones and zeros stand for them."""
    yield from ()


def build(backend, norm: Operation, shared: tuple[str, ...]) -> nn.Module:
    """The fused op, with the norm's eps and kind."""
    return backend.LayerNormLinear(
        eps=norm.eps,
        normalization=NORMALIZATION[norm.op],
        zero_centered_gamma=norm.zero_centered_gamma,
        returns_norm="norm" in shared,
    )


RULE = Rule(
    name="layernorm_linear",
    pattern=Linear(Norm(Var("x"))),
    refuse=refuse,
    build=build,
    reads=("x", "norm.weight", "norm.bias", "linear.weight", "linear.bias"),
    shares=("norm",),
    example=lambda: (nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32)), torch.zeros(4, 16)),
)
"""Saves writing the normalized tensor and reading it back; in FP8 the norm kernel quantizes its own output.

RMSNorms that round before the scale (Llama's) are rounded once instead, at most about one ulp apart in bf16.
"""
