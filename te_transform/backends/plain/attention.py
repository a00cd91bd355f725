"""Attention by the fastest kernel of PyTorch, or in separate operations if every kernel would be wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.nn.attention import SDPBackend, sdpa_kernel

from te_transform.backends import limits
from te_transform.backends.bands import Banded, Seeing, tensor_of
from te_transform.backends.double_backward import differentiable_twice
from te_transform.backends.op import FusedOp
from te_transform.backends.plain.products import product_in_fp32
from te_transform.backends.tracing import compiling, needs_gradient, recorded, traced, transformed
from te_transform.graph import ops
from te_transform.graph.bound import F

LOW = -1e8  # lower than all scores of models: a key with this score gets probability zero
GAP = 104  # exp(-GAP) is zero in fp32
Given = Tensor | Banded | Seeing | None
Mask = Given | Literal["causal", "full"]


class DotProductAttention(FusedOp):
    """Attention, softmax(q k^T * scale + mask) v, by scaled_dot_product_attention.

    Args:
        written_out: True if the model computes attention in separate operations. They have a second
            derivative, so this op has one too. False if the model calls scaled_dot_product_attention. Then
            this op has the derivatives of PyTorch's kernel, and saves the cost of further ones.
        wide_scores: True if the model computes fp32 scores from 16-bit queries.
    """

    def __init__(self, written_out: bool = True, wide_scores: bool = False):
        super().__init__()
        self.written_out, self.wide_scores = written_out, wide_scores

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        sinks: Tensor | None = None,
        fill: float | None = None,
        filled: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Compute attention.

        Args:
            query: [..., heads, length, width].
            key: [..., heads, length, width].
            value: [..., heads, length, width].
            mask: a boolean mask, in which True keeps a key, or numbers to add to the scores. A mask that was
                classified (see masks.py) is "full", "causal", Banded or Seeing.
            dropout_p: the dropout probability of the attention weights.
            is_causal: True for a causal mask.
            scale: None: 1 / sqrt(width).
            enable_gqa: True if each key/value head serves consecutive query heads.
            sinks: an additional score per head, [heads].
            fill: the finite score of masked keys, see ops.filled().
            filled: the masked keys, see ops.filled().
            hidden: the rows that a mask of finite numbers masks fully. Their attention weights are uniform.
                Ignored if the mask is Banded, because bands have no such rows.

        Returns:
            The attention. If `written_out`, rows that a mask of -inf masks fully are NaN, as after a softmax.
        """
        is_known = isinstance(mask, (str, Banded, Seeing))
        if isinstance(mask, str):
            mask, is_causal = None, is_causal or mask == "causal"
        elif hidden is not None and not isinstance(mask, Banded):
            query = ops.zero_hidden(query, hidden)
        rest = (dropout_p, is_causal, scale, enable_gqa)
        if sinks is not None:
            return self.beside_sinks(query, key, value, sinks, mask, *rest)
        numbers = tensor_of(mask)
        is_trained = needs_gradient(query, key, value, numbers)
        if _fill_matters(query, key, scale, fill, filled, is_known, is_trained):
            return self._in_ops(query, key, value, mask, *rest, fill=fill, filled=filled)
        if self.written_out and (transformed() or _is_unsupported(query, key, mask, is_trained)):
            return self._in_ops(query, key, value, mask, *rest)
        if transformed():  # here, rows that see no key are zero, and have no gradient
            return ops.sdpa(query, key, value, numbers, *rest)
        if not (self.written_out or traced()) and mask is numbers and self.too_small(query, key, numbers):
            return DotProductAttention.attend(self, query, key, value, numbers, *rest)
        value = _in_own_storage(value, query, key)
        # with dropout, the plain version would draw other random numbers; compilers record no second backward
        twice = self.written_out and not dropout_p and not compiling.get()
        arguments = (query, key, value, mask, *rest)
        out = differentiable_twice(self.attend, _math, arguments) if twice else self.attend(*arguments)
        nan_rows = self.written_out and numbers is not None and hidden is None and _may_be_blind(mask)
        return _with_nan_rows(out, value, numbers) if nan_rows else out

    def _in_ops(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Given, *rest: Any, **how: Any
    ) -> Tensor:
        how = {"wide_scores": self.wide_scores, **how}
        return _attention_in_ops(query, key, value, tensor_of(mask), *rest, **how)

    def too_small(self, query: Tensor, key: Tensor, mask: Tensor | None) -> str | None:
        """Return why the kernel that PyTorch chooses for a call of the model is fast enough, or None."""
        return limits.too_small_attention(query, key, mask is not None) if query.dim() == 4 else None

    def beside_sinks(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        mask: Given,
        *rest: Any,
    ) -> Tensor:
        """Compute attention with sinks (an additional score per query), which PyTorch's kernels lack."""
        return self._in_ops(query, key, value, mask, *rest, sinks=sinks)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Given, *rest: Any) -> Tensor:
        """Compute attention by the fastest kernel."""
        *how, enable_gqa = rest
        may_hide_rows = self.written_out and not isinstance(mask, Seeing)
        mask = tensor_of(mask)
        if may_hide_rows and mask is not None and mask.is_floating_point() and mask.is_cuda:
            # the kernels multiply by log2(e): the lowest number of the dtype would overflow in masked rows
            mask = mask.clamp_min(torch.finfo(mask.dtype).min / 2)
        if enable_gqa and mask is not None and query.dim() == 4:
            return _ungrouped(partial(self._attend, mask=mask, how=how), query, key, value, mask)
        return self._attend(query, key, value, mask, rest)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: Sequence[Any]
    ) -> Tensor:
        dropout_p, is_causal, scale = how[:3]
        others = dropout_p or is_causal or needs_gradient(query, key, value, mask)
        if mask is not None and query.dim() == 4 and not others and limits.written_out(query, key):
            return _in_two_products(query, key, value, mask, scale)
        with _math_enabled() if self.written_out else nullcontext():
            out = ops.sdpa(query, key, value, mask, *how)
        if out.grad_fn is not None and "Cudnn" in out.grad_fn.name():
            out.register_hook(_length_before_heads)
        return out


