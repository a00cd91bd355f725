"""Attention within a band of keys, by cuDNN's kernels through TE. PyTorch calls them with masks only."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformer_engine.pytorch.cpp_extensions import fused_attn

from te_transform.backends import banded_attention, cudnn, plain
from te_transform.backends.banded_attention import OPEN
from te_transform.backends.bands import PLANNED_LENGTHS, Band, Banded, sees_itself
from te_transform.backends.double_backward import differentiable_twice
from te_transform.backends.limits import (
    as_autocast,
    gains_packed,
    has_odd_lengths,
    without_band,
)
from te_transform.backends.tracing import compiling, traced
from te_transform.graph.bound import F

# older versions of TE do not have the parameter
_HAS_FORMATS = "o_format" in inspect.signature(fused_attn.fused_attn_fwd).parameters
_KERNEL = fused_attn.FusedAttnBackend["F16_arbitrary_seqlen"]


class DotProductAttention(cudnn.DotProductAttention):
    """Attention by cuDNN's kernels.

    They are called through TE within a band of keys, and for odd lengths (see limits.has_odd_lengths()).
    Otherwise, they are called through PyTorch, which supports masks and dropout.
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: plain.Given, *rest: Any) -> Tensor:
        """Compute attention. Kernels for bands do not read a mask that is a band."""
        dropout_p, is_causal, scale, enable_gqa = rest
        band = _band_of(mask, is_causal, query, key)
        # without a mask and with even lengths, a call through PyTorch is as good, and takes less CPU time
        is_alike = mask is None and not (query.dim() == 4 and has_odd_lengths(query, key))
        if is_alike or band is None or not _HAS_FORMATS or (traced() and not compiling.get()):
            return super().attend(query, key, value, mask, *rest)
        parts = as_autocast(query, key, value)
        if without_band(*parts, band, dropout_p, enable_gqa):
            return super().attend(query, key, value, mask, *rest)
        return _in_cudnn(parts, None, mask, band, scale)

    def beside_sinks(self, *arguments: Any) -> Tensor:
        """Compute attention with sinks, within a band of keys by cuDNN's kernels."""
        in_pytorch = super().beside_sinks
        if traced() and not compiling.get():
            return in_pytorch(*arguments)
        if why := _without_sinks(*arguments):
            self.plain_calls[f"attention with sinks, {why}"] += 1
            return in_pytorch(*arguments)
        if compiling.get():
            return _beside_sinks(*arguments)
        return differentiable_twice(_beside_sinks, in_pytorch, arguments)


def _without_sinks(
    query: Tensor, key: Tensor, value: Tensor, _: Tensor, mask: plain.Given, *rest: Any
) -> str | None:
    """Return why kernels cannot run this attention with sinks, or None."""
    dropout_p, is_causal, _, enable_gqa = rest
    band = _band_of(mask, is_causal, query, key)
    if band is None or not _HAS_FORMATS:
        return "a mask that is not a band of keys" if band is None else "a TE version without output formats"
    return without_band(*as_autocast(query, key, value), band, dropout_p, enable_gqa)


def _beside_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: plain.Given, *rest: Any
) -> Tensor:
    _, is_causal, scale, _ = rest
    band = _band_of(mask, is_causal, query, key)
    return _in_cudnn(as_autocast(query, key, value), sinks, mask, band, scale)


def _in_cudnn(
    parts: tuple[Tensor, ...], sinks: Tensor | None, mask: Banded | None, band: Band, scale: float | None
) -> Tensor:
    query = parts[0]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    ends = None if mask is None else _of_batch(mask, query)
    packed = bool(band.documents) or gains_packed(*parts)
    out = banded_attention.attended(*parts, ends, band, scale, packed, sinks)
    if band.documents and band.blind:  # in kernels, the queries of padding see each other
        out = torch.where(sees_itself(mask.mask)[:, None, :, None], out, 0)
    return out


def _band_of(mask: plain.Given, is_causal: bool, query: Tensor, key: Tensor) -> Band | None:
    """Return the band of keys of this attention, or None if the mask is not a band of these keys."""
    if not isinstance(mask, Banded):
        return None if mask is not None else Band(None, 0 if is_causal else None, False, False)
    queries, keys = mask.mask.shape[-2:]
    # a mask to be expanded along the keys is a band of fewer keys
    is_of_keys = keys == key.shape[-2] and (not mask.documents or queries == query.shape[-2])
    is_of_batch = mask.ends is None or _sequences(mask) in (1, len(query))
    return mask.band if is_of_keys and is_of_batch else None


