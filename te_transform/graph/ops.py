"""The canonical ops: one executable reference function per operation, in plain PyTorch.

canonicalize/ rewrites every form of an operation to these ops. Patterns, rules and the plain backend use no
other ops, unless a package registers its own. All arguments are positional, which gives each operation a
single form in a graph.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from te_transform.graph.bound import F


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute y = x W^T + b, weight [out, in]."""
    return F.linear(x, weight, bias)


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute y = x W^T + b in fp32, x and W in 16 bits, weight [out, in]."""
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float())


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, zero_centered_gamma: bool = False
) -> Tensor:
    """Apply LayerNorm over the last dimension (Ba et al. 2016); zero-centered: the scale is 1 + weight."""
    return F.layer_norm(x, x.shape[-1:], _gamma(weight, zero_centered_gamma), bias, eps)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, zero_centered_gamma: bool = False) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019).

    Statistics are in fp32 or wider. The result is rounded once, as in TE; some models also round before the
    scale. The dtype of the result is the promoted dtype of x and weight. Zero-centered: the scale is 1 +
    weight, added in fp32 or wider (in bf16 the sum would lose the weight).
    """
    if weight is None or (weight.dtype == x.dtype and not zero_centered_gamma):
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    gamma = _gamma(weight.to(wide), zero_centered_gamma)
    return F.rms_norm(x.to(wide), x.shape[-1:], gamma, eps).to(torch.promote_types(x.dtype, weight.dtype))


def _gamma(weight: Tensor | None, zero_centered: bool) -> Tensor | None:
    return 1 + weight if zero_centered and weight is not None else weight


