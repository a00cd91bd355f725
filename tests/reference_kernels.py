"""What the operators of compiled graphs compute, in plain PyTorch, where no kernels of a backend do.

Importing this file registers them on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from te_transform.backends import plain
from te_transform.backends.banded_attention import OPEN
from te_transform.backends.bands import Band
from te_transform.backends.fp8.ops import InFP8, multiply
from te_transform.backends.library import LIBRARY


def attend(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what te/attention.py's attend() computes."""
    *within, keeps = rest
    scores = _scores(query, key, *within)
    weights = torch.ops.aten._safe_softmax(scores, -1)
    out = weights @ _in_float_heads(value, query.shape[2])
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
    *within: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what te/attention.py's attend_backward() computes."""
    scale = within[-2]
    heads, groups = query.shape[2], key.shape[2]
    scores = _scores(query, key, *within)
    weights = torch.where(sums.isneginf(), 0.0, (scores - sums).exp())
    rows, keys = _in_float_heads(grad, heads), _in_float_heads(key, heads)
    inner = (rows * _in_float_heads(out, heads)).sum(-1, keepdim=True)
    of_scores = weights * (rows @ _in_float_heads(value, heads).mT - inner) * scale
    of_key, of_value = of_scores.mT @ _in_float_heads(query, heads), weights.mT @ rows
    return (
        _as_given(of_scores @ keys, heads, query),
        _as_given(of_key, groups, key),
        _as_given(of_value, groups, value),
    )


def _scores(
    query: Tensor,
    key: Tensor,
    ends: Tensor | None,
    longest: int,
    before: int,
    after: int,
    scale: float,
    packed: bool,
) -> Tensor:
    band = Band(*(None if end == OPEN else end for end in (before, after)), False, False)
    sees = within_band(band, None if longest else ends, query.shape[1], key.shape[1], query.device)
    if longest:
        sees = sees & within_documents(ends, *query.shape[:2])
    scores = _in_float_heads(query, query.shape[2]) @ _in_float_heads(key, query.shape[2]).mT * scale
    return scores.masked_fill(~sees, -torch.inf)


def within_band(band: Band, ends: Tensor | None, queries: int, keys: int, device: torch.device) -> Tensor:
    """Return the band as a boolean mask [batch or 1, 1, queries, keys]."""
    query, key = (torch.arange(size, dtype=torch.int64, device=device) for size in (queries, keys))
    distance = (key - query.unsqueeze(-1)).view(1, 1, queries, keys)
    mask = torch.ones_like(distance, dtype=torch.bool)
    if band.before is not None:
        mask = mask & (distance >= -band.before)
    if band.after is not None:
        mask = mask & (distance <= band.after)
    return mask if ends is None else mask & (key < ends.diff().view(-1, 1, 1, 1))


def within_documents(ends: Tensor, batch: int, length: int) -> Tensor:
    """Return the boolean mask [batch, 1, length, length] of packed documents."""
    positions = torch.arange(batch * length, dtype=torch.int64, device=ends.device)
    own = torch.bucketize(positions, ends, right=True).view(batch, 1, length, 1)
    return own == own.mT