def _sequences(mask: Banded) -> int:
    """Return the batch size of the mask."""
    return len(mask.mask) if mask.mask.dim() == 4 else 1


def _of_batch(mask: Banded, query: Tensor) -> Tensor | None:
    """Return the ends of the mask's sequences, repeated for the whole batch if the mask has batch size 1."""
    ends, batch = mask.ends, len(query)
    if ends is None or batch == _sequences(mask):
        return ends
    each = torch.arange(batch, dtype=torch.int32, device=ends.device).unsqueeze(-1)
    return F.pad((ends[1:] + each * ends[-1]).flatten(), (1, 0))


def attend(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Compute softmax(q k^T * scale) v within a band, by cuDNN.

    Args:
        query: [batch, queries, heads, width] in a 16-bit dtype, contiguous.
        key, value: the same layout. Their number of heads divides that of the query.
        rest: the other arguments of the operator, see _arguments(); the last is True if a backward follows.

    Returns:
        The attention [batch, queries, heads, width of values], which is zero for queries that see no key,
        and two tensors for the backward.
    """
    *within, keeps = rest
    where, how = _arguments(query, key, *within)
    parts = _as_laid_out((query, key, value), how)
    out, saved = fused_attn.fused_attn_fwd(keeps, *where, *parts, query.dtype, _KERNEL, **how)
    out = out.view(*query.shape[:-1], value.shape[-1])
    if not keeps:
        return out, query.new_empty(0), query.new_empty(0)
    sums, state = saved[:2]
    if sums.dim() == 3:  # [rows, heads, 1] of packed sequences
        sums = sums.view(*query.shape[:-1], 1).transpose(1, 2).contiguous()
    return out, sums, state


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, given attend()'s outputs and the output's gradient."""
    sums, state, *within = rest
    if within[-1]:
        sums = sums.transpose(1, 2).flatten(0, 1)
    where, how = _arguments(query, key, *within)
    parts = _as_laid_out((query, key, value, out, grad), how)
    how |= {"do_format": how["o_format"], "dqkv_layout": how["qkv_layout"], "deterministic": False}
    grads = fused_attn.fused_attn_bwd(*where, *parts, query.dtype, [sums.contiguous(), state], _KERNEL, **how)
    return tuple(part.view_as(like) for part, like in zip(grads[:3], (query, key, value), strict=True))


def _arguments(
    query: Tensor,
    key: Tensor,
    ends: Tensor | None,
    longest: int,
    before: int,
    after: int,
    scale: float,
    packed: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of TE's forward and backward functions.

    They say where sequences begin and end, and which keys a query sees.

    Args:
        query, key: of attend().
        ends: int32 cumulative lengths: [batch + 1] of padded sequences, or [documents + 1] of documents. See
            bands.Banded.
        longest: the maximum number of tokens in a document, or 0 without documents.
        before, after: how far a query sees, see bands.Band; OPEN if unlimited.
        scale: of the scores.
        packed: True if the kernels treat the sequences as packed, one after another.
    """
    batch, queries, keys = len(query), query.shape[1], key.shape[1]
    of_queries, of_keys, lengths = ends, ends, (longest, longest)
    if not longest:
        lengths = queries, keys
        of_queries, of_keys = (
            torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device)
            for length in lengths
        )
    mask_type = "no_mask" if after else "causal"
    # without a padding mask, the gradients of odd lengths are wrong in a CUDA graph (cuDNN 9.14)
    if ends is not None or packed or any(length % PLANNED_LENGTHS for length in (queries, keys)):
        mask_type = "padding_causal" if mask_type == "causal" else "padding"
    window = (before, after)
    if after != OPEN and window != (OPEN, 0):
        window = (queries - 1 if before == OPEN else before, after)
    elif before != OPEN:
        window = (before, keys - 1)
    form = "thd" if packed else "bshd"
    how = {
        "attn_scale": scale,
        "qkv_layout": "_".join([form] * 3),
        "o_format": form,
        "attn_mask_type": mask_type,
        "window_size": window,
    }
    if packed:
        lengths = tuple(-(-length // PLANNED_LENGTHS) * PLANNED_LENGTHS for length in lengths)
        how |= {"cu_seqlens_q_padded": of_queries, "cu_seqlens_kv_padded": of_keys}
    return (*lengths, of_queries, of_keys if ends is None else ends), how


def _as_laid_out(parts: tuple[Tensor, ...], how: dict[str, Any]) -> tuple[Tensor, ...]:
    return tuple(part.flatten(0, 1) for part in parts) if how["o_format"] == "thd" else parts
