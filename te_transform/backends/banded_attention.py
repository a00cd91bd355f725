"""Attention within a band of keys: the kernels skip the scores of masked keys.

This file defines the custom operators for compiled graphs. The backend's kernels compute them, see
te/attention.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_transform.backends.bands import Band
from te_transform.backends.library import define_operator, registered_ops
from te_transform.backends.tracing import needs_gradient

OPEN = -1  # a side on which the band is unlimited


_BANDED = "Tensor? ends, int longest, int before, int after, float scale, bool packed"
define_operator(
    "attend",
    f"(Tensor query, Tensor key, Tensor value, {_BANDED}, bool keeps) -> (Tensor, Tensor, Tensor)",
)
define_operator(
    "attend_backward",
    "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor sums, "
    f"Tensor state, {_BANDED}) -> (Tensor, Tensor, Tensor)",
)


@torch.library.register_fake("te_transform::attend")
def _fake_attended(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
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
    """The autograd function of attend(), for query, key and value [batch, heads, length, width]."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        parts, (sinks, *rest) = [part.transpose(1, 2).contiguous() for part in arguments[:3]], arguments[3:]
        out, sums, state = registered_ops.attend(*parts, *rest, True)
        if sinks is not None:
            out, sums = _add_sinks(sinks, out, sums)
        ctx.save_for_backward(*parts, out, sums, state, rest[0], sinks)
        ctx.rest = rest[1:]
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, ends, sinks = ctx.saved_tensors
        grad = grad.transpose(1, 2).contiguous()
        grads = registered_ops.attend_backward(grad, *saved, ends, *ctx.rest)
        of_sinks = _of_sinks(sinks, grad, *saved[3:5]) if ctx.needs_input_grad[3] else None
        return *(part.transpose(1, 2) for part in grads), of_sinks, *(None,) * (len(ctx.rest) + 1)


def _add_sinks(sinks: Tensor, out: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Add a sink to attention `out` [batch, queries, heads, width] and its log-sum-exp `sums` [batch, heads,
    queries, 1].

    A sink is one more score per query, with a value of zero. The backward needs no change. It computes the
    probabilities from the scores and `sums`, and their gradients from `out` times its gradient.
    """
    # a sink of -inf gets no probability, even where a query sees no key and the log-sum-exp is -inf too
    beside = sinks.float().clamp_min(torch.finfo(torch.float32).min).view(-1, 1, 1)
    share = (sums - beside).sigmoid().transpose(1, 2)
    return out.mul_(share), torch.logaddexp(sums, beside)


def _of_sinks(sinks: Tensor, grad: Tensor, out: Tensor, sums: Tensor) -> Tensor:
    """Return the gradient of the sinks [heads], from their probability and the output's gradient."""
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
    """Compute attention [batch, heads, length, width] within a band, with optional sinks [heads].

    The result is differentiable if autograd is recording.
    """
    before, after = (OPEN if end is None else end for end in (band.before, band.after))
    arguments = (query, key, value, sinks, ends, band.longest, before, after, scale, packed)
    if needs_gradient(*arguments[:4]):
        return Attended.apply(*arguments)
    parts = [part.transpose(1, 2).contiguous() for part in arguments[:3]]
    out, sums, _ = registered_ops.attend(*parts, *arguments[4:], sinks is not None)
    if sinks is not None:
        out, _ = _add_sinks(sinks, out, sums)
    return out.transpose(1, 2)
