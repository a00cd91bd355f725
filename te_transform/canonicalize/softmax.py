"""Recognize a softmax that is written out, or that follows a subtraction of the row maximum.

torch.softmax subtracts the maximum itself. A row with only -inf is NaN in all these forms, as in softmax.
exp(x) / exp(x).sum() without a shift is not accepted: it overflows where softmax does not.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

from te_transform.canonicalize.op import Spelling
from te_transform.graph import edit, ops
from te_transform.graph.nodes import dtype_of, is_narrower
from te_transform.graph.pattern import Call, Match, Maybe, OneOf, Pattern, Var, X

_DIM = Var("dim", lambda dim: type(dim) is int)


def _shifted_by(number: Pattern) -> Call:
    """Return the pattern of x minus a number per row.

    The gradient of the number is zero, because the softmax does not depend on it; a detach is optional.
    """
    return Call(torch.sub, X, Maybe(torch.Tensor.detach, number))


_ROW_MAXIMUM = OneOf(
    Call(operator.getitem, Call(torch.max, X, _DIM, True), 0), Call(torch.amax, X, _DIM, True)
)
_EXP = Call(torch.exp, _shifted_by(_ROW_MAXIMUM), role="exp")  # the role makes both sides match the same node
_OVER_SUM = Call(torch.div, _EXP, Call(torch.sum, _EXP, _DIM, True))
_OF_LOG = Call(
    torch.exp,
    OneOf(Call(torch.sub, X, Call(torch.logsumexp, X, _DIM, True)), Call(torch.log_softmax, X, _DIM, None)),
)
_OF_SHIFTED = Call(torch.softmax, Maybe(ops.cast, _shifted_by(_ROW_MAXIMUM)), _DIM, Var("dtype"))


def _as_softmax(graph: fx.Graph, match: Match) -> tuple[Callable, tuple] | None:
    x, dim = match.bound["x"], match.bound["dim"]
    return (torch.softmax, (x, dim, None)) if dtype_of(x) is dtype_of(match.root) else None


def _of_shifted(graph: fx.Graph, match: Match) -> tuple[Callable, tuple] | None:
    """Return the softmax without the shift, or None if a cast in between narrows; other casts stay."""
    softmax, *_ = match.nodes
    x, given = match.bound["x"], softmax.args[0]
    if is_narrower((given,), x):
        return None
    if dtype_of(given) is not dtype_of(x):
        x = edit.insert(match.nodes, ops.cast, (x, dtype_of(given)))
    return torch.softmax, (x, *softmax.args[1:])


SOFTMAXES = (
    Spelling(_OVER_SUM, _as_softmax),
    Spelling(_OF_LOG, _as_softmax),
    Spelling(_OF_SHIFTED, _of_shifted),
)
