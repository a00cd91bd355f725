"""Recognize activations that are written out, and order the factors of a gated product."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import fx

from te_transform.canonicalize.op import Spelling
from te_transform.graph import edit, ops
from te_transform.graph.nodes import dtype_of, is_tensor_node, shape_of
from te_transform.graph.pattern import AnyOrder, Call, Match, Near, OneOf, Pattern, X


def _op(op: Callable) -> Callable[[fx.Graph, Match], tuple | None]:
    def call(graph: fx.Graph, match: Match) -> tuple | None:
        x = match.bound["x"]
        is_precise = "few_digits" not in match.bound or dtype_of(x).itemsize <= 2
        return (op, (x,)) if is_precise and dtype_of(x) is dtype_of(match.root) else None

    return call


def _gated(graph: fx.Graph, match: Match) -> tuple | None:
    """Return the call for F.glu: the first half of the columns times the sigmoid of the second half."""
    x, width = match.bound["x"], shape_of(match.bound["x"])[-1]
    if not isinstance(width, int):
        return None
    halves = (0, width // 2), (width // 2, width)
    beside, gate = (edit.insert(match.nodes, ops.columns, (x, *half)) for half in halves)
    return torch.mul, (edit.insert(match.nodes, ops.sigmoid, (gate,), like=gate), beside)


def _times(*factors: Pattern) -> AnyOrder:
    return AnyOrder(torch.mul, *factors)


def _one_plus(value: Pattern) -> Call:
    return Call(torch.add, value, 1, commute=True)


def _over_root_two(value: Pattern, sign: int = 1) -> OneOf:
    return OneOf(
        Call(torch.div, value, Near(sign * math.sqrt(2))), _times(value, Near(sign * math.sqrt(0.5)))
    )


_ERF = Call(torch.erf, _over_root_two(X))
_ERFC = Call(
    torch.erfc,
    OneOf(_over_root_two(X, -1), _over_root_two(Call(torch.neg, X)), Call(torch.neg, _over_root_two(X))),
)
_PHI = Call(torch.special.ndtr, X)
_CUBE = OneOf(_times(Near(0.044715), Call(torch.pow, X, 3)), _times(Near(0.044715), X, X, X))
_SQUARE = OneOf(_times(Near(0.044715), Call(torch.pow, X, 2)), _times(Near(0.044715), X, X))
_TANH = Call(
    torch.tanh,
    OneOf(
        _times(Near(math.sqrt(2 / math.pi)), Call(torch.add, X, _CUBE, commute=True)),
        _times(Near(math.sqrt(2 / math.pi)), X, _one_plus(_SQUARE)),
    ),
)


# exp(-x) may overflow; the quotient is then 0, the value of sigmoid, and only the gradient is NaN
_DENOMINATOR = _one_plus(Call(torch.exp, Call(torch.neg, X)))
_SIGMOID = OneOf(Call(operator.truediv, 1, _DENOMINATOR), Call(torch.reciprocal, _DENOMINATOR))
_SILU = OneOf(_times(X, OneOf(Call(ops.sigmoid, X), _SIGMOID)), Call(torch.div, X, _DENOMINATOR))

_RELU = Call(ops.relu, X, role="relu")  # the role makes both factors match the same node
_SQUARED = OneOf(Call(torch.pow, _RELU, 2), Call(torch.square, _RELU), Call(torch.mul, _RELU, _RELU))


def _half(value: Pattern) -> Pattern:
    """Return the pattern of x / 2 * value, with the factor 1/2 at any position."""
    halved = [Call(torch.div, _times(X, value), 2), _times(Call(torch.div, X, 2), value)]
    return OneOf(_times(Near(0.5), X, value), *halved)


ACTIVATION_SPELLINGS = (
    Spelling(OneOf(_half(OneOf(_one_plus(_ERF), _ERFC)), _times(X, _PHI)), _op(ops.gelu)),
    Spelling(_half(_one_plus(_TANH)), _op(ops.gelu_tanh)),
    Spelling(_times(X, Call(ops.sigmoid, _times(X, Near(1.702)))), _op(ops.quick_gelu)),
    Spelling(_SILU, _op(ops.silu)),
    Spelling(_SIGMOID, _op(ops.sigmoid)),
    Spelling(_SQUARED, _op(ops.squared_relu)),
    Spelling(Call(F.glu, X, -1), _gated),
)


def put_gates_first(graph: fx.Graph) -> None:
    """Rewrite up * act(gate) as act(gate) * up."""
    for node in graph.nodes:
        if node.target is torch.mul and not node.kwargs and all(map(is_tensor_node, node.args)):
            first, second = node.args
            if second.target in ops.ACTIVATION_OPS and first.target not in ops.ACTIVATION_OPS:
                edit.set_target(node, torch.mul, (second, first))
