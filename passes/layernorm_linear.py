"""A linear that reads a norm becomes LayerNormLinear."""

from collections.abc import Iterator

import torch
from torch import fx, nn

from te_transform.graph.nodes import called
from te_transform.graph.pattern import Linear, Norm, OneOf, Var
from te_transform.graph.written_out import Normalized
from te_transform.plan.rule import Operation, Rule

NORMALIZATION = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}


def refuse(norm: Operation | None = None, normalized: fx.Node | None = None) -> Iterator[str]:
    """Yield why a norm is not the op's. Ones and zeros stand for a scale or a bias that a norm lacks."""
    if norm is None:
        yield (
            f"the linear reads a norm that is written out and ends in {called(normalized)}, LayerNormLinear "
            "has LayerNorm and RMSNorm with one scale and one bias: call F.layer_norm or F.rms_norm with "
            "them, where the mathematics allows"
        )


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
    pattern=OneOf(Linear(Norm(Var("x"))), Linear(Normalized("normalized"))),
    refuse=refuse,
    build=build,
    reads=("x", "norm.weight", "norm.bias", "linear.weight", "linear.bias"),
    shares=("norm",),
    example=lambda: (nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32)), torch.zeros(4, 16)),
)
"""Saves writing the normalized tensor and reading it back; in FP8 the norm kernel quantizes its own output.

RMSNorms that round before the scale (Llama's) are rounded once instead, at most about one ulp apart in bf16.
"""
