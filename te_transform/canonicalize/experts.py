"""Mixtures of experts: each token goes through the few experts that a router chooses for it.

The tokens are sorted by expert, so that those of one expert are a group of rows, and their results are put
back in the order of the tokens and summed up.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

from te_transform.canonicalize.inplace import written
from te_transform.canonicalize.op import Spelling
from te_transform.graph import edit, ops
from te_transform.graph.nodes import called, dtype_of, is_tensor_node, same_shape, shape_of
from te_transform.graph.pattern import Call, Each, Match, Var

_RESHAPES = ("reshape", "view", "flatten")


def drop_false_masks(graph: fx.Graph) -> None:
    """Drop what a model does to choices beyond the last expert, where a router has made none.

    Models that divide their experts among processes mark so what others compute. What topk returns is an
    index of what it looked at.
    """
    aliases = written(graph)
    for node in graph.nodes:
        name = called(node)
        if (name == "masked_fill_" or (name == "masked_fill" and node not in aliases)) and len(node.args) > 1:
            changes = not _is_false(node.args[1])
        elif name in ("clamp", "clamp_") and node.args[1:] == () and node.kwargs.keys() == {"max"}:
            changes = not _are_below(node.args[0], node.kwargs["max"] + 1)
        else:
            continue
        if not changes:
            edit.replace_uses(node, node.args[0])
            edit.erase_cascade(graph, [node], {node.name})


def _is_false(mask: fx.Node) -> bool:
    """Whether it is `choices >= number` of a number that none of them reaches."""
    if called(mask) == "unsqueeze":
        mask = mask.args[0]
    return called(mask) == "ge" and len(mask.args) == 2 and _are_below(*mask.args)


def _are_below(choices: fx.Node, number: int) -> bool:
    found = _chosen(choices)
    return found is not None and type(number) is int and _router_width(found) <= number


def _chosen(choices: fx.Node) -> fx.Node | None:
    """The indices that topk has returned, in any order and shape."""
    while isinstance(choices, fx.Node):
        source = choices.args[0] if choices.args else None
        if choices.target is operator.getitem and called(source) == "topk":
            return choices if choices.args[1] == 1 and _router_width(choices) else None
        if choices.target is operator.getitem and called(source) == "sort" and choices.args[1] == 0:
            choices = source.args[0]
        elif called(choices) in _RESHAPES:
            choices = source
        else:
            break
    return None


def _router_width(choices: fx.Node) -> int:
    """How many experts the router has, of which topk chose along the last dimension; 0 if it is another."""
    topk = choices.args[0]
    scores, dim = topk.args[0], topk.kwargs.get("dim", topk.args[2] if len(topk.args) > 2 else -1)
    width = shape_of(scores)[-1]
    return width if dim in (-1, len(shape_of(scores)) - 1) and type(width) is int else 0


def spell_routing(graph: fx.Graph) -> None:
    """Rewrite how tokens get to their experts: which rows they are, and where each expert's end.

    transformers has a product by groups of its own where it is traced in another dtype than bfloat16.
    """
    for node in graph.nodes:
        if called(node).startswith("grouped_mm_fallback") and len(node.args) == 2:
            edit.set_target(node, ops.grouped_mm, (*node.args, node.kwargs["offs"]))
        if called(node) == "cumsum" and (found := _counted(node)) is not None:
            edit.set_target(node, ops.group_ends, found)
        elif node.target is operator.getitem and isinstance(node.args[1], fx.Node):
            x, index = node.args
            if index.target is operator.floordiv and (experts := _sorted(index.args[0])) is not None:
                is_each = len(shape_of(x)) == 2 and same_shape(shape_of(experts)[-1:], index.args[1:])
                if is_each and same_shape(shape_of(x)[:1], shape_of(experts)[:1]):
                    edit.set_target(node, ops.dispatch, (x, experts))


def _sorted(order: fx.Node) -> fx.Node | None:
    """The choices [tokens, choices] whose order, by expert, this is."""
    sort = order.args[0] if order.target is operator.getitem and order.args[1] == 1 else None
    if called(sort) != "sort" or len(sort.args) != 1 or {*sort.kwargs} - {"stable"}:
        return None
    flat = sort.args[0]
    experts = flat.args[0] if called(flat) in _RESHAPES and len(shape_of(flat)) == 1 else None
    is_choice = is_tensor_node(experts) and len(shape_of(experts)) == 2 and _chosen(experts) is experts
    return experts if is_choice else None


def _counted(node: fx.Node) -> tuple[fx.Node, int] | None:
    """The choices whose numbers a running sum adds up, and the number of experts."""
    counts = node.args[0]
    if called(counts) != "histc" or node.kwargs != {"dim": 0, "dtype": torch.int32}:
        return None
    values, (bins, least, most) = counts.args[0], (counts.kwargs.get(k) for k in ("bins", "min", "max"))
    if values.target is ops.cast or called(values) in ("int", "float"):
        values = values.args[0]
    experts = _chosen(values)
    every = type(bins) is int and (least, most) == (0, bins - 1)
    is_choice = every and experts is not None and len(shape_of(experts)) == 2 and _are_below(experts, bins)
    return (experts, bins) if is_choice else None


def _combine(graph: fx.Graph, match: Match) -> tuple[Callable, tuple] | None:
    found, root = match.bound, match.root
    experts, flat = _sorted(found["order"]), found["flat"]
    weights = flat.args[0] if called(flat) in _RESHAPES else None
    if experts is None or weights is None or not same_shape(shape_of(weights), shape_of(experts)):
        return None
    by_token = (*shape_of(experts), *shape_of(found["y"])[-1:])
    is_inverse = _is_range(found["numbers"], shape_of(found["order"]))
    if not is_inverse or not same_shape(shape_of(found["rows"]), by_token):
        return None
    return ops.combine, (found["y"], experts, weights, dtype_of(root))


def _is_range(numbers: fx.Node, shape: tuple) -> bool:
    """Whether these are 0, 1, 2, and so on, as many as there are rows."""
    return called(numbers) == "arange" and len(numbers.args) == 1 and same_shape(shape_of(numbers), shape)


_ORDER = Var("order", is_tensor_node)
_WEIGHT = Call(torch.unsqueeze, Call(operator.getitem, Var("flat", is_tensor_node), _ORDER), -1)
_WEIGHTED = Call(torch.mul, Var("y", is_tensor_node), _WEIGHT)
_INVERSE = Call(torch.index_put, Call(torch.empty_like, _ORDER), Each(_ORDER), Var("numbers", is_tensor_node))
_ROWS = Call(torch.reshape, Call(operator.getitem, _WEIGHTED, _INVERSE), role="rows")
_SUMMED = Call(torch.sum, _ROWS, -2, False)

EXPERTS = (Spelling(Call(ops.cast, _SUMMED), _combine), Spelling(_SUMMED, _combine))
