"""Recognize LayerNorm and RMSNorm, called by name or written out."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from te_transform.canonicalize.op import Spelling
from te_transform.graph import ops
from te_transform.graph.nodes import (
    dtype_of,
    is_model_tensor,
    is_narrower,
    is_number,
    is_tensor_node,
    is_wider,
    same_shape,
    shape_of,
)
from te_transform.graph.pattern import AnyOrder, Call, Match, Maybe, OneOf, Pattern, Var, X

_TINY = 1e-8  # smaller than the length of any nonzero row


def _is_vector(value: Any) -> bool:
    return is_model_tensor(value) and len(shape_of(value)) == 1


def _is_any_vector(value: Any) -> bool:
    """Return True if a value is a vector, stored or computed, that no cast produced."""
    return is_tensor_node(value) and len(shape_of(value)) == 1 and value.target is not ops.cast


def _is_scaled_later(match: Match) -> bool:
    """Return True if readers of a norm without a scale multiply it by a scale in an unknown form."""
    readers = list(match.root.users)
    readers += [user for reader in readers if reader.target is ops.cast for user in reader.users]
    named = any(node.target in (F.layer_norm, F.rms_norm) for node in match.nodes)
    scaled = any(node.target is torch.mul and all(map(is_tensor_node, node.args)) for node in readers)
    return scaled and "weight" not in match.bound and not named


def _is_epsilon(value: Any) -> bool:
    return isinstance(value, float) and 0 < value < 1


def _cast(inner: Pattern) -> Pattern:
    return Maybe(ops.cast, inner)


def _layer_norm(graph: fx.Graph, match: Match) -> tuple | None:
    bound, (x, weight) = match.bound, _input_and_weight(match)
    bias = bound.get("bias")
    uniform = all(part is None or dtype_of(part) is dtype_of(x) for part in (weight, bias))
    fits = bias is None or same_shape(shape_of(bias), shape_of(x)[-1:])
    if not uniform or not fits or not _normalizes_last(match) or not _norm_keeps_dtype(match):
        return None
    if _is_scaled_later(match):
        return None
    return ops.layer_norm, (x, weight, bias, bound["eps"], bound.get("gamma") == "zero-centered")


def _rms_norm(graph: fx.Graph, match: Match) -> tuple | None:
    x, weight = _input_and_weight(match)
    if not _normalizes_last(match) or not _norm_keeps_dtype(match) or _is_scaled_later(match):
        return None
    eps = match.bound["eps"]
    if eps is None:  # F.rms_norm uses the eps of the dtype it computes in
        eps = torch.finfo(torch.promote_types(dtype_of(x), torch.float32)).eps
    return ops.rms_norm, (x, weight, eps, match.bound.get("gamma") == "zero-centered")


def _rms_norm_of_normalize(graph: fx.Graph, match: Match) -> tuple | None:
    """Return the RMSNorm for x / max(|x|, least) * sqrt(width).

    The RMSNorm computes x / sqrt(mean(x^2) + least^2 / width). The two differ only where |x| is about
    `least`; with 1e-12, only rows of zeros come near. At 0 both have the same value, 0, and the same slope.
    In fp16, 1e-12 is 0, and a row of zeros becomes NaN, so there is no match. The same holds if
    least^2 / width underflows in the dtype of the addition.
    """
    x, weight = _input_and_weight(match)
    width, eps = shape_of(x)[-1], _epsilon_of_unit(match)
    if not isinstance(width, int) or not math.isclose(match.bound["factor"], math.sqrt(width)) or eps is None:
        return None
    if not _normalizes_last(match) or not _norm_keeps_dtype(match):
        return None
    return ops.rms_norm, (x, weight, eps, match.bound.get("gamma") == "zero-centered")


def _epsilon_of_unit(match: Match) -> float | None:
    """Return the eps of the RMSNorm that equals a scaled unit vector, or None if there is no such eps.

    For a division by max(|x|, least), eps is least^2 / width. For a division by the length itself, eps is 0,
    and a row of zeros is NaN in both forms. Lengths overflow in fp16. The op's gradient overflows for rows of
    1e-13 and less, where the original's gradient grows by a factor of 1e13.
    """
    x, least = match.bound["x"], match.bound.get("least")
    if least is None:
        return None if any(dtype_of(node) is torch.float16 for node in match.nodes) else 0.0
    added_in = torch.promote_types(dtype_of(x), torch.float32)
    if not torch.finfo(dtype_of(x)).smallest_normal < least <= _TINY:
        return None
    eps = least**2 / shape_of(x)[-1]
    return None if eps < torch.finfo(added_in).smallest_normal else eps


def _input_and_weight(match: Match) -> tuple[fx.Node, fx.Node | None]:
    return match.bound["x"], match.bound.get("weight")


def _normalizes_last(match: Match) -> bool:
    x, weight = _input_and_weight(match)
    width = shape_of(x)[-1:]
    named = match.bound.get("shape", width)
    named = (named,) if isinstance(named, int) else named
    # a node here is a whole tuple of sizes, at least one of them unknown to dynamo
    sized = isinstance(named, (tuple, list)) and all(isinstance(size, (int, torch.SymInt)) for size in named)
    fits = sized and same_shape(named, width) and (weight is None or same_shape(shape_of(weight), width))
    return fits and _averages_columns(match)


def _averages_columns(match: Match) -> bool:
    """Return True if each sum in place of a mean is divided by the number of columns, and not in fp16.

    Sums overflow in fp16.
    """
    bound, columns = match.bound, shape_of(match.bound["x"])[-1]
    if not bound.keys() & {"columns", "share"}:
        return True
    if not isinstance(columns, int) or any(dtype_of(node) is torch.float16 for node in match.nodes):
        return False
    by_number = math.isclose(bound.get("columns", columns), columns)
    return by_number and math.isclose(bound.get("share", 1 / columns) * columns, 1)


def _norm_keeps_dtype(match: Match) -> bool:
    """Return True if the op returns the dtype of the match; it may include a narrowing cast at the end."""
    root, (x, weight) = match.root, _input_and_weight(match)
    widens = root.target is ops.cast and dtype_of(root).itemsize >= dtype_of(root.args[0]).itemsize
    result = dtype_of(x) if weight is None else torch.promote_types(dtype_of(x), dtype_of(weight))
    keeps = result is dtype_of(root) and not is_wider(match.nodes, root)
    return not widens and keeps and not is_narrower(match.nodes, x, root)


_X = _cast(X)
_WEIGHT = _cast(Var("weight", _is_vector))
_GAMMA = OneOf(gamma={"plain": _WEIGHT, "zero-centered": _cast(Call(torch.add, _WEIGHT, 1, commute=True))})
_EPS = Var("eps", _is_epsilon)
_NO_WEIGHT = Var("weight", lambda weight: weight is None)
_NAMED = OneOf(_NO_WEIGHT, _GAMMA, Var("weight", _is_any_vector))  # as an argument, it is always the scale
_SHAPE, _ANY_EPS = Var("shape"), Var("eps")


def _average(total: Pattern) -> Pattern:
    """Return the pattern of a sum over columns that is divided by their number."""
    by_number = Call(torch.div, total, Var("columns", is_number))
    return OneOf(by_number, Call(torch.mul, total, Var("share", is_number), commute=True))


def _mean_of_columns(value: Pattern) -> Pattern:
    value = _cast(value)
    return OneOf(Call(torch.mean, value, -1, True), _average(Call(torch.sum, value, -1, True)))


def _square(value: Pattern) -> Pattern:
    return OneOf(Call(torch.pow, value, 2), Call(torch.mul, value, value), Call(torch.square, value))


def _normalized(x: Pattern, variance: Pattern) -> Pattern:
    """Return the pattern of x / sqrt(variance + eps) * gamma in any spelling, with or without gamma."""
    variance = Call(torch.add, variance, _EPS, commute=True)
    deviation = OneOf(Call(torch.sqrt, variance), Call(torch.pow, variance, 0.5))
    inverse = OneOf(
        Call(torch.rsqrt, variance),
        Call(torch.pow, variance, -0.5),
        Call(torch.reciprocal, deviation),
        Call(operator.truediv, 1, deviation),
    )
    inverse, deviation = _cast(inverse), _cast(deviation)
    alone = OneOf(AnyOrder(torch.mul, x, inverse), Call(torch.div, x, deviation))
    scaled = _cast(AnyOrder(torch.mul, x, _GAMMA))
    return OneOf(
        AnyOrder(torch.mul, _cast(alone), _GAMMA),
        AnyOrder(torch.mul, scaled, inverse),
        Call(torch.div, scaled, deviation),
        alone,
    )


_RMS_NORM = Call(F.rms_norm, _X, _SHAPE, _NAMED, _ANY_EPS)
_LENGTH = _cast(Call(torch.linalg.vector_norm, _X, 2, -1, True))
_WRITTEN_RMS_NORM = _normalized(_X, OneOf(_mean_of_columns(_square(_X)), _average(_square(_LENGTH))))

_CENTERED = Call(torch.sub, _X, _mean_of_columns(_X))
_VARIANCE = OneOf(_mean_of_columns(_square(_cast(_CENTERED))), Call(torch.var, _X, -1, False, True))
_NORMALIZED = _normalized(_cast(_CENTERED), _VARIANCE)
_BIAS = _cast(Var("bias", lambda bias: bias is None or _is_any_vector(bias)))
_LAYER_NORM = Call(F.layer_norm, _X, _SHAPE, _NAMED, _BIAS, _ANY_EPS)
_SCALED_NORM = AnyOrder(torch.mul, _cast(Call(F.layer_norm, _X, _SHAPE, None, None, _ANY_EPS)), _GAMMA)
_SHIFTED = Call(
    torch.add, _cast(OneOf(_NORMALIZED, _SCALED_NORM)), _cast(Var("bias", _is_vector)), commute=True
)

_SCALED_RMS_NORM = AnyOrder(torch.mul, _cast(Call(F.rms_norm, _X, _SHAPE, None, _ANY_EPS)), _GAMMA)
_LEAST = Var("least", _is_epsilon)
_NOT_SHORT = Call(torch.clamp, _LENGTH, _LEAST, None)
_UNIT = _cast(
    OneOf(
        Call(F.normalize, _X, 2, -1, _LEAST), *(Call(torch.div, _X, each) for each in (_LENGTH, _NOT_SHORT))
    )
)
_FACTOR = Var("factor", lambda value: type(value) is float)
_UNIT_RMS_NORM = OneOf(
    AnyOrder(torch.mul, _UNIT, _FACTOR, _GAMMA),
    AnyOrder(torch.mul, _cast(AnyOrder(torch.mul, _UNIT, _FACTOR)), _GAMMA),
    AnyOrder(torch.mul, _UNIT, _FACTOR),
)

NORM_SPELLINGS = (
    Spelling(_cast(OneOf(_SHIFTED, _SCALED_NORM, _LAYER_NORM, _NORMALIZED)), _layer_norm),
    Spelling(_cast(OneOf(_SCALED_RMS_NORM, _RMS_NORM, _WRITTEN_RMS_NORM)), _rms_norm),
    Spelling(_cast(_UNIT_RMS_NORM), _rms_norm_of_normalize),
)
