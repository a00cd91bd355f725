"""Activations that were written out, and the order of a gated product."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from te_transform import rewrite, vocabulary
from te_transform.normalise.word import Spelling
from te_transform.pattern import AnyOrder, Call, Match, Near, OneOf, Pattern, Var, dtype_of, is_tensor_node
from te_transform.trace import Recording


def _word(word: Callable) -> Callable[[Recording, Match], tuple | None]:
    def call(recording: Recording, match: Match) -> tuple | None:
        x = match.bound["x"]
        return (word, (x,)) if dtype_of(x) is dtype_of(match.root) else None

    return call


def _times(*factors: Pattern) -> AnyOrder:
    return AnyOrder(torch.mul, *factors)


def _one_plus(value: Pattern) -> Call:
    return Call(torch.add, value, 1, commute=True)


_X = Var("x", is_tensor_node)
_ERF = Call(torch.erf, OneOf(Call(torch.div, _X, Near(math.sqrt(2))), _times(_X, Near(math.sqrt(0.5)))))
_CUBE = OneOf(_times(Near(0.044715), Call(torch.pow, _X, 3)), _times(Near(0.044715), _X, _X, _X))
_SQUARE = OneOf(_times(Near(0.044715), Call(torch.pow, _X, 2)), _times(Near(0.044715), _X, _X))
_TANH = Call(
    torch.tanh,
    OneOf(
        _times(Near(math.sqrt(2 / math.pi)), Call(torch.add, _X, _CUBE, commute=True)),
        _times(Near(math.sqrt(2 / math.pi)), _X, _one_plus(_SQUARE)),
    ),
)


def _half(value: Pattern) -> Pattern:
    """x / 2 * value, wherever the half is taken."""
    halved = [Call(torch.div, _times(_X, value), 2), _times(Call(torch.div, _X, 2), value)]
    return OneOf(_times(Near(0.5), _X, value), *halved)


ACTIVATIONS = (
    Spelling(_half(_one_plus(_ERF)), _word(vocabulary.gelu)),
    Spelling(_half(_one_plus(_TANH)), _word(vocabulary.gelu_tanh)),
    Spelling(_times(_X, Call(vocabulary.sigmoid, _times(_X, Near(1.702)))), _word(vocabulary.quick_gelu)),
    Spelling(_times(_X, Call(vocabulary.sigmoid, _X)), _word(vocabulary.silu)),
)


def put_gates_first(recording: Recording) -> None:
    """act(gate) * up, never up * act(gate)."""
    for node in recording.graph.nodes:
        if node.target is torch.mul and not node.kwargs and all(map(is_tensor_node, node.args)):
            first, second = node.args
            if second.target in vocabulary.ACTIVATIONS and first.target not in vocabulary.ACTIVATIONS:
                rewrite.respell(node, torch.mul, (second, first))
