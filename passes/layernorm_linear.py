"""A linear that reads a norm becomes LayerNormLinear."""

from collections.abc import Iterator

from torch import nn

from te_transform.pattern import Linear, Norm, Var
from te_transform.rule import Operation, Rule
from te_transform.weights import Same

NORMALIZATION = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}


def refuse(norm: Operation) -> Iterator[str]:
    """Every reason why the norm is none that TE's fused modules have."""
    if norm.weight is None:
        yield "the norm has no scale, the fused module always has one"
    if norm.word == "layer_norm" and norm.bias is None:
        yield "the LayerNorm has no bias, the fused module's LayerNorm always has one"


def build(backend, norm: Operation, linear: Operation) -> nn.Module:
    """The fused module, with the norm's eps and kind and the linear's shape."""
    out_features, in_features = linear.weight.shape
    return backend.LayerNormLinear(
        in_features,
        out_features,
        eps=norm.eps,
        bias=linear.bias is not None,
        normalization=NORMALIZATION[norm.word],
        zero_centered_gamma=norm.zero_centered_gamma,
        params_dtype=linear.weight.dtype,
        device="meta",
    )


RULE = Rule(
    name="layernorm_linear",
    pattern=Linear(Norm(Var("x"))),
    refuse=refuse,
    build=build,
    weights=(
        Same("norm.weight", "fused.layer_norm_weight"),
        Same("norm.bias", "fused.layer_norm_bias"),
        Same("linear.weight", "fused.weight"),
        Same("linear.bias", "fused.bias"),
    ),
)
"""Saves writing the normalised tensor and reading it back; in FP8 the norm kernel quantises its own output.

RMSNorms that round before the scale (Llama's) are rounded once instead, at most about one ulp apart in bf16.
"""
