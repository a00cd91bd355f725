"""Inline F.multi_head_attention_forward, a Python function that dynamo captures as one call."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import fx

from te_transform.graph import edit
from te_transform.graph.nodes import dtype_of, is_tensor_node, shape_of

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)
_Insert = Callable[..., fx.Node]


def inline_composites(graph: fx.Graph) -> None:
    """Replace each call of multi_head_attention_forward by the calls that it makes.

    Call this on the captured graph before it is copied, so that a site can cover a part of the attention.
    Results and random numbers stay the same.
    """
    for node in list(graph.nodes):
        if node.target is not F.multi_head_attention_forward:
            continue
        bound = _SIGNATURE.bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        given = SimpleNamespace(**bound.arguments)
        if _can_be_inlined(node, given):
            parts = _multihead_attention(edit.calls_before(node), given)
            for user in list(node.users):
                edit.replace_uses(user, parts[user.args[1]])
            edit.erase_unread([*node.users, node])


def _can_be_inlined(node: fx.Node, given: SimpleNamespace) -> bool:
    """Return True if the call can be inlined: it has no static keys or values, and its outputs are read."""
    parts = (0, 1) if given.need_weights else (0,)
    return (
        given.static_k is None
        and given.static_v is None
        and all(map(is_tensor_node, (given.query, given.key, given.value)))
        and all(user.target is operator.getitem and user.args[1] in parts for user in node.users)
    )


def _multihead_attention(call: _Insert, given: SimpleNamespace) -> tuple[fx.Node, fx.Node | None]:
    if len(shape_of(given.query)) == 2:
        output, weights = _multihead_attention(call, _as_batch(call, given))
        return call(torch.squeeze, output, 1), weights and call(torch.squeeze, weights, 0)
    query, *others = _projected(call, given)
    if given.bias_k is not None:
        others = [_with_row(call, *x) for x in zip(others, (given.bias_k, given.bias_v), strict=True)]
    query, *others = (_split_heads(call, x, given.num_heads) for x in (query, *others))
    if given.add_zero_attn:
        others = [call(F.pad, x, (0, 0, 0, 1)) for x in others]
    heads = [query, *others]
    dropout_p = given.dropout_p if given.training else 0.0
    if given.need_weights:
        output, weights = _weighted(call, given, heads, dropout_p)
    else:
        mask, causal = _combined_mask(call, given)
        weights, arguments = None, (*heads, mask, dropout_p, causal)
        output = call(F.scaled_dot_product_attention, *arguments, like=heads[0])
    output = call(torch.flatten, call(torch.permute, output, (2, 0, 1, 3)), -2)
    return call(F.linear, output, given.out_proj_weight, given.out_proj_bias), weights


def _as_batch(call: _Insert, given: SimpleNamespace) -> SimpleNamespace:
    """Return the arguments of a call without a batch dimension, as a batch of one."""
    inputs = {name: getattr(given, name) for name in ("query", "key", "value")}
    batches = {x: call(torch.unsqueeze, x, 1) for x in dict.fromkeys(inputs.values())}
    padding = given.key_padding_mask and call(torch.unsqueeze, given.key_padding_mask, 0)
    batched = {name: batches[x] for name, x in inputs.items()}
    return SimpleNamespace(**vars(given) | batched | {"key_padding_mask": padding})


def _with_row(call: _Insert, x: fx.Node, row: fx.Node) -> fx.Node:
    """Append a learned row [1, 1, width] to keys or values [length, batch, width]."""
    batch = call(torch.ops.aten.sym_size.int, x, 1)
    return call(torch.cat, (x, call(torch.Tensor.expand, row, (1, batch, -1))))


def _projected(call: _Insert, given: SimpleNamespace) -> list[fx.Node]:
    """Return query, key and value, [length, batch, width] each, from as few products as possible."""
    inputs, bias = (given.query, given.key, given.value), given.in_proj_bias
    if given.use_separate_proj_weight:
        weights = [given.q_proj_weight, given.k_proj_weight, given.v_proj_weight]
        return [
            call(F.linear, *x)
            for x in zip(inputs, weights, _split_projection(call, bias, (1, 1, 1)), strict=True)
        ]
    counts = (1, 1, 1)
    if given.key is given.value:
        inputs, counts = (inputs[:1], (3,)) if given.query is given.key else (inputs[:2], (1, 2))
    weights, biases = (_split_projection(call, part, counts) for part in (given.in_proj_weight, bias))
    products = [call(F.linear, *x) for x in zip(inputs, weights, biases, strict=True)]
    return [part for x, count in zip(products, counts, strict=True) for part in _chunks(call, x, count)]


def _split_projection(call: _Insert, joined: fx.Node | None, counts: tuple[int, ...]) -> list[fx.Node | None]:
    if joined is None or len(counts) == 1:
        return [joined] * len(counts)
    rows = shape_of(joined)[0] // sum(counts)
    together = joined.args[0] if joined.target is torch.cat and not joined.kwargs else ()
    if [shape_of(part)[0] for part in together] == [rows * count for count in counts]:
        return list(together)  # biases that the model concatenated for this call
    parts = call(torch.split, joined, [rows * count for count in counts])
    return [call(operator.getitem, parts, i) for i in range(len(counts))]


def _chunks(call: _Insert, x: fx.Node, count: int) -> list[fx.Node]:
    if count == 1:
        return [x]
    pieces = call(torch.chunk, x, count, -1)
    return [call(operator.getitem, pieces, i) for i in range(count)]


def _split_heads(call: _Insert, x: fx.Node, heads: int) -> fx.Node:
    """Reshape [length, batch, width] to [batch, heads, length, width of a head]."""
    return call(torch.permute, call(torch.unflatten, x, -1, (heads, -1)), (1, 2, 0, 3))


def _additive(call: _Insert, mask: fx.Node | None, given: SimpleNamespace) -> fx.Node | None:
    """Return the additive mask for a boolean (True hides) or additive mask; it keeps all added keys."""
    if mask is None:
        return None
    if dtype_of(mask) is torch.bool:
        zeros = call(torch.zeros_like, mask, dtype=dtype_of(given.query))
        mask = call(torch.masked_fill, zeros, mask, -math.inf)
    added = (given.bias_k is not None) + given.add_zero_attn
    return call(F.pad, mask, (0, added)) if added else mask


def _combined_mask(call: _Insert, given: SimpleNamespace) -> tuple[fx.Node | None, bool]:
    """Return the mask over [batch, heads, queries, keys], and True if the causal flag replaces it."""
    padding = _additive(call, given.key_padding_mask, given)
    if given.is_causal and padding is None and not given.need_weights:
        return None, True
    mask = _additive(call, given.attn_mask, given)
    if mask is not None and len(shape_of(mask)) == 3:
        mask = call(torch.unflatten, mask, 0, (-1, given.num_heads))
    if padding is None:
        return mask, False
    padding = call(operator.getitem, padding, (slice(None), None, None))
    return (padding if mask is None else call(torch.add, mask, padding)), False


def _weighted(
    call: _Insert, given: SimpleNamespace, heads: list[fx.Node], dropout_p: float
) -> tuple[fx.Node, fx.Node]:
    """Return the output and the attention weights, by batched products over batch * heads as in PyTorch."""
    mask, _ = _combined_mask(call, given)
    query, key, value = (call(torch.flatten, x, 0, 1) for x in heads)
    query = call(torch.mul, query, math.sqrt(1.0 / float(shape_of(query)[-1])))
    key = call(torch.transpose, key, -2, -1)
    if mask is None:
        scores = call(torch.bmm, query, key)
    else:
        scores = call(torch.baddbmm, _over_heads(call, mask, heads[0]), query, key)
    weights = call(F.softmax, scores, dim=-1)
    dropped = call(F.dropout, weights, p=dropout_p) if dropout_p > 0.0 else weights
    output, weights = (
        call(torch.unflatten, x, 0, (-1, given.num_heads)) for x in (call(torch.bmm, dropped, value), dropped)
    )
    return output, call(torch.mean, weights, dim=1) if given.average_attn_weights else weights


def _over_heads(call: _Insert, mask: fx.Node, query: fx.Node) -> fx.Node:
    """Expand the mask to [batch * heads, queries, keys]; a two-dimensional mask stays."""
    if len(shape_of(mask)) == 2:
        return mask
    size = [call(torch.ops.aten.sym_size.int, query, d) for d in (0, 1)]
    return call(torch.flatten, call(torch.Tensor.expand, mask, (*size, -1, -1)), 0, 1)
