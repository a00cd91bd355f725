"""Recognize scaled dot-product attention that is written out: two products around a softmax.

Five-dimensional attention has a second batch dimension, or groups of heads that share their keys.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from te_transform.canonicalize.grouped import is_given
from te_transform.canonicalize.moves import reshape_sizes
from te_transform.canonicalize.op import Spelling
from te_transform.graph import edit, ops
from te_transform.graph.nodes import (
    dtype_of,
    is_narrower,
    is_number,
    is_tensor_node,
    is_wider,
    same_shape,
    shape_of,
)
from te_transform.graph.pattern import Call, Each, Match, Maybe, OneOf, Pattern, Var

HIDES = -1e4  # a score at or below this gets probability zero if its row has any unmasked score
ABSORBS = -1e30  # adding any score to this fill leaves it unchanged in fp32

# The pattern


def _tensor(name: str) -> Var:
    return Var(name, is_tensor_node)


def _within(inner: Pattern) -> Pattern:
    """Allow casts for the softmax, and views that merge heads into the batch or split them again."""
    return Maybe((torch.reshape, ops.cast), inner)


def _scaled(inner: Pattern, name: str) -> Pattern:
    return OneOf(
        Call(torch.mul, _within(inner), Var(f"{name}_times", is_number), commute=True),
        Call(torch.div, _within(inner), Var(f"{name}_over", is_number)),
        inner,
    )


def _transposed(inner: Pattern) -> Pattern:
    return Call(torch.transpose, inner, -2, -1)


def _score_operand(name: str) -> Pattern:
    """Return the pattern of a query or a key, possibly cast to fp32: the op computes fp32 scores anyway."""
    return Maybe(ops.cast, _tensor(name))


_KEY = OneOf(
    _transposed(_scaled(_score_operand("key"), "key")),
    _scaled(_transposed(_score_operand("key")), "key"),
    _score_operand("turned_key"),
)
PRODUCTS = (torch.matmul, torch.bmm)
_SCORES = Call(PRODUCTS, _scaled(_score_operand("query"), "query"), _KEY, role="scores")
_SCALED = _within(_scaled(_SCORES, "scores"))
_BIASED = OneOf(_within(Call(torch.add, _SCALED, _tensor("bias"), role="biased", commute=True)), _SCALED)


def _filled_with_number(inner: Pattern, role: str, hidden: str, kept: str) -> Pattern:
    return OneOf(
        Call(torch.masked_fill, inner, _tensor(hidden), Var("fill"), role=role),
        Call(torch.where, _tensor(hidden), Var("fill"), inner, role=role),
        Call(torch.where, _tensor(kept), inner, Var("fill"), role=role),
    )


# Scores may be filled twice with the same number, for example by a padding mask and by a causal mask.
_FIRST_FILL = "filled_first", "hidden_first", "kept_first"
_LAST_FILL = "masked", "hidden", "kept"
_FILLED = OneOf(
    _filled_with_number(_within(_filled_with_number(_BIASED, *_FIRST_FILL)), *_LAST_FILL),
    _filled_with_number(_BIASED, *_LAST_FILL),
)
_MASKED = OneOf(
    Call(torch.add, _BIASED, _tensor("mask"), role="masked", commute=True),
    Call(torch.add, _within(_FILLED), _tensor("later"), role="added", commute=True),
    _FILLED,
    _BIASED,
)


def _softmax_of(scores: Pattern) -> Pattern:
    return Call(torch.softmax, _within(scores), -1, Var("softmax_dtype"), role="softmax")


# A sink is an extra score per head. It takes part in the softmax, and its probability is dropped.
_JOINED = Call(torch.cat, Each(_within(_MASKED), _tensor("sinks")), -1, role="joined")
_OF_ALL = _within(_softmax_of(_JOINED))
_OF_KEYS = OneOf(
    Call(ops.columns, _OF_ALL, 0, role="of_keys"), Call(operator.getitem, _OF_ALL, role="of_keys")
)
_WEIGHTS = _within(OneOf(_softmax_of(_scaled(_within(_MASKED), "masked")), _OF_KEYS))
# The probabilities of hidden keys may be filled too, with zeros, which shows in rows that hide every key.
_EMPTIED = OneOf(
    Call(torch.masked_fill, _WEIGHTS, _tensor("hidden"), 0, role="emptied"),
    Call(torch.where, _tensor("kept"), _WEIGHTS, 0, role="emptied"),
)
_FINAL_WEIGHTS = OneOf(_within(_EMPTIED), _WEIGHTS)
_DROPPED_WEIGHTS = OneOf(_within(Call(ops.dropout, _FINAL_WEIGHTS, Var("dropout_p"), True)), _FINAL_WEIGHTS)
_PRODUCT = Call(PRODUCTS, _DROPPED_WEIGHTS, _tensor("value"), role="product")
# The keys' share of the probability, 1 - p(sink), may also be multiplied in after the product.
_SHARE = Call(
    ops.sigmoid, _within(Call(torch.sub, Call(torch.logsumexp, Var("summed"), -1), _tensor("sinks")))
)
_OF_SHARE = Call(torch.mul, _PRODUCT, _within(Call(torch.unsqueeze, _within(_SHARE), -1)))

# The op

_BATCHES, _HEADS = 0, 1  # the first of the two adjacent dimensions to merge


def _fused_attention(graph: fx.Graph, match: Match) -> tuple[Callable, tuple] | None:
    bound, root = match.bound, match.root
    first, last = (match.nodes.index(bound[name]) for name in ("product", "scores"))
    weights = match.nodes[first + 1 : last + 1]  # from the last product to the first
    if not _is_attention(match, weights) or not _sums_the_same(bound) or not _empties_the_hidden(bound):
        return None
    lift = _Lift(match, weights)
    if lift.merged is not None and not _dims_can_be_merged(bound, lift.merged):
        return None
    query, value = lift(bound["query"]), lift(bound["value"])
    sinks = _unexpanded_sinks(bound, query)
    if sinks is None and "sinks" in bound:
        return None
    key = lift(bound["key"]) if "key" in bound else lift.turn(lift(bound["turned_key"]))
    grouped = lift.merged == _HEADS
    if not grouped and not _heads_agree(query, key, value):
        return None
    masking = _masking(lift, query, bound)
    if masking is None:
        return None
    query, mask, *fill_and_hidden = masking
    wide_scores = dtype_of(bound["scores"]).itemsize > dtype_of(query).itemsize
    if sinks is not None:
        sinks = lift.insert(torch.reshape, (sinks, shape_of(query)[1:2]))
    how = (bound.get("dropout_p", 0.0), False, _scale(bound), grouped, wide_scores)
    rest = (sinks, *fill_and_hidden)
    arguments = (query, key, value, mask, *how, *(() if rest == (None, None, None) else rest))
    if len(shape_of(root)) == 4 and "emptied" not in bound:
        return ops.sdpa, arguments
    same_width = same_shape(shape_of(query)[-1:], shape_of(value)[-1:])
    core = lift.insert(ops.sdpa, arguments, like=query if same_width else None)
    core.meta["spelled"] = edit.spelled(match.nodes)
    if "emptied" in bound:
        core = lift.insert(
            torch.masked_fill, (core, lift.insert(ops.hidden_rows, (_hidden(lift, bound),)), 0)
        )
    return torch.reshape, (core, tuple(shape_of(root)))


def _is_attention(match: Match, weights: tuple[fx.Node, ...]) -> bool:
    """Return True if a match is attention that the op can compute.

    The weights must stay [.., queries, keys], no mask may broadcast them to more, and no node outside the
    match may read them.
    """
    root, scores, query = match.root, match.bound["scores"], match.bound["query"]
    operands = [match.bound[name] for name in ("query", "key", "turned_key", "value") if name in match.bound]
    with_sinks = _sink_columns(weights, match.bound.get("of_keys"), match.bound.get("joined"))
    shapes = [shape_of(node) for node in weights if node not in with_sinks]
    ranks = {len(shape): shape for shape in shapes}  # [batch * heads, ..] or [batch, heads, ..]
    return (
        {len(shape_of(node)) for node in (root, *weights, *operands)} in ({3}, {4}, {3, 4}, {5})
        and all(same_shape(shape, ranks[len(shape)]) for shape in shapes)
        and all(same_shape(shape[-2:], shape_of(scores)[-2:]) for shape in shapes)
        and all(user in match.nodes for node in weights for user in node.users)
        and all(dtype_of(node) is dtype_of(query) for node in (root, *operands))
        and not is_narrower(filter(is_tensor_node, match.nodes), query)
        and not is_wider(weights, query)
        and all(_lies_as(node, scores) for node in operands[:-1])
        and _lies_as(match.bound["value"], root)
        and same_shape(shape_of(query)[:-2], shape_of(scores)[:-2])
        and same_shape(shapes[0][:-2], shape_of(root)[:-2])
    )


def _sink_columns(
    weights: tuple[fx.Node, ...], after: fx.Node | None, until: fx.Node | None
) -> Sequence[fx.Node]:
    """Return the weights with a column for the sink: the nodes following `after`, up to `until`."""
    return () if after is None else weights[weights.index(after) + 1 : weights.index(until) + 1]


def _empties_the_hidden(bound: dict[str, Any]) -> bool:
    """Return True if probabilities are not filled, or filled with zeros by the only mask of the scores."""
    others = {"bias", "later", "sinks", *_FIRST_FILL}
    masks = bound.keys() & {*_LAST_FILL[1:]}
    return "emptied" not in bound or ("fill" in bound and len(masks) == 1 and bound.keys().isdisjoint(others))


def _sums_the_same(bound: dict[str, Any]) -> bool:
    """Return True if the logsumexp compared with the sink reads the same scores as the softmax."""
    return "summed" not in bound or bound["softmax"].args[0] is bound["summed"]


def _unexpanded_sinks(bound: dict[str, Any], query: fx.Node) -> fx.Node | None:
    """Return the sinks before they were expanded, or None if the op cannot take them.

    The op takes one number for each head of [batch, heads, queries, keys], and drops only the sink's column
    of the probabilities.
    """
    if "sinks" not in bound:
        return None
    sinks, heads = bound["sinks"], shape_of(query)[1]
    if "summed" in bound:
        return sinks if same_shape(shape_of(sinks), (1, heads, 1)) else None
    of_keys, one = bound["of_keys"], sinks.args[0] if sinks.target is torch.Tensor.expand else sinks
    is_last = of_keys.target is ops.columns or of_keys.args[1] == (Ellipsis, slice(None, -1))
    is_whole = is_last and same_shape(shape_of(sinks), (*shape_of(query)[:-1], 1))
    return one if is_whole and same_shape(shape_of(one), (1, heads, 1, 1)) else None


def _lies_as(operand: fx.Node, product: fx.Node) -> bool:
    """Return True if an operand [batch * heads, ..] has the product's leading dimensions.

    Operands with more than three dimensions are not checked.
    """
    shape = shape_of(operand)
    return len(shape) > 3 or same_shape(shape[:-2], shape_of(product)[:-2])


def _heads_agree(query: fx.Node, key: fx.Node, value: fx.Node) -> bool:
    """Return True if keys and values have as many heads as the query, or one head for all."""
    batch, heads = shape_of(query)[:1], shape_of(query)[1:2]
    same_batch = all(same_shape(shape_of(node)[:1], batch) for node in (key, value))
    return same_batch and any(
        all(same_shape(shape_of(node)[1:2], count) for node in (key, value)) for count in (heads, (1,))
    )


def _merged(bound: dict[str, Any]) -> int | None:
    """Return the first of the two dimensions that the op merges, or None if there are not five dimensions.

    These are the heads and the groups of queries that share a key, or two batch dimensions.
    """
    query, key = shape_of(bound["query"]), shape_of(bound["key" if "key" in bound else "turned_key"])
    if len(query) != 5:
        return None
    return _HEADS if same_shape(key[2:3], (1,)) and not same_shape(query[2:3], (1,)) else _BATCHES


def _dims_can_be_merged(bound: dict[str, Any], at: int) -> bool:
    """Return True if the dimensions `at` and `at` + 1 can be merged in all operands and masks.

    Merging is refused for keys and values that the forward was given if the original's backward reads their
    repeated copies.
    """
    shared = [bound[name] for name in ("key", "turned_key", "value") if name in bound]
    batches = shape_of(bound["query"])[:2]
    if at == _HEADS and torch.is_grad_enabled() and any(map(is_given, shared)):
        return False
    alike = (*batches, 1) if at == _HEADS else batches
    if "sinks" in bound or not all(same_shape(shape_of(node)[: len(alike)], alike) for node in shared):
        return False
    conditions = *_FIRST_FILL[1:], *_LAST_FILL[1:]
    masks = [bound[name] for name in ("bias", "mask", "later", *conditions) if name in bound]
    pairs = [_in_five(mask)[at : at + 2] for mask in masks]
    whole = shape_of(bound["scores"])[at : at + 2]
    return all(same_shape(pair, whole) or same_shape(pair, (1, 1)) for pair in pairs)


def _in_five(x: fx.Node) -> tuple:
    return (*[1] * (5 - len(shape_of(x))), *shape_of(x))


def _scale(bound: dict[str, Any]) -> float:
    scale = 1.0
    for name in ("query", "key", "scores", "masked"):
        scale = scale * _factor(bound, name)
    return scale


def _factor(bound: dict[str, Any], name: str) -> float:
    return bound.get(f"{name}_times", 1) / bound.get(f"{name}_over", 1)


class _Lift:
    """The inserter of calls before a match; it reshapes [batch * heads, ...] to [batch, heads, ...]."""

    def __init__(self, match: Match, weights: tuple[fx.Node, ...]):
        self.match = match
        shapes = [shape_of(node) for node in (*weights, match.bound["value"])]
        self.merged = _merged(match.bound)
        self.groups = next((shape[:2] for shape in shapes if len(shape) == 4), (shapes[0][0], 1))

    def insert(self, target: Callable, args: tuple, like: fx.Node | None = None) -> fx.Node:
        return edit.insert(self.match.nodes, target, args, like)

    def __call__(self, x: fx.Node, at: fx.Node | None = None) -> fx.Node:
        """Return `x` with batch and heads as two dimensions.

        `at` is the node where a mask joins the scores. If that node has four dimensions, the mask needs no
        reshape.
        """
        if len(shape_of(x)) == 1:
            return self.insert(torch.unsqueeze, (x, -2))
        if self.merged is not None:
            return self._merge(x, self.merged) if len(shape_of(x)) > 2 else x
        together = len(shape_of(x)) == len(shape_of(at or x)) == 3
        if not together or (at and same_shape(shape_of(x)[:1], (1,))):
            return x
        shape = (*self.groups, *shape_of(x)[1:])
        return self.insert(torch.reshape, (x, shape))

    def _merge(self, x: fx.Node, at: int) -> fx.Node:
        sizes = _in_five(x)
        shape = (*sizes[:at], sizes[at] * sizes[at + 1], *sizes[at + 2 :])
        return self.insert(torch.reshape, (x, reshape_sizes(x, shape)))

    def turn(self, x: fx.Node) -> fx.Node:
        return self.insert(torch.transpose, (x, -2, -1))

    def negate(self, x: fx.Node) -> fx.Node:
        """Return `not x`, or the operand of x if x is a negation and no write lies in between."""
        here = x.meta.get("region") == self.match.root.meta["region"]
        negated = x.target is torch.logical_not and here
        return x.args[0] if negated else self.insert(torch.logical_not, (x,), like=x)


class _Masking(NamedTuple):
    """The arguments of the op that mask keys; see ops.sdpa().

    Attributes:
        query: zero in rows whose keys are all filled with a finite number.
        mask: the mask, or numbers to add to the scores.
        fill: the finite score of hidden keys.
        hidden: the hidden keys, if the mask has other numbers too.
    """

    query: fx.Node
    mask: fx.Node | None
    fill: float | None = None
    hidden: fx.Node | None = None


def _masking(lift: _Lift, query: fx.Node, bound: dict[str, Any]) -> _Masking | None:
    """Return how the op masks keys, or None if it cannot."""
    added = [bound[name] for name in ("bias", "mask", "later") if name in bound]
    if not all(dtype_of(node) in (dtype_of(query), torch.float32) and shape_of(node) for node in added):
        return None
    bias = lift(bound["bias"], bound["biased"]) if "bias" in bound else None
    if "fill" in bound:
        return _filled_scores(lift, query, bias, bound)
    mask, factor = bias, _factor(bound, "masked")
    if "mask" in bound:
        mask = lift(bound["mask"], bound["masked"])
        mask = mask if bias is None else lift.insert(torch.add, (mask, bias))
    scaled = mask is not None and factor != 1  # the model scales the sum of scores and mask
    return _Masking(query, lift.insert(torch.mul, (mask, factor)) if scaled else mask)


def _filled_scores(
    lift: _Lift, query: fx.Node, bias: fx.Node | None, bound: dict[str, Any]
) -> _Masking | None:
    """Return how the op masks the keys whose scores are filled with a number, or None if it cannot."""
    fill, later = _scaled_fill(bound, _factor(bound, "masked")), bound.get("later")
    if fill is None or not fill <= (HIDES if later is None else ABSORBS):
        return None
    if (hidden := _hidden(lift, bound)) is None:
        return None
    if "sinks" in bound:  # a row that hides all keys gives its whole probability to the sink
        return _Masking(query, lift.negate(hidden)) if bias is None and later is None else None
    if "emptied" in bound:  # rows of -inf would be NaN before they are emptied
        fill = max(fill, torch.finfo(torch.float32).min)
    if later is not None:
        return _Masking(query, _fill_and_later(lift, hidden, fill, bias, bound), None, hidden)
    if bias is None and fill == -math.inf:
        return _Masking(query, lift.negate(hidden))
    if bias is None:  # with a finite fill a fully hidden row is uniform; with -inf it would be NaN
        rows = lift.insert(ops.hidden_rows, (hidden,))
        query = lift.insert(ops.zero_hidden, (query, rows), like=query)
        return _Masking(query, lift.insert(ops.kept, (hidden, rows), like=hidden), fill)
    if ABSORBS >= fill >= torch.finfo(dtype_of(bias)).min:
        return _Masking(query, lift.insert(torch.where, (hidden, fill, bias)), None, hidden)
    return _Masking(query, lift.insert(torch.masked_fill, (bias, hidden, -math.inf)), fill, hidden)


def _fill_and_later(
    lift: _Lift, hidden: fx.Node, fill: float, bias: fx.Node | None, bound: dict[str, Any]
) -> fx.Node:
    """Return the mask for filled scores plus a mask (GPT-Neo: causal fill, padding mask)."""
    later = lift(bound["later"], bound["added"])
    if dtype_of(later).itemsize < torch.float32.itemsize:  # the fill may exceed the range of 16 bits
        later = lift.insert(ops.cast, (later, torch.float32))
    kept = later if bias is None else lift.insert(torch.add, (later, bias))
    return lift.insert(torch.where, (hidden, lift.insert(torch.add, (later, fill)), kept))


def _hidden(lift: _Lift, bound: dict[str, Any]) -> fx.Node | None:
    """Return the keys that are filled, or None if a condition is not a boolean tensor with rows to hide."""
    filled = []
    for role, hidden, kept in (_FIRST_FILL, _LAST_FILL):
        if (condition := bound.get(hidden, bound.get(kept))) is None:
            continue
        if dtype_of(condition) is not torch.bool or not shape_of(condition):
            return None
        condition = lift(condition, bound[role])
        filled.append(lift.negate(condition) if kept in bound else condition)
    return filled[0] if len(filled) == 1 else lift.insert(torch.logical_or, tuple(filled))


def _scaled_fill(bound: dict[str, Any], factor: float) -> float | None:
    """Return the number that scores have where they are filled, or None if it is unknown.

    GPT-J scales scores after it fills them. A factor above 1 may overflow, and a mask would be scaled too.
    """
    fill, is_alone = _fill_value(bound["fill"]), not bound.keys() & {"bias", "later"}
    is_scaled = factor == 1 or (is_alone and 0 < factor < 1)
    return fill * factor if fill is not None and is_scaled else None


def _fill_value(fill: Any) -> float | None:
    """Return the number that scores are filled with, or None if the fill is not a constant.

    Models may wrap the number in a tensor of the scores' dtype. A tensor with other readers is not accepted,
    because they may write to it.
    """
    if isinstance(fill, fx.Node) and fill.target in (torch.tensor, torch.full):
        if any(user.target not in (torch.where, torch.masked_fill) for user in fill.users):
            return None
        place, name = (0, "data") if fill.target is torch.tensor else (1, "fill_value")
        fill = fill.args[place] if len(fill.args) > place else fill.kwargs.get(name)
    return float(fill) if is_number(fill) else None


ATTENTION_SPELLINGS = (Spelling(_OF_SHARE, _fused_attention), Spelling(_PRODUCT, _fused_attention))
