"""Attention within a band of keys, whose kernels compute no scores of keys that a mask would hide.

The operations of compiled graphs; on a GPU a backend's kernels run in their place, see fp8_ops.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_transform.backends.bands import Band, within, within_documents
from te_transform.backends.fp8_ops import by_kernel

OPEN = -1  # an end that a band does not have


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor | None,
    longest: int,
    before: int,
    after: int,
    scale: float,
    packed: bool,
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(q k^T * scale) v within a band.

    Args:
        query: [batch, queries, heads, width] in 16 bits, contiguous; key and value likewise, with as many
            heads, or a divisor.
        ends: int32 [batch + 1], of sequences that are padded, or [documents + 1], see bands.Banded.
        longest: of how many tokens a document is at most; 0 where there are none.
        before, after: how far a query sees, see bands.Band; OPEN without an end.
        packed: whether kernels are to take sequences as if they lay one behind the other.
        keeps: whether a backward follows.

    Returns:
        The attention [batch, queries, heads, width of values], zero where a query sees nothing, and two
        tensors for the backward.
    """
    scores = _scores(query, key, ends, longest, before, after, scale)
    weights = torch.ops.aten._safe_softmax(scores, -1)
    out = weights @ _by_head(value, query.shape[2])
    out = out.transpose(1, 2).to(query.dtype).contiguous()
    if not keeps:
        return out, query.new_empty(0), query.new_empty(0)
    return out, scores.logsumexp(-1, keepdim=True), query.new_zeros(2, dtype=torch.int64)


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    state: Tensor,
    ends: Tensor | None,
    longest: int,
    before: int,
    after: int,
    scale: float,
    packed: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values, from that of what attend() returns, and from that itself."""
    heads, groups = query.shape[2], key.shape[2]
    scores = _scores(query, key, ends, longest, before, after, scale)
    weights = torch.where(sums.isneginf(), 0.0, (scores - sums).exp())
    rows, keys = _by_head(grad, heads), _by_head(key, heads)
    inner = (rows * _by_head(out, heads)).sum(-1, keepdim=True)
    of_scores = weights * (rows @ _by_head(value, heads).mT - inner) * scale
    of_key, of_value = of_scores.mT @ _by_head(query, heads), weights.mT @ rows
    return (
        _as_given(of_scores @ keys, heads, query),
        _as_given(of_key, groups, key),
        _as_given(of_value, groups, value),
    )


def _scores(
    query: Tensor, key: Tensor, ends: Tensor | None, longest: int, before: int, after: int, scale: float
) -> Tensor:
    band = Band(*(None if end == OPEN else end for end in (before, after)), False, False)
    sees = within(band, None if longest else ends, query.shape[1], key.shape[1], query.device)
    if longest:
        sees = sees & within_documents(ends, *query.shape[:2])
    scores = _by_head(query, query.shape[2]) @ _by_head(key, query.shape[2]).mT * scale
    return scores.masked_fill(~sees, -torch.inf)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """[batch, length, heads or groups, width] -> [batch, heads, length, width] in fp32."""
    return x.transpose(1, 2).float().repeat_interleave(heads // x.shape[2], 1)


def _as_given(grad: Tensor, groups: int, like: Tensor) -> Tensor:
    """The gradient of what _by_head() has made of `like`."""
    return grad.unflatten(1, (groups, -1)).sum(2).transpose(1, 2).to(like.dtype).contiguous()


_LIBRARY = torch.library.Library("te_transform", "FRAGMENT")
_REST = "Tensor? ends, int longest, int before, int after, float scale, bool packed"
_LIBRARY.define(
    f"attend(Tensor query, Tensor key, Tensor value, {_REST}, bool keeps) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "attend_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor sums, "
    f"Tensor state, {_REST}) -> (Tensor, Tensor, Tensor)"
)
for _function in (attend, attend_backward):
    _LIBRARY.impl(_function.__name__, _function, "CPU")
    _LIBRARY.impl(_function.__name__, by_kernel(_function), "CUDA")
ops = torch.ops.te_transform


@torch.library.register_fake("te_transform::attend")
def _attended(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, heads, _ = query.shape
    out = query.new_empty(batch, length, heads, value.shape[-1])
    if not rest[-1]:
        return out, query.new_empty(0), query.new_empty(0)
    sums = query.new_empty(batch, heads, length, 1, dtype=torch.float32)
    return out, sums, query.new_zeros(2, dtype=torch.int64)


@torch.library.register_fake("te_transform::attend_backward")
def _attended_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class Attended(torch.autograd.Function):
    """attend() of queries [batch, heads, length, width], and keys and values likewise, with its gradient."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        parts, (sinks, *rest) = [part.transpose(1, 2).contiguous() for part in arguments[:3]], arguments[3:]
        out, sums, state = ops.attend(*parts, *rest, True)
        if sinks is not None:
            out, sums = _beside(sinks, out, sums)
        ctx.save_for_backward(*parts, out, sums, state, rest[0], sinks)
        ctx.rest = rest[1:]
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, ends, sinks = ctx.saved_tensors
        grad = grad.transpose(1, 2).contiguous()
        grads = ops.attend_backward(grad, *saved, ends, *ctx.rest)
        of_sinks = _of_sinks(sinks, grad, *saved[3:5]) if ctx.needs_input_grad[3] else None
        return *(part.transpose(1, 2) for part in grads), of_sinks, *(None,) * (len(ctx.rest) + 1)


def _beside(sinks: Tensor, out: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Attention [batch, queries, heads, width], and the logarithms of its sums [batch, heads, queries, 1],
    with a score more for each query, whose value is zero.

    A backward that gets these computes the gradients of just that: it takes the probabilities from the
    scores and these sums, and their gradients from the products of `out` with its own.
    """
    # one of -inf takes nothing, where a query sees nothing too: the sums of that are -inf as well
    beside = sinks.float().clamp_min(torch.finfo(torch.float32).min).view(-1, 1, 1)
    share = (sums - beside).sigmoid().transpose(1, 2)
    return out.mul_(share), torch.logaddexp(sums, beside)


def _of_sinks(sinks: Tensor, grad: Tensor, out: Tensor, sums: Tensor) -> Tensor:
    """The gradient of sinks [heads]: of their probability, times what it takes from the others."""
    inner = (grad.float() * out).sum(-1).transpose(1, 2)
    share = (sinks.float().view(-1, 1) - sums.squeeze(-1)).exp()
    return -(share * inner).sum((0, 2)).to(sinks.dtype)


def attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor | None,
    band: Band,
    scale: float,
    packed: bool,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention [batch, heads, length, width] within a band, beside sinks [heads], with a gradient where one
    is recorded."""
    before, after = (OPEN if end is None else end for end in (band.before, band.after))
    arguments = (query, key, value, sinks, ends, band.longest, before, after, scale, packed)
    given = (part for part in arguments[:4] if part is not None)
    if torch.is_grad_enabled() and any(part.requires_grad for part in given):
        return Attended.apply(*arguments)
    parts = [part.transpose(1, 2).contiguous() for part in arguments[:3]]
    out, sums, _ = ops.attend(*parts, *arguments[4:], sinks is not None)
    if sinks is not None:
        out, _ = _beside(sinks, out, sums)
    return out.transpose(1, 2)
