"""Fuse a norm and the linear that reads it into LayerNormLinear."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import fx, nn

from te_transform.graph.nodes import called, dtype_name, dtype_of
from te_transform.graph.pattern import Linear, Norm, OneOf, Var
from te_transform.graph.written_out import (
    AfterNorm,
    Normalized,
    detaches_statistics,
    has_wide_scale,
    last_call,
    other_norm,
)
from te_transform.plan.rule import Operation, Rule

NORMALIZATION = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}
_SELECTED_ROWS = {"getitem", "narrow", "select", "index_select"}


def refuse(
    norm: Operation | None = None,
    normalized: fx.Node | None = None,
    functions: tuple[str, ...] = (),
) -> Iterator[str]:
    """Yield why the op cannot compute a norm; ones and zeros replace a missing scale or bias."""
    if functions:
        yield from _of_calls_between(functions)
    elif norm is None and (other := other_norm(normalized)) is not None:
        yield from _of_other_norm(other)
    elif norm is None and detaches_statistics(normalized):
        yield (
            "the linear reads a norm whose statistics are detached, but LayerNormLinear computes their "
            "gradient too: remove detach(), if you can retrain"
        )
    elif norm is None:
        yield (
            f"the linear reads a written-out norm that ends in {last_call(normalized)}, but LayerNormLinear "
            "needs LayerNorm or RMSNorm: call F.layer_norm or F.rms_norm with its scale and bias, if the "
            "math allows"
        )


def _of_other_norm(norm: fx.Node) -> Iterator[str]:
    """Yield why the op cannot compute a norm that the model calls by name."""
    if norm.target in (F.layer_norm, F.rms_norm) and has_wide_scale(norm):
        read, scale = (dtype_name(dtype_of(norm.args[at])) for at in (0, 2))
        yield (
            f"the linear reads {called(norm)} of an input in {read} with a scale in {scale}, but "
            f"LayerNormLinear needs one dtype: store the scale in {read}"
        )
    else:
        yield (
            f"the linear reads {called(norm)}, whose mean and variance are not those of single rows, but "
            "LayerNormLinear needs LayerNorm or RMSNorm of rows: no kernel supports others"
        )


def _of_calls_between(functions: tuple[str, ...]) -> Iterator[str]:
    """Yield what to do with calls between a norm and a linear."""
    if functions == ("dropout",):
        step = "set the dropout to 0"
    elif {*functions} <= _SELECTED_ROWS:
        step = "take the rows before the norm"
    else:
        step = "compile=True joins these operations"
    yield (
        f"the linear reads a norm through {', '.join(functions)}, but LayerNormLinear has nothing between "
        f"the two: {step}"
    )


def build(backend, norm: Operation, shared: tuple[str, ...]) -> nn.Module:
    """Return the fused op for the norm's eps and type."""
    return backend.LayerNormLinear(
        eps=norm.eps,
        normalization=NORMALIZATION[norm.op],
        zero_centered_gamma=norm.zero_centered_gamma,
        returns_norm="norm" in shared,
    )


RULE = Rule(
    name="layernorm_linear",
    pattern=OneOf(
        Linear(Norm(Var("x"))),
        Linear(Normalized("normalized")),
        Linear(AfterNorm("functions")),
    ),
    refuse=refuse,
    build=build,
    reads=("x", "norm.weight", "norm.bias", "linear.weight", "linear.bias"),
    shares=("norm",),
    example=lambda: (nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32)), torch.zeros(4, 16)),
)
"""Saves writing the normalized tensor and reading it back; in FP8 the norm kernel quantizes its own output.

RMSNorms that round before the scale (Llama's) round only once instead. In bf16 the results differ by at most
about one ulp.
"""
