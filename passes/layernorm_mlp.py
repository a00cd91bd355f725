"""norm, linear, activation (or gated activation), linear: LayerNormMLP."""

from collections.abc import Iterator

import torch
from torch import nn

from te_transform import vocabulary
from te_transform.passes import layernorm_linear
from te_transform.pattern import Call, Linear, Norm, OneOf, Var
from te_transform.rule import Operation, Rule
from te_transform.weights import Same, SwapHalves

_FC1 = Linear(Norm(Var("x")), role="fc1")
_FIRST = Call(vocabulary.columns, _FC1, 0, Var("half"))
_SECOND = Call(vocabulary.columns, _FC1, Var("half"), Var("end"))


def _activated(hidden: Call) -> Call:
    return Call(vocabulary.ACTIVATIONS, hidden, role="activation")


_HIDDEN = OneOf(
    gated={
        "no": _activated(_FC1),
        "first half": Call(torch.mul, _activated(_FIRST), _SECOND),
        "second half": Call(torch.mul, _activated(_SECOND), _FIRST),
    }
)
_DROPPED = OneOf(_HIDDEN, Call(vocabulary.dropout, _HIDDEN, role="dropout"))


def refuse(
    backend,
    approximate: bool,
    norm: Operation,
    fc1: Operation,
    activation: Operation,
    fc2: Operation,
    gated: str,
    dropout: Operation | None = None,
) -> Iterator[str]:
    """Every reason why this MLP is none that LayerNormMLP computes."""
    yield from layernorm_linear.refuse(norm)
    known = _activations(backend, gated)
    if activation.word == "gelu" and not approximate:
        yield (
            "the activation is the exact (erf) GELU, LayerNormMLP has the tanh approximation: allow "
            "approximate=True"
        )
    elif activation.word != "gelu" and activation.word not in known:
        yield f"the activation is {activation.word}, LayerNormMLP has {', '.join(sorted(known))}"
    if dropout is not None:
        yield (
            f"a dropout of {dropout.p} stands before the second linear, LayerNormMLP has none there: set it "
            "to 0"
        )
    if (fc1.bias is None) != (fc2.bias is None):
        yield "one of the two linears has a bias and one has none, LayerNormMLP has both or none"
    if fc1.weight.shape[1] != fc2.weight.shape[0]:
        yield (
            f"the MLP maps {fc1.weight.shape[1]} features to {fc2.weight.shape[0]}, LayerNormMLP keeps their "
            "number"
        )


def build(
    backend, norm: Operation, fc1: Operation, activation: Operation, fc2: Operation, gated: str
) -> nn.Module:
    """The fused module."""
    hidden_size, ffn_hidden_size = fc2.weight.shape
    return backend.LayerNormMLP(
        hidden_size,
        ffn_hidden_size,
        eps=norm.eps,
        bias=fc1.bias is not None,
        normalization=layernorm_linear.NORMALIZATION[norm.word],
        activation=_activations(backend, gated)[
            "gelu_tanh" if activation.word == "gelu" else activation.word
        ],
        zero_centered_gamma=norm.zero_centered_gamma,
        params_dtype=fc1.weight.dtype,
        device="meta",
    )


def weights(gated: str) -> tuple:
    """The moves; TE activates the first half of a gated fc1."""
    fc1 = SwapHalves if gated == "second half" else Same
    return (
        Same("norm.weight", "fused.layer_norm_weight"),
        Same("norm.bias", "fused.layer_norm_bias"),
        fc1("fc1.weight", "fused.fc1_weight"),
        fc1("fc1.bias", "fused.fc1_bias"),
        Same("fc2.weight", "fused.fc2_weight"),
        Same("fc2.bias", "fused.fc2_bias"),
    )


def _activations(backend, gated: str) -> dict[str, str]:
    return backend.ACTIVATIONS if gated == "no" else backend.GATED_ACTIVATIONS


RULE = Rule(
    name="layernorm_mlp", pattern=Linear(_DROPPED, role="fc2"), refuse=refuse, build=build, weights=weights
)
"""Saves the normalised tensor's round trip and, in FP8, the activation's: it is quantised where it is
computed.

With approximate=True an exact GELU becomes the tanh one: at most 4.8e-4 apart (at |x| = 2.7).
"""
