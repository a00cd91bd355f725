"""The arithmetic of compared runs: without dropout, optionally in fp64 or with random rounding."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from te_transform.execution.modes import GraphMode

_RANDOM_FUNCTIONS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.dropout_, torch.alpha_dropout, torch.alpha_dropout_,
    torch.feature_dropout, torch.feature_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_,
}  # fmt: skip
_DROPOUT_P = {  # position of dropout_p among the arguments
    F.scaled_dot_product_attention: 4,
    F.multi_head_attention_forward: list(inspect.signature(F.multi_head_attention_forward).parameters).index(
        "dropout_p"
    ),
}
_DRAWS = {  # of floating-point numbers and of choices by their values
    torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.normal, torch.bernoulli,
    torch.multinomial, Tensor.bernoulli, Tensor.bernoulli_, Tensor.multinomial, Tensor.normal_,
    Tensor.uniform_, Tensor.exponential_, Tensor.log_normal_,
}  # fmt: skip


def active_probability(func: Any, args: tuple, kwargs: dict[str, Any]) -> float:
    """Return the probability of a call of a dropout, and 0 if the call drops nothing."""

    def argument(place: int, name: str, default: Any) -> Any:
        return args[place] if len(args) > place else kwargs.get(name, default)

    func = _torch_function(func)
    if func in _DROPOUT_P:
        return argument(_DROPOUT_P[func], "dropout_p", 0.0) if kwargs.get("training", True) else 0.0
    if func not in _RANDOM_FUNCTIONS:
        return 0.0
    is_on = argument(2, "training", kwargs.get("train", "alpha" not in func.__name__))
    return argument(1, "p", 0.5) if is_on else 0.0


def _torch_function(func: Any) -> Any:
    """Return torch's function for an operator in a module of torch.export, other functions as they are."""
    if getattr(func, "namespace", "") != "aten":
        return func
    return getattr(F, func._opname, getattr(torch, func._opname, func))


class Noise:
    """A source of random numbers, reproducible from the seed and the order of calls.

    The numbers are drawn on the device where they are used: a layer's outputs may need hundreds of millions.
    """

    def __init__(self, seed: int):
        self.seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}

    def of(self, draw: Callable[..., Tensor], like: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return numbers drawn by torch.rand or torch.randn, in the shape of `like`."""
        device = like.device
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(self.seed)
        return draw(like.shape, generator=self.generators[device], dtype=dtype, device=device)


class _RoundedAtRandom(torch.autograd.Function):
    """The perturbation of a result, and of its gradient, by at most a random half ulp.

    The backward draws the same noise again, which saves the memory of keeping it for every result.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, seed: int) -> Tensor:
        ctx.seed = seed
        return _rounded_at_random(out, seed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with torch._C.DisableTorchFunction():
            return _rounded_at_random(grad, ctx.seed), None


def _rounded_at_random(x: Tensor, seed: int) -> Tensor:
    dtype = torch.finfo(x.dtype)
    noise = Noise(seed).of(torch.rand, x, torch.float64 if x.itemsize > 2 else torch.float32)
    noisy = noise.sub_(0.5).mul_(dtype.eps).add_(1).mul_(x).to(x.dtype)
    # keep masked scores exact: they consist only of the mask
    return torch.where(x.abs() < dtype.max / 2, noisy, x)


class Judged(GraphMode):
    """The function mode that makes two runs comparable: it disables dropout without changing any module.

    With `double`, casts to a narrower dtype (a norm's float()) become casts to fp64. With a seed for
    `rounding`, results are rounded at random. Random numbers differ by dtype, so a run in fp64 takes those
    that another run has drawn.

    Attributes:
        drawn: The random numbers of the run.
        drops: True if the mode has disabled a dropout that was on.
    """

    def __init__(
        self, double: bool = False, rounding: int | None = None, drawn: Iterable[Tensor] | None = None
    ):
        super().__init__()
        self.double = double
        self.drawn: list[Tensor] = []
        self.drops = False
        self._given = None if drawn is None else iter(drawn)
        self.seeds = None if rounding is None else random.Random(rounding)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        known = _torch_function(func)
        self.drops |= active_probability(func, args, kwargs) > 0
        if known in _RANDOM_FUNCTIONS:
            return torch.dropout(args[0] if args else kwargs["input"], 0.0, False)
        if known in _DROPOUT_P:
            place = _DROPOUT_P[known]
            args = (*args[:place], 0.0, *args[place + 1 :]) if len(args) > place else args
            kwargs = {key: 0.0 if key == "dropout_p" else value for key, value in kwargs.items()}
        if self.double:
            func = _DOUBLE.get(known, func)
            args, kwargs = (
                tuple(map(_as_float64, args)),
                {key: _as_float64(value) for key, value in kwargs.items()},
            )
        out = func(*args, **kwargs)
        if known in _DRAWS:
            self._note_or_replace(out)
        return out if self.seeds is None else self._rounded(out, (args, kwargs))

    def _note_or_replace(self, drawn: Tensor) -> None:
        if self._given is None:
            self.drawn.append(drawn.detach().clone())
        elif (given := next(self._given, drawn)).shape == drawn.shape:
            drawn.detach().copy_(given)

    def _rounded(self, out: Any, given: Any) -> Any:
        if type(out) in (tuple, list):
            return type(out)(self._rounded(item, given) for item in out)
        if type(out) is not Tensor or not out.is_floating_point() or not out.requires_grad:
            return out  # positions and masks: rounding must not change an index
        storage = out.untyped_storage()._cdata
        tensors = (leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor))
        if any(tensor.untyped_storage()._cdata == storage for tensor in tensors):
            return out  # a view
        return _RoundedAtRandom.apply(out, self.seeds.getrandbits(62))


def _grouped_mm_by_expert(x: Tensor, weight: Tensor, offs: Tensor, **_: Any) -> Tensor:
    """Compute grouped_mm of rows [rows, in] by experts [experts, in, out]; torch's does not support fp64."""
    ends = offs.tolist()
    products = [x[start:stop] @ expert for start, stop, expert in zip([0, *ends], ends, weight, strict=False)]
    rest = x.new_zeros(x.shape[0] - ends[-1], weight.shape[-1])
    return torch.cat([*products, rest])


# The most scores that attention computes at once in fp64: 2 GiB, and several such tensors exist.
MOST_SCORES = 2**28


def _attention_by_head(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *rest: Any,
    enable_gqa: bool = False,
    **options: Any,
) -> Tensor:
    """Compute PyTorch's attention, head by head if there are many scores [batch, heads, length, length].

    PyTorch has no fused kernel for fp64, and would compute all scores at once.
    """
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
    F.scaled_dot_product_attention: _attention_by_head,
    Tensor.float: Tensor.double,
    Tensor.half: Tensor.double,
    Tensor.bfloat16: Tensor.double,
    torch._grouped_mm: _grouped_mm_by_expert,  # F.grouped_mm calls it
}


def _as_float64(value: Any) -> Any:
    return wide_dtype(value) if isinstance(value, torch.dtype) else value


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of fp64 for floating-point and complex dtypes, and other dtypes as they are."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def in_dtype(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the tensor in another dtype, if there is one; a reference stays in fp64."""
    return tensor if dtype is None or tensor.dtype is torch.float64 else tensor.to(dtype)