def _in_float_heads(x: Tensor, heads: int) -> Tensor:
    """Convert [batch, length, heads or groups, width] to [batch, heads, length, width] in fp32."""
    return x.transpose(1, 2).float().repeat_interleave(heads // x.shape[2], 1)


def _as_given(grad: Tensor, groups: int, like: Tensor) -> Tensor:
    """Convert the gradient of `_in_float_heads(like)` to the layout and dtype of `like`."""
    return grad.unflatten(1, (groups, -1)).sum(2).transpose(1, 2).to(like.dtype).contiguous()


def quantize(
    x: Tensor, scales: Tensor, history: Tensor | None, index: int, dtype: torch.dtype, with_transpose: bool
) -> InFP8:
    """Quantize x * scale to FP8; values out of range become the largest FP8 number.

    Args:
        x: [rows, columns], contiguous.
        scales: [tensors], fp32.
        history: [steps, tensors], fp32; row 0 becomes the maximum of itself and the amax of x.
        index: the index of x among the tensors.
        dtype: float8_e4m3fn or float8_e5m2.
        with_transpose: True to return the transpose too.

    Returns:
        x in FP8, its transpose [columns, rows] or an empty tensor [0], and 1 / scale [1] in fp32.
    """
    limit, wide = torch.finfo(dtype).max, x.float()
    if history is not None:
        history[0, index] = torch.maximum(history[0, index], wide.abs().amax())
    scale = scales[index : index + 1]
    held = (wide * scale).clamp(-limit, limit).to(dtype)
    # not every device transposes FP8; all transpose bytes
    transposed = held.view(torch.uint8).t().contiguous().view(dtype) if with_transpose else held.new_empty(0)
    return held, transposed, 1 / scale


def activate(x: Tensor, activation: str, *where: Any) -> InFP8:
    """Quantize an activation of x [rows, columns], or [rows, 2 columns] if it is gated.

    Args:
        x: the input of the activation.
        activation: TE's name.
        where: the other arguments of quantize().
    """
    return quantize(plain.activated(activation, x.float()), *where)


def activate_backward(
    grad: Tensor, x: Tensor, activation: str, with_sum: bool, *where: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize the gradient of x, computed from the gradient of its activation.

    Args:
        grad: the gradient of the activation.
        x: the input of the activation.
        activation: TE's name.
        with_sum: True to return the sum over the rows too, the gradient of a bias.
        where: the other arguments of quantize().

    Returns:
        The results of quantize(), and the sum in the dtype of `grad` or an empty tensor [0].
    """
    found = _activation_gradient(grad.float(), x.float(), activation)
    total = found.sum(0).to(grad.dtype) if with_sum else grad.new_empty(0)
    return (*quantize(found, *where), total)


def _activation_gradient(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    """Compute the gradient without autograd, which is off inside a library operation."""
    if not plain.is_gated(activation):
        return grad * _DERIVATIVES[activation](x)
    gate, other = x.chunk(2, -1)
    if (clamp := plain.clamp_of(activation)) is not None:
        return _clamped_gradient(grad, gate, other, clamp)
    activated = plain.activated(activation, torch.cat([gate, torch.ones_like(gate)], -1))
    return torch.cat([grad * _DERIVATIVES[_GATE_OF[activation]](gate) * other, grad * activated], -1)


def _clamped_gradient(grad: Tensor, gate: Tensor, other: Tensor, clamp: plain.Clamp) -> Tensor:
    limit, alpha, offset = clamp
    counts, other_counts = gate <= limit, other.abs() <= limit
    gate, other = gate.clamp(max=limit), other.clamp(-limit, limit)
    share = (alpha * gate).sigmoid()
    slope = share + alpha * gate * _sigmoids_slope(alpha * gate)
    parts = (  # a clamped value has no gradient, even if its factor is NaN
        torch.where(counts, grad * slope * (other + offset), 0.0),
        torch.where(other_counts, grad * gate * share, 0.0),
    )
    return torch.cat(parts, -1)


def _sigmoids_slope(x: Tensor) -> Tensor:
    return x.sigmoid() * (1 - x.sigmoid())


_GATE_OF = {
    "geglu": "gelu", "glu": "sigmoid", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu",
    "swiglu": "silu",
}  # fmt: skip
_DERIVATIVES: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate="tanh"),
    "qgelu": lambda x: (1.702 * x).sigmoid() + 1.702 * x * _sigmoids_slope(1.702 * x),
    "silu": lambda x: x.sigmoid() + x * _sigmoids_slope(x),
    "relu": lambda x: (x > 0).float(),
    "srelu": lambda x: 2 * x.relu(),
    "sigmoid": _sigmoids_slope,
}


for compute in (attend, attend_backward, quantize, activate, activate_backward, multiply):
    LIBRARY.impl(compute.__name__, compute, "CPU")