def _is_unsupported(query: Tensor, key: Tensor, given: Given, is_trained: bool) -> bool:
    """Return True if PyTorch's attention would be wrong, or would refuse the mask.

    It has these limits:

    - Without queries or keys, the mask gets no gradient, and the result is NaN in all batches.
    - If a mask of finite numbers masks a whole row, the gradients of fused kernels are wrong (torch 2.13).
      The number of keys is rounded away in the log-sum-exp by which they normalize.
    - GPU kernels refuse a mask of another dtype, and under autocast the mask is rounded to 16 bits.
    """
    if query.numel() * key.numel() == 0:
        return True
    mask = tensor_of(given)
    if mask is None or not mask.is_floating_point():
        return False
    cast = limits.autocast_dtype(query)
    is_other = mask.dtype is not (cast or query.dtype) and (mask.is_cuda or cast is not None)
    return is_other or (is_trained and not isinstance(given, Seeing))


def _fill_matters(
    query: Tensor,
    key: Tensor,
    scale: float | None,
    fill: float | None,
    filled: Tensor | None,
    is_known: bool,
    is_trained: bool,
) -> bool:
    """Return True if the finite score of masked keys may affect the result.

    It affects rows in which no other score is larger. If `is_known`, the mask is classified, and every query
    sees a key, whose score is larger than a low fill.
    """
    if filled is None:
        return fill is not None and fill > LOW and _may_reach(query, key, scale, fill)
    if fill in (None, -torch.inf):  # the mask contains the score, and the forward of kernels is correct
        return not is_known and is_trained
    return not is_known or fill > LOW


def _may_reach(query: Tensor, key: Tensor, scale: float | None, fill: float) -> bool:
    """Return True if scores may be as low as a fill.

    This depends on the values of queries and keys, so it synchronizes with the GPU. A traced or recorded call
    has no values: return True on a CPU, and False on a GPU, where the kernels run.
    """
    if not query.numel() * key.numel():
        return False
    if traced() or is_fake(query) or query.is_meta:
        return query.device.type == "cpu"
    if recorded() or limits.replayed:  # a recording must not synchronize
        return False
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    with torch.no_grad():
        wide = torch.promote_types(query.dtype, torch.float32)
        norms = (torch.linalg.vector_norm(part, dim=-1, dtype=wide) for part in (query, key))
        lengths = [norm.amax() for norm in norms]
        return not bool(lengths[0] * lengths[1] * factor < -fill - GAP)


def _may_be_blind(mask: Given) -> bool:
    """Return True if some query may see no key under this mask."""
    return mask.blind if isinstance(mask, Banded) else not isinstance(mask, Seeing)


@contextmanager
def _math_enabled() -> Iterator[None]:
    """Enable PyTorch's math kernel, even if the user has disabled it.

    A model with attention in separate operations does not request a kernel, so attention must not raise
    because a kernel is missing.
    """
    missing = not torch.backends.cuda.math_sdp_enabled()
    if missing:
        torch.backends.cuda.enable_math_sdp(True)
    try:
        yield
    finally:
        if missing:
            torch.backends.cuda.enable_math_sdp(False)


