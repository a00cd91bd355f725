"""Recognize mixtures of experts: a router chooses a few experts for each token.

The tokens are sorted by expert, so that the tokens of each expert are consecutive rows. The results are put
back in token order and summed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from te_transform.canonicalize.inplace import Storage, storage_of, written
from te_transform.canonicalize.op import Forms, Spelling
from te_transform.graph import edit, ops
from te_transform.graph.nodes import (
    called,
    dtype_of,
    is_number,
    is_tensor_node,
    same_shape,
    shape_of,
    value,
    writes,
)
from te_transform.graph.pattern import Call, Each, Match, Var, X

_RESHAPE_NAMES = ("reshape", "view", "flatten")


def drop_false_masks(graph: fx.Graph) -> None:
    """Remove masks and clamps for experts beyond the last one if the router cannot choose such experts.

    Models that shard their experts over processes use such masks to mark the experts of other processes.
    The indices that topk returns are below the size of its input, until a write changes them.
    """
    if not any(called(node) == "topk" for node in graph.nodes):
        return
    storage = storage_of(graph)
    wrote = dict.fromkeys(node for node in graph.nodes if writes(node))
    changed: set[fx.Node] = set()  # the owners of memory that has been written to

    def is_kept(value: fx.Node) -> bool:
        return changed.isdisjoint(storage[value])

    for node in graph.nodes:
        in_place = node in wrote
        if _has_no_effect(node, is_kept) and (in_place or _may_be_its_source(node, storage, wrote)):
            edit.replace_uses(node, node.args[0])
            edit.erase_cascade(graph, [node], {node.name})
        elif in_place:
            changed.update(storage[node])


def _may_be_its_source(node: fx.Node, storage: Storage, wrote: Iterable[fx.Node]) -> bool:
    """Return True if the readers of `node` may read its first argument instead.

    Both must have the same strides and the same requires_grad. Neither may be written to later or returned.
    """
    tensor, source = value(node), value(node.args[0])
    is_alike = same_shape(tensor.stride(), source.stride()) and tensor.requires_grad is source.requires_grad
    later = (write for write in wrote if not write._erased and write > node)
    both = storage[node] | storage[node.args[0]]
    seen = (storage[other] for other in (*later, *node.graph.output_node().all_input_nodes))
    return is_alike and not any(both & other for other in seen)


def _has_no_effect(node: fx.Node, is_kept: Callable[[fx.Node], bool]) -> bool:
    """Return True if `node` fills under a mask that is always false, or clamps to the existing experts.

    `is_kept` returns True for a value that no write has changed.
    """
    name, given = called(node), node.args
    if name in ("masked_fill", "masked_fill_") and len(given) == 3 and is_number(given[2]):
        is_whole = same_shape(shape_of(node), shape_of(given[0]))
        mask = _first_argument(given[1]) if called(given[1]) == "unsqueeze" else given[1]
        is_compared = is_tensor_node(mask) and called(mask) == "ge" and len(mask.args) == 2
        return is_whole and is_compared and is_kept(given[1]) and _are_below(*mask.args, is_kept)
    if name in ("clamp", "clamp_") and len(given) == 1 and node.kwargs.keys() == {"max"}:
        return type(node.kwargs["max"]) is int and _are_below(given[0], node.kwargs["max"] + 1, is_kept)
    return False


def _first_argument(node: fx.Node) -> Any:
    """Return the first positional argument of a call, or None if there is none."""
    return node.args[0] if node.args else None


def _are_below(choices: fx.Node, number: int, is_kept: Callable[[fx.Node], bool]) -> bool:
    router = _chosen(choices, is_kept)
    return router is not None and type(number) is int and _router_width(router) <= number


def _chosen(choices: fx.Node, is_kept: Callable[[fx.Node], bool]) -> fx.Node | None:
    """Return the topk indices that `choices` was reordered or reshaped from, or None."""
    while isinstance(choices, fx.Node) and is_kept(choices):
        source = _first_argument(choices)
        if choices.target is operator.getitem and called(source) == "topk":
            return choices if choices.args[1] == 1 and _router_width(choices) else None
        if choices.target is operator.getitem and called(source) == "sort" and choices.args[1] == 0:
            choices = _first_argument(source)
        elif called(choices) in _RESHAPE_NAMES or choices.target is ops.in_order:
            choices = source
        else:
            break
    return None


def _router_width(choices: fx.Node) -> int:
    """Return the number of experts that topk chooses from, or 0 if its dimension is not the last."""
    topk = choices.args[0]
    scores, dim = _first_argument(topk), topk.kwargs.get("dim", topk.args[2] if len(topk.args) > 2 else -1)
    *lead, width = shape_of(scores) if is_tensor_node(scores) and shape_of(scores) else (0,)
    return width if dim in (-1, len(lead)) and type(width) is int else 0


def spell_routing(graph: fx.Graph) -> None:
    """Rewrite the routing of tokens: the sort by expert, and the last row of each expert.

    transformers traces its own grouped product (grouped_mm_fallback) for dtypes other than bfloat16.
    """
    changed = written(graph)

    def is_kept(value: fx.Node) -> bool:
        return value not in changed

    for node in graph.nodes:
        if called(node).startswith("grouped_mm_fallback") and len(node.args) == 2:
            edit.set_target(node, ops.grouped_mm, (*node.args, node.kwargs["offs"]))
        elif called(node) == "cumsum" and (counted := _counted(node, is_kept)) is not None:
            edit.set_target(node, ops.group_ends, counted)
        elif (experts := _sorted(node, is_kept)) is not None:
            edit.set_target(node, ops.by_expert if node.args[1] else ops.in_order, (experts,))


def _sorted(node: fx.Node, is_kept: Callable[[fx.Node], bool]) -> fx.Node | None:
    """Return the choices [tokens, choices] if `node` is their sorted values or the sorting order."""
    if node.target is not operator.getitem or node.args[1:] not in ((0,), (1,)):
        return None
    sort = node.args[0]
    if called(sort) != "sort" or len(sort.args) != 1 or {*sort.kwargs} - {"stable"} or not is_kept(node):
        return None
    flat = sort.args[0]
    experts = flat.args[0] if called(flat) in _RESHAPE_NAMES and len(shape_of(flat)) == 1 else None
    is_choice = is_tensor_node(experts) and len(shape_of(experts)) == 2
    return experts if is_choice and _chosen(experts, is_kept) is experts else None


def _counted(node: fx.Node, is_kept: Callable[[fx.Node], bool]) -> tuple[fx.Node, int] | None:
    """Return the choices that a cumulative sum counts per expert, and the number of experts."""
    counts = _first_argument(node)
    is_count = is_tensor_node(counts) and called(counts) == "histc" and is_kept(counts)
    if not is_count or dtype_of(counts).itemsize < 4 or node.kwargs != {"dim": 0, "dtype": torch.int32}:
        return None  # 16-bit counts are rounded
    values, (bins, least, most) = (
        _first_argument(counts),
        (counts.kwargs.get(k) for k in ("bins", "min", "max")),
    )
    if is_tensor_node(values) and (values.target is ops.cast or called(values) in ("int", "float")):
        values = _first_argument(values)
    is_every = type(bins) is int and (least, most) == (0, bins - 1)
    experts = _chosen(values, is_kept) if is_every else None
    is_choice = experts is not None and len(shape_of(experts)) == 2 and _are_below(experts, bins, is_kept)
    return (experts, bins) if is_choice else None


def _dispatch(graph: fx.Graph, match: Match) -> tuple[Callable, tuple] | None:
    x, experts = match.bound["x"], match.bound["experts"]
    is_each = same_shape(shape_of(experts), (*shape_of(x)[:1], match.bound["choices"]))
    return (ops.dispatch, (x, experts)) if is_each and len(shape_of(x)) == 2 else None


def _combine(graph: fx.Graph, match: Match) -> tuple[Callable, tuple] | None:
    y, experts, flat, numbers = (match.bound[name] for name in ("y", "experts", "flat", "numbers"))
    if any(node.meta["region"] != match.root.meta["region"] for node in (flat, numbers)):
        return None  # a write may have changed them
    weights = _first_argument(flat) if called(flat) in _RESHAPE_NAMES else None
    if weights is None or not same_shape(shape_of(weights), shape_of(experts)):
        return None
    by_token = (*shape_of(experts), *shape_of(y)[-1:])
    is_range = called(numbers) == "arange" and len(numbers.args) == 1
    is_inverse = is_range and same_shape(shape_of(numbers), shape_of(y)[:1])
    if not is_inverse or not same_shape(shape_of(match.bound["rows"]), by_token):
        return None
    return ops.combine, (y, experts, weights, dtype_of(match.root))


_ORDER = Call(ops.by_expert, Var("experts"), role="order")
_CHOICE_WEIGHT = Call(torch.unsqueeze, Call(operator.getitem, Var("flat", is_tensor_node), _ORDER), -1)
_WEIGHTED = Call(torch.mul, Var("y", is_tensor_node), _CHOICE_WEIGHT)
_INVERSE = Call(torch.index_put, Call(torch.empty_like, _ORDER), Each(_ORDER), Var("numbers", is_tensor_node))
_ROWS = Call(torch.reshape, Call(operator.getitem, _WEIGHTED, _INVERSE), role="rows")
_SUMMED_ROWS = Call(torch.sum, _ROWS, -2, False)

_EXPERT_SPELLINGS = (
    Spelling(Call(ops.cast, _SUMMED_ROWS), _combine),
    Spelling(_SUMMED_ROWS, _combine),
    Spelling(
        Call(
            operator.getitem,
            X,
            Call(operator.floordiv, _ORDER, Var("choices", lambda value: type(value) is int)),
        ),
        _dispatch,
    ),
)
FORMS = Forms(_EXPERT_SPELLINGS, spell=spell_routing, prepare=drop_false_masks)
