"""Attention by whichever of PyTorch's kernels is the fastest, or in operations where none is right."""

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
from te_transform.backends.tracing import compiling, recorded, traced, transformed
from te_transform.graph import ops
from te_transform.graph.bound import F

LOW = -1e8  # no model has scores as low: beside any of them a key with this one has no share
GAP = 104  # exp(-GAP) is zero in fp32
Given = Tensor | Banded | Seeing | None
Mask = Given | Literal["causal", "full"]


class DotProductAttention(FusedOp):
    """softmax(q k^T * scale + mask) v, by scaled_dot_product_attention.

    Args:
        written_out: whether the model has it in operations, which have a second derivative: this has one too,
            whatever kernel runs. Calls of scaled_dot_product_attention have only that of the kernel, and so
            need not pay for it.
        wide_scores: whether the model computes scores in fp32 of queries in 16 bits.
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
        """query [..., heads, length, width], key and value likewise; a mask keeps True, or is added; sinks
        [heads].

        A mask that was found to keep everything is "full", one that was found to be the causal one is
        "causal", and one of numbers that leaves every query a key is Seeing. `hidden` are the rows that a
        mask of finite numbers hides everywhere: they stay uniform, and there are none where the mask is known
        to be a band. Of what was written out, rows that a mask of -inf hides everywhere are NaN, as a softmax
        makes them. `fill` and `filled` say which finite score hidden keys have, see ops.filled().
        """
        is_known = isinstance(mask, (str, Banded, Seeing))
        if isinstance(mask, str):
            mask, is_causal = None, is_causal or mask == "causal"
        elif hidden is not None and not isinstance(mask, Banded):
            query = ops.zero_hidden(query, hidden)
        given, mask = mask, tensor_of(mask)
        rest = (mask, dropout_p, is_causal, scale, enable_gqa)
        if sinks is not None:
            return self.beside_sinks(query, key, value, sinks, given, *rest[1:])
        if _counts(query, key, scale, fill, filled, is_known):
            how = {"wide_scores": self.wide_scores, "fill": fill, "filled": filled}
            return _written_out(query, key, value, *rest, **how)
        # Where there are no queries or no keys, PyTorch's attention gives a mask no gradient, and NaN to all
        # batches. Where a mask of finite numbers hides a whole row, the gradients of its fused kernels are
        # wrong (torch 2.13): the log-sum-exp that they normalize by has the number of keys rounded away.
        # Its kernels on a GPU refuse a mask of another dtype, and under autocast it rounds one to 16 bits.
        nothing = query.numel() * key.numel() == 0
        if self.written_out and (transformed() or nothing or _runs_apart(query, given)):
            return _written_out(query, key, value, *rest, wide_scores=self.wide_scores)
        if transformed():  # rows that see nothing are zeros there, and have no gradient
            return ops.sdpa(query, key, value, *rest)
        # a compiler decides by itself what a backward keeps, and has no second one
        value = value if compiling.get() else _alone(value, query, key)
        # with dropout the plain version would draw other random numbers
        twice = self.written_out and not dropout_p and not compiling.get()
        arguments = (query, key, value, given, *rest[1:])
        out = differentiable_twice(self.attend, _math, arguments) if twice else self.attend(*arguments)
        nan_rows = self.written_out and mask is not None and hidden is None and _may_be_blind(given)
        return _with_nan_rows(out, value, mask) if nan_rows else out

    def beside_sinks(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        mask: Given,
        *rest: Any,
    ) -> Tensor:
        """The attention with a score more for each query, which none of PyTorch's kernels has."""
        how = {"wide_scores": self.wide_scores, "sinks": sinks}
        return _written_out(query, key, value, tensor_of(mask), *rest, **how)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Given, *rest: Any) -> Tensor:
        """The attention by whichever kernel is the fastest here."""
        *how, enable_gqa = rest
        may_hide_rows = self.written_out and not isinstance(mask, Seeing)
        mask = tensor_of(mask)
        if may_hide_rows and mask is not None and mask.is_floating_point() and mask.is_cuda:
            # its kernels multiply by log2(e): the lowest number, where it hides a whole row, overflows
            mask = mask.clamp_min(torch.finfo(mask.dtype).min / 2)
        if enable_gqa and mask is not None and query.dim() == 4:
            return _ungrouped(partial(self._attend, mask=mask, how=how), query, key, value, mask)
        return self._attend(query, key, value, mask, rest)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: Sequence[Any]
    ) -> Tensor:
        dropout_p, is_causal, scale = how[:3]
        others = dropout_p or is_causal or torch.is_grad_enabled()
        if mask is not None and query.dim() == 4 and not others and limits.written_out(query, key):
            return _in_two_products(query, key, value, mask, scale)
        with _math_at_hand() if self.written_out else nullcontext():
            out = ops.sdpa(query, key, value, mask, *how)
        if out.grad_fn is not None and "Cudnn" in out.grad_fn.name():
            out.register_hook(_in_one_order)
        return out