def _ungrouped(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
) -> Tensor:
    """Call attend() with equally many heads of queries, keys and values.

    PyTorch's fused kernels do not support a mask with grouped-query attention. With a single query, as in
    generation, the query heads of a group become rows, and keys and values are read once. With more queries,
    keys and values are repeated.
    """
    batch, heads, length, width = query.shape
    groups = key.shape[-3]
    if length == 1 and value.shape[-3] == groups and (mask.dim() < 3 or mask.shape[-3] == 1):
        rows = attend(query.reshape(batch, groups, heads // groups, width), key, value)
        return rows.reshape(batch, heads, length, -1)
    return attend(query, *(part.repeat_interleave(heads // part.shape[-3], -3) for part in (key, value)))


def _in_two_products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Compute attention with fp32 scores, as the fused kernels do."""
    keys = key.expand(*query.shape[:2], -1, -1)  # all heads may share the keys
    scores = product_in_fp32(torch.bmm, query.flatten(0, 1), keys.flatten(0, 1).transpose(-2, -1))
    scores = scores.unflatten(0, query.shape[:2]) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, float("-inf"))
    return torch.ops.aten._safe_softmax(scores, -1).to(value.dtype) @ value


def _in_own_storage(value: Tensor, *others: Tensor) -> Tensor:
    """Return values [batch, heads, length, width], copied if they alone would keep a larger tensor in memory.

    Values may be a slice of a joint q, k and v projection. With rotary embeddings, the backward keeps the
    rotated queries and keys. It would keep the whole projection for the values, a third of it or less.
    """
    # stride 0: heads share expanded values, which a copy would repeat
    if not value.requires_grad or value.dim() != 4 or 0 in value.stride():
        return value
    storage = value.untyped_storage()
    if compiling.get():  # traced tensors do not share storages, but slices of one projection have equal rows
        shared = any(x.stride(-2) == value.stride(-2) for x in others)
    else:
        shared = any(x.untyped_storage()._cdata == storage._cdata for x in others)
    if shared or storage.nbytes() <= value.nbytes:
        return value
    return value.transpose(1, 2).contiguous().transpose(1, 2)  # [batch, length, heads, width] in memory


def _length_before_heads(grad: Tensor) -> Tensor:
    """Return a gradient [batch, heads, length, width] in the memory order [batch, length, heads, width].

    PyTorch caches cuDNN's plan of a backward by the sizes and strides of all tensors except this gradient
    (torch 2.11). A plan would misread a gradient with other strides than in the first call. Gradients of
    models usually have this order.
    """
    return grad.transpose(1, 2).contiguous().transpose(1, 2)


def _with_nan_rows(out: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Return attention with NaN in rows that see no key, and in the gradients that a softmax makes NaN.

    A softmax over -inf only is NaN. If the mask is added to the scores, all gradients are NaN. If scores are
    filled by a boolean mask, only the gradients of the values are NaN.
    """
    if mask.dtype is not torch.bool:
        return out * torch.where(mask.isneginf().all(-1, keepdim=True), torch.nan, 1.0).to(out.dtype)
    seen = mask.any(-1, keepdim=True)
    return _NaNRows.apply(out, value, seen)


class _NaNRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        ctx.save_for_backward(seen)
        ctx.shape = value.shape
        return torch.where(seen, out, torch.nan)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (seen,) = ctx.saved_tensors
        lost = ~seen.all(-2, keepdim=True)
        heads, groups = lost.shape[-3:-2], ctx.shape[-3:-2]
        if heads and heads[0] > groups[0]:  # several heads of queries share a head of values
            lost = lost.unflatten(-3, (groups[0], -1)).any(-3)
        of_value = torch.where(lost, torch.nan, grad.new_zeros(())).expand(ctx.shape)
        return torch.where(seen, grad, 0.0), of_value, None


def _attention_in_ops(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool = False,
    wide_scores: bool = False,
    sinks: Tensor | None = None,
    fill: float | None = None,
    filled: Tensor | None = None,
) -> Tensor:
    """Compute attention in operations with derivatives of every order, including those of forward mode.

    The softmax of PyTorch's attention has no backward of a forward-mode derivative (torch 2.13).
    """
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (part.repeat_interleave(groups, -3) for part in (key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    if query.dtype is torch.float16 and not wide_scores:  # unscaled scores may overflow in fp16
        query, factor = query * factor, 1.0
    scores = (query.float() @ key.float().mT) if wide_scores else query @ key.mT
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if fill is not None or filled is not None:
        scores = ops.filled(scores * factor, mask, fill, filled)
    else:
        # with sinks, a row that sees no key must not be NaN, even if the sink is -inf
        lowest = -torch.inf if sinks is None else torch.finfo(scores.dtype).min
        scores = _scaled_and_masked(scores, factor, mask, lowest)
    if sinks is not None:
        beside = sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, beside), -1)
    weights = scores.softmax(-1).to(value.dtype)[..., : key.shape[-2]]
    return (F.dropout(weights, dropout_p) if dropout_p else weights) @ value


def _scaled_and_masked(scores: Tensor, factor: float, mask: Tensor | None, lowest: float) -> Tensor:
    """Return `scores * factor` plus a mask of numbers, or `lowest` at the keys that a boolean mask masks."""
    if mask is None:
        return scores * factor
    if mask.dtype is torch.bool:
        return (scores * factor).masked_fill(~mask, lowest)
    if compiling.get():  # inductor would replace softmax(scores + mask) by a fused kernel
        return scores * factor - (-mask)
    return torch.add(mask, scores, alpha=factor)


def _math(query: Tensor, key: Tensor, value: Tensor, mask: Given, *rest: Any) -> Tensor:
    """Compute attention by PyTorch's math kernel, which has derivatives of every order."""
    with sdpa_kernel(SDPBackend.MATH):
        return ops.sdpa(query, key, value, tensor_of(mask), *rest)
