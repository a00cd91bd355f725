"""LayerNorm and RMSNorm, called by name or written out."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from te_transform import vocabulary
from te_transform.normalise.word import Spelling
from te_transform.pattern import (
    AnyOrder,
    Call,
    Match,
    Maybe,
    OneOf,
    Pattern,
    Var,
    dtype_of,
    is_tensor_node,
    same_shape,
    shape_of,
)
from te_transform.trace import Recording


def _is_vector(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.op == "get_attr" and len(shape_of(value)) == 1


def _is_epsilon(value: Any) -> bool:
    return isinstance(value, float) and 0 < value < 1


_X = Maybe(vocabulary.cast, Var("x", is_tensor_node))
_WEIGHT = Maybe(vocabulary.cast, Var("weight", _is_vector))
_GAMMA = OneOf(gamma={"plain": _WEIGHT, "zero-centred": Call(torch.add, _WEIGHT, 1, commute=True)})
_EPS = Var("eps", _is_epsilon)


def _cast(inner: Pattern) -> Pattern:
    return Maybe(vocabulary.cast, inner)


def _layer_norm(recording: Recording, match: Match) -> tuple | None:
    x, weight, centred = (
        match.bound["x"],
        match.bound.get("weight"),
        match.bound.get("gamma") == "zero-centred",
    )
    uniform = weight is None or dtype_of(weight) is dtype_of(x)
    if not uniform or not _normalises_last(match) or not _keeps_dtype(match):
        return None
    return vocabulary.layer_norm, (x, weight, match.bound["bias"], match.bound["eps"], centred)


def _rms_norm(recording: Recording, match: Match) -> tuple | None:
    x, weight, centred = (
        match.bound["x"],
        match.bound.get("weight"),
        match.bound.get("gamma") == "zero-centred",
    )
    if not _normalises_last(match) or not _keeps_dtype(match):
        return None
    eps = match.bound["eps"]
    if eps is None:  # F.rms_norm takes that of the dtype it computes in
        eps = torch.finfo(torch.promote_types(dtype_of(x), torch.float32)).eps
    return vocabulary.rms_norm, (x, weight, eps, centred)


def _normalises_last(match: Match) -> bool:
    width = shape_of(match.bound["x"])[-1:]
    weight, named = match.bound.get("weight"), match.bound.get("shape", width)
    return same_shape(tuple(named), width) and (weight is None or same_shape(shape_of(weight), width))


def _keeps_dtype(match: Match) -> bool:
    """Whether the word has the dtype of what it replaces; a cast behind the norm is its own if it narrows."""
    root, x, weight = match.root, match.bound["x"], match.bound.get("weight")
    widens = root.target is vocabulary.cast and dtype_of(root).itemsize >= dtype_of(root.args[0]).itemsize
    result = dtype_of(x) if weight is None else torch.promote_types(dtype_of(x), dtype_of(weight))
    return not widens and result is dtype_of(root)


_SQUARE = OneOf(Call(torch.pow, _X, 2), Call(torch.mul, _X, _X), Call(torch.square, _X))
_VARIANCE = Call(torch.add, Call(torch.mean, _cast(_SQUARE), -1, True), _EPS, commute=True)
_DEVIATION = OneOf(Call(torch.sqrt, _VARIANCE), Call(torch.pow, _VARIANCE, 0.5))
_INVERSE = OneOf(
    Call(torch.rsqrt, _VARIANCE),
    Call(torch.pow, _VARIANCE, -0.5),
    Call(torch.reciprocal, _DEVIATION),
    Call(operator.truediv, 1, _DEVIATION),
)
_NORMALISED = OneOf(AnyOrder(torch.mul, _X, _cast(_INVERSE)), Call(torch.div, _X, _cast(_DEVIATION)))
_WRITTEN_OUT = AnyOrder(torch.mul, _cast(_NORMALISED), _GAMMA)
_NO_WEIGHT = Var("weight", lambda weight: weight is None)
_BIAS = Maybe(vocabulary.cast, Var("bias", lambda bias: bias is None or _is_vector(bias)))
_SHAPE, _ANY_EPS = Var("shape"), Var("eps")
_NAMED = Call(F.rms_norm, _X, _SHAPE, OneOf(_NO_WEIGHT, _GAMMA), _ANY_EPS)
_LAYER_NORM = Call(F.layer_norm, _X, _SHAPE, OneOf(_NO_WEIGHT, _GAMMA), _BIAS, _ANY_EPS)

NORMS = (
    Spelling(_cast(_LAYER_NORM), _layer_norm),
    Spelling(_cast(OneOf(_NAMED, _WRITTEN_OUT)), _rms_norm),
)