def _runs_apart(query: Tensor, given: Given) -> bool:
    """Whether a mask is one of numbers that are added to scores, and none for PyTorch's kernels."""
    mask = tensor_of(given)
    if mask is None or not mask.is_floating_point():
        return False
    cast = limits.autocast_dtype(query)
    is_other = mask.dtype is not (cast or query.dtype) and (mask.is_cuda or cast is not None)
    return is_other or (torch.is_grad_enabled() and not isinstance(given, Seeing))


def _counts(
    query: Tensor, key: Tensor, scale: float | None, fill: float | None, filled: Tensor | None, is_known: bool
) -> bool:
    """Return True if a score that hidden keys were filled with may be no smaller than all others of a query.

    `is_known` says of the mask that every query sees a key under it, whose score is larger than a low fill.
    """
    if filled is None:
        return fill is not None and fill > LOW and _may_reach(query, key, scale, fill)
    if fill in (None, -torch.inf):  # the mask has it, and the forward in kernels is right
        return not is_known and torch.is_grad_enabled()
    return not is_known or fill > LOW


def _may_reach(query: Tensor, key: Tensor, scale: float | None, fill: float) -> bool:
    """Return True if scores may be as low as a fill.

    The values of queries and keys decide, for which a GPU is waited for. Where a call is traced or recorded,
    nobody knows them: the fill counts on a CPU, and is hidden on a GPU, whose kernels run.
    """
    if not query.numel() * key.numel():
        return False
    if traced() or is_fake(query) or query.is_meta:
        return query.device.type == "cpu"
    if recorded() or limits.replayed:  # a recording may not wait for the GPU
        return False
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    with torch.no_grad():
        wide = torch.promote_types(query.dtype, torch.float32)
        norms = (torch.linalg.vector_norm(part, dim=-1, dtype=wide) for part in (query, key))
        lengths = [norm.amax() for norm in norms]
        return not bool(lengths[0] * lengths[1] * factor < -fill - GAP)


def _may_be_blind(mask: Given) -> bool:
    """Whether a query may see no key under this mask."""
    return mask.blind if isinstance(mask, Banded) else not isinstance(mask, Seeing)