def gelu(x: Tensor) -> Tensor:
    """Compute x * Phi(x), the exact GELU (Hendrycks & Gimpel 2016)."""
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """Compute the tanh approximation of GELU, which TE calls gelu."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """Compute x * sigmoid(1.702 x), as in CLIP."""
    return x * torch.sigmoid(1.702 * x)


def silu(x: Tensor) -> Tensor:
    """Compute x * sigmoid(x)."""
    return F.silu(x)


def relu(x: Tensor) -> Tensor:
    """Compute max(x, 0)."""
    return F.relu(x)


def squared_relu(x: Tensor) -> Tensor:
    """Compute max(x, 0)^2 (So et al. 2021), which TE calls srelu."""
    return F.relu(x).square()


def sigmoid(x: Tensor) -> Tensor:
    """Compute 1 / (1 + exp(-x))."""
    return torch.sigmoid(x)


NORMS = (layer_norm, rms_norm)
ACTIVATION_OPS = (gelu, gelu_tanh, quick_gelu, silu, relu, squared_relu, sigmoid)


def dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """Zero elements with probability p and scale the rest by 1 / (1 - p) in training."""
    return F.dropout(x, p, training)


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    wide_scores: bool = False,
    sinks: Tensor | None = None,
    fill: float | None = None,
    hidden: Tensor | None = None,
) -> Tensor:
    """Compute softmax(q k^T * scale + mask) v over [..., heads, length, width].

    Args:
        query: the queries.
        key: the keys.
        value: the values.
        mask: a mask as in PyTorch: True or 0 keeps a key.
        dropout_p: the dropout probability of the attention weights.
        is_causal: True for a causal mask.
        scale: None: 1 / sqrt(width).
        enable_gqa: True if each key/value head serves consecutive query heads.
        wide_scores: True if the model computes fp32 scores from 16-bit queries; this reference always does.
        sinks: an additional score per query and head, [heads], without a value (Xiao et al. 2023).
        fill: the finite score of hidden keys, see filled().
        hidden: the hidden keys, see filled().
    """
    if fill is not None or hidden is not None:
        wide = torch.promote_types(query.dtype, torch.float32)
        key, value = (_for_each_head(part, query) if enable_gqa else part for part in (key, value))
        products = query.to(wide) @ key.to(wide).mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        weights = filled(products, mask, fill, hidden).softmax(-1)
        weights = F.dropout(weights, dropout_p) if dropout_p else weights
        return weights.to(value.dtype) @ value
    if sinks is not None:  # an additional key with zero values
        key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
        mask, is_causal = _with_sinks(sinks, query, key, mask, is_causal), False
    return F.scaled_dot_product_attention(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _for_each_head(part: Tensor, query: Tensor) -> Tensor:
    return part.repeat_interleave(query.shape[-3] // part.shape[-3], -3)


def filled(scores: Tensor, mask: Tensor | None, fill: float | None, hidden: Tensor | None) -> Tensor:
    """Return masked scores, with the finite score `fill` for hidden keys, or the mask's value if None.

    If `hidden` is None, the boolean mask defines the hidden keys. The finite score matters only in rows
    without a larger score.
    """
    if mask is not None and mask.dtype is torch.bool:
        return scores.masked_fill(~mask, fill)
    masked = scores if mask is None else scores + mask
    if hidden is None:
        return masked
    return torch.where(hidden, mask if fill is None else fill, masked).to(masked.dtype)


def _with_sinks(sinks: Tensor, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Return the additive mask [batch, heads, queries, keys + 1], whose last column is the sinks."""
    shape = (*query.shape[:-1], key.shape[-2] - 1)
    added = query.new_zeros(shape)
    if is_causal:
        mask = torch.ones(shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        added = added.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else added + mask
    return torch.cat((added, sinks.to(added.dtype).view(-1, 1, 1).expand(*shape[:-1], 1)), -1)


def hidden_rows(hidden: Tensor) -> Tensor:
    """Return the rows [..., queries, 1] for which `hidden` [..., queries, keys] hides every key.

    A mask with a finite fill value gives such a row equal scores and a uniform softmax. The canonical form
    keeps all keys of these rows and zeros their queries, which also gives equal scores.
    """
    return hidden.all(-1, keepdim=True)


def kept(hidden: Tensor, rows: Tensor) -> Tensor:
    """Return the keys that a mask with a finite fill value keeps: visible keys, and all in hidden_rows()."""
    return ~hidden | rows


def _row_fill(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(rows, 0.0, -torch.inf).to(dtype)


def __getattr__(name: str) -> Any:
    if name != "row_fill":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    said = "canonical graphs no longer call ops.row_fill(); read the arguments fill and hidden of ops.sdpa()"
    warnings.warn(said, DeprecationWarning, stacklevel=2)
    return _row_fill


def zero_hidden(query: Tensor, rows: Tensor) -> Tensor:
    """Return the query with zeros in hidden_rows()."""
    return query.masked_fill(rows, 0)


def rope(x: Tensor, cos: Tensor, sin: Tensor, wide: bool = False, in_pairs: bool = False) -> Tensor:
    """Apply rotary position embedding (Su et al. 2021).

    The halves of x rotate together: x cos + [-x2, x1] sin. If `in_pairs`, neighboring columns do: the even
    columns are x1, and the odd columns are x2. If `wide`, compute in fp32 and cast the result to the dtype
    of x.
    """
    whole = x.float() if wide else x
    if in_pairs:
        rotated = torch.stack((-whole[..., 1::2], whole[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = whole.chunk(2, dim=-1)
        rotated = torch.cat((-second, first), dim=-1)
    turned = whole * cos + rotated * sin
    return turned.to(x.dtype) if wide else turned


def cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int, reduction: str, dtype: torch.dtype
) -> Tensor:
    """Compute -log softmax(logits)[target] over the last dimension, with logits cast to `dtype`.

    logits [..., vocabulary], targets [...] (class indices). Targets equal to `ignore_index` are ignored.
    reduction is "none", "sum" or "mean" (over the targets that are not ignored).
    """
    rows = logits.to(dtype).reshape(-1, logits.shape[-1])
    losses = F.cross_entropy(rows, targets.reshape(-1), ignore_index=ignore_index, reduction=reduction)
    return losses.reshape(targets.shape) if reduction == "none" else losses


def dispatch(x: Tensor, experts: Tensor) -> Tensor:
    """Return the tokens sorted by expert, each token once per expert that it chose.

    x [tokens, width], experts [tokens, choices] (indices) -> [tokens * choices, width].
    """
    return x[by_expert(experts) // experts.shape[-1]]


def by_expert(experts: Tensor) -> Tensor:
    """Return the indices that sort the choices of experts [tokens, choices] by expert: [tokens * choices]."""
    return experts.flatten().sort(stable=True).indices


def in_order(experts: Tensor) -> Tensor:
    """Return the expert of each row in the order of by_expert(), from experts [tokens, choices]."""
    return experts.flatten().sort().values


def group_ends(experts: Tensor, groups: int) -> Tensor:
    """Return the cumulative number of choices per expert: [groups] in int32."""
    numbers = torch.arange(groups, device=experts.device, dtype=experts.dtype)
    return torch.searchsorted(experts.flatten().sort().values, numbers, right=True, out_int32=True)


def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows of x [rows, in] by the matrix of the group, weight [groups, in, out].

    `ends` [groups] has the first row after each group.
    """
    if x.dtype is torch.bfloat16:  # PyTorch has a bf16 kernel on all devices
        return F.grouped_mm(x, weight, offs=ends)
    bounds = [0, *ends.tolist()]
    groups = zip(itertools.pairwise(bounds), weight, strict=True)
    return torch.cat([x[start:end] @ matrix for (start, end), matrix in groups])


def combine(y: Tensor, experts: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum the weighted rows of y, in the order of dispatch(), for each token.

    y [tokens * choices, width], experts and weights [tokens, choices] -> [tokens, width] in `dtype`. The sum
    is in the wider dtype of y and the weights.
    """
    rows = y[by_expert(experts).argsort()].unflatten(0, experts.shape)
    return (rows * weights.unsqueeze(-1)).sum(1).to(dtype)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast x to `dtype`."""
    return x.to(dtype)


def columns(x: Tensor, start: int, stop: int) -> Tensor:
    """Return x[..., start:stop], one reader's part of a merged projection."""
    return x[..., start:stop]


def join(*parts: Tensor | int) -> Tensor:
    """Concatenate the parts [n_i, ...] along dimension 0: the weights of linears with the same input.

    A number n stands for n rows of zeros: the bias of a linear without bias.
    """
    like = next(part for part in parts if isinstance(part, Tensor))
    return torch.cat(
        [like.new_zeros(part, *like.shape[1:]) if isinstance(part, int) else part for part in parts]
    )


# ops that aten does not have; they always return new memory
NEW: set[Callable] = {wide_linear, by_expert, in_order, dispatch, group_ends, grouped_mm, combine}


def register(op: Callable) -> Callable:
    """Register a function of another package as a canonical op, and return it; usable as a decorator.

    The function must be written like those of this file. It must return new memory. Rules then read its
    arguments by their names.
    """
    NEW.add(op)
    return op


def is_op(target: Any) -> bool:
    """Return True if the target of a call is a canonical op."""
    return getattr(target, "__module__", "") == __name__ or target in NEW
