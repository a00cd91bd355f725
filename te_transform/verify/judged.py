"""The arithmetic that runs are judged in: without dropout, in fp64, or with random rounding."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from te_transform.execution.modes import GraphMode

_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.dropout_, torch.alpha_dropout, torch.alpha_dropout_,
    torch.feature_dropout, torch.feature_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_,
}  # fmt: skip
_DROPOUT_P = {  # where attentions take it
    F.scaled_dot_product_attention: 4,
    F.multi_head_attention_forward: list(inspect.signature(F.multi_head_attention_forward).parameters).index(
        "dropout_p"
    ),
}


class Noise:
    """Random numbers, the same for the same seed and calls, made on the device that they are for: for the
    outputs of a layer there may be hundreds of millions."""

    def __init__(self, seed: int):
        self.seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}

    def of(self, draw: Callable[..., Tensor], like: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        """Numbers drawn by torch.rand or torch.randn, in the shape of `like`."""
        device = like.device
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(self.seed)
        return draw(like.shape, generator=self.generators[device], dtype=dtype, device=device)


class _RoundedAtRandom(torch.autograd.Function):
    """A result put off by a random half ulp at most, and its gradient by the same: drawn again, rather than
    kept for the backward of each of all results."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, seed: int) -> Tensor:
        ctx.seed = seed
        return _rounded_at_random(out, seed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _rounded_at_random(grad, ctx.seed), None


def _rounded_at_random(x: Tensor, seed: int) -> Tensor:
    dtype = torch.finfo(x.dtype)
    noise = Noise(seed).of(torch.rand, x, torch.float64 if x.itemsize > 2 else torch.float32)
    noisy = noise.sub_(0.5).mul_(dtype.eps).add_(1).mul_(x).to(x.dtype)
    # a masked score is all mask, no rounding shows
    return torch.where(x.abs() < dtype.max / 2, noisy, x)


class Judged(GraphMode):
    """Dropout does nothing, in training mode too, and no module is touched for it: two runs can be compared.

    With `double`, a forward that asks for a narrower dtype (a norm's float()) gets fp64, rounding to no less.
    With a seed for `rounding`, results are rounded at random.
    """

    def __init__(self, double: bool = False, rounding: int | None = None):
        super().__init__()
        self.double = double
        self.seeds = None if rounding is None else random.Random(rounding)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return torch.dropout(args[0] if args else kwargs["input"], 0.0, False)
        if func in _DROPOUT_P:
            place = _DROPOUT_P[func]
            args = (*args[:place], 0.0, *args[place + 1 :]) if len(args) > place else args
            kwargs = {key: 0.0 if key == "dropout_p" else value for key, value in kwargs.items()}
        if self.double:
            func = _DOUBLE.get(func, func)
            args, kwargs = tuple(map(_wide, args)), {key: _wide(value) for key, value in kwargs.items()}
        out = func(*args, **kwargs)
        return out if self.seeds is None else self._rounded(out, tree_leaves((args, kwargs)))

    def _rounded(self, out: Any, given: list[Any]) -> Any:
        if type(out) in (tuple, list):
            return type(out)(self._rounded(item, given) for item in out)
        if type(out) is not Tensor or not out.is_floating_point() or not out.requires_grad:
            return out  # positions and masks: an index made of one may not jump
        storage = out.untyped_storage()._cdata
        if any(isinstance(t, Tensor) and t.untyped_storage()._cdata == storage for t in given):
            return out  # a view, nothing was computed
        return _RoundedAtRandom.apply(out, self.seeds.getrandbits(62))


def _grouped_mm(x: Tensor, weight: Tensor, offs: Tensor, **_: Any) -> Tensor:
    """torch's grouped_mm of rows [rows, in] by experts [experts, in, out], which it has in no fp64."""
    ends = offs.tolist()
    products = [x[start:stop] @ expert for start, stop, expert in zip([0, *ends], ends, weight, strict=False)]
    rest = x.new_zeros(x.shape[0] - ends[-1], weight.shape[-1])
    return torch.cat([*products, rest])


# Scores that attention computes at once in fp64: 2 GiB, of which it holds several.
MOST_SCORES = 2**28


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *rest: Any,
    enable_gqa: bool = False,
    **options: Any,
) -> Tensor:
    """PyTorch's attention, head by head where its scores [batch, heads, length, length] are many: it has no
    fused kernel for fp64 and computes all of them at once."""
    attend = partial(F.scaled_dot_product_attention, enable_gqa=enable_gqa, **options)
    scores = (*query.shape[:-1], key.shape[-2])
    uneven = query.shape[1] % key.shape[1] if enable_gqa else query.shape[1] != key.shape[1]
    if math.prod(scores) <= MOST_SCORES or query.dim() != 4 or uneven:
        return attend(query, key, value, attn_mask, *rest)
    heads = key.shape[1]
    masks = [None] * heads if attn_mask is None else attn_mask.expand(scores).tensor_split(heads, 1)
    parts = zip(*(tensor.tensor_split(heads, 1) for tensor in (query, key, value)), masks, strict=True)
    return torch.cat([attend(*part, *rest) for part in parts], 1)


_DOUBLE = {
    F.scaled_dot_product_attention: _attention,
    Tensor.float: Tensor.double,
    Tensor.half: Tensor.double,
    Tensor.bfloat16: Tensor.double,
    torch._grouped_mm: _grouped_mm,  # what F.grouped_mm calls
}


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value