@contextmanager
def _math_at_hand() -> Iterator[None]:
    """Let PyTorch's attention fall back on products and a softmax, though somebody has switched that off: of
    attention that a model has written out, no kernel was asked for that could be missing."""
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
    """attend() with as many heads of queries as of keys and values: none of PyTorch's fused kernels takes
    both a mask and heads that several queries share.

    A single query, as in a generation, becomes a row for each head of its group, so that keys and values are
    read once; where there are more queries, keys and values are repeated.
    """
    batch, heads, length, width = query.shape
    groups = key.shape[-3]
    if length == 1 and value.shape[-3] == groups and (mask.dim() < 3 or mask.shape[-3] == 1):
        rows = attend(query.reshape(batch, groups, heads // groups, width), key, value)
        return rows.reshape(batch, heads, length, -1)
    return attend(query, *(part.repeat_interleave(heads // part.shape[-3], -3) for part in (key, value)))


def _in_two_products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Attention with scores in fp32, as the fused kernels have them."""
    keys = key.expand(*query.shape[:2], -1, -1)  # which all heads may share
    scores = _multiplied_in_fp32(query.flatten(0, 1), keys.flatten(0, 1).transpose(-2, -1))
    scores = scores.unflatten(0, query.shape[:2]) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, float("-inf"))
    return torch.ops.aten._safe_softmax(scores, -1).to(value.dtype) @ value


def _multiplied_in_fp32(x: Tensor, y: Tensor) -> Tensor:
    return torch.bmm(x, y, out_dtype=torch.float32) if x.is_cuda else torch.bmm(x.float(), y.float())


def _alone(value: Tensor, *others: Tensor) -> Tensor:
    """Values [batch, heads, length, width] in storage of their own, where they are a part of a product of q,
    k and v and the backward needs nothing else of it.

    The backward of rotated queries and keys keeps what the rotation returned. The product itself would then
    stay in memory for its values, a third of it or less.
    """
    # values of stride 0 are expanded, several heads read the same numbers: a copy would repeat them
    if not value.requires_grad or value.dim() != 4 or 0 in value.stride():
        return value
    storage = value.untyped_storage()
    shared = any(x.untyped_storage()._cdata == storage._cdata for x in others)
    if shared or storage.nbytes() <= value.nbytes:
        return value
    return value.transpose(1, 2).contiguous().transpose(1, 2)  # [batch, length, heads, width] in memory


def _in_one_order(grad: Tensor) -> Tensor:
    """A gradient [batch, heads, length, width] as models hand it back, batch and length first in memory.

    PyTorch keeps cuDNN's plan of a backward by the sizes and strides of all but this gradient (torch 2.11):
    in another order than that of the first call it would be read wrongly.
    """
    return grad.transpose(1, 2).contiguous().transpose(1, 2)


def _with_nan_rows(out: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """NaN in the rows that see nothing, and in gradients where a softmax of only -inf makes them NaN: in all
    where the mask was added to the scores, in those of the values where scores were filled."""
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
        if heads and heads[0] > groups[0]:  # which several of these heads share
            lost = lost.unflatten(-3, (groups[0], -1)).any(-3)
        of_value = torch.where(lost, torch.nan, grad.new_zeros(())).expand(ctx.shape)
        return torch.where(seen, grad, 0.0), of_value, None


def _written_out(
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
    """The attention in operations that have every derivative, and those of a derivative forward: the softmax
    that PyTorch's own attention calls has no backward of the latter (torch 2.13)."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (part.repeat_interleave(groups, -3) for part in (key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    if query.dtype is torch.float16 and not wide_scores:  # which has no room for scores before the scale
        query, factor = query * factor, 1.0
    scores = (query.float() @ key.float().mT) if wide_scores else query @ key.mT
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if fill is not None or filled is not None:
        scores = ops.filled(scores * factor, mask, fill, filled)
    elif mask is None or mask.dtype is torch.bool:
        scores = scores * factor
        # beside a sink of -inf, too, a row that sees nothing is a number
        fill = -torch.inf if sinks is None else torch.finfo(scores.dtype).min
        scores = scores if mask is None else scores.masked_fill(~mask, fill)
    elif compiling.get():  # inductor would put a fused kernel in the place of softmax(scores + mask)
        scores = scores * factor - (-mask)
    else:
        scores = torch.add(mask, scores, alpha=factor)
    if sinks is not None:
        beside = sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, beside), -1)
    weights = scores.softmax(-1).to(value.dtype)[..., : key.shape[-2]]
    return (F.dropout(weights, dropout_p) if dropout_p else weights) @ value


def _math(query: Tensor, key: Tensor, value: Tensor, mask: Given, *rest: Any) -> Tensor:
    """The attention as products and a softmax, which have every derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        return ops.sdpa(query, key, value, tensor_of(mask), *rest)
