"""The fused modules of NVIDIA Transformer Engine: the only file that imports it.

Each is TE's own class, built on meta. Where TE has no kernel for a call (another device, float32, an
attention mask) the same weights run in plain PyTorch, backends/torch.py, and `plain_calls` counts why.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch  # before TE, which loads libraries that come with it
import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

from te_transform.autocast import Kept
from te_transform.backends import torch as plain
from te_transform.slots import traced

try:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as _State
except ImportError:  # TE before 2.8
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager as _State

NAME = "te"
PLAIN = False
ACTIVATIONS, GATED_ACTIVATIONS = plain.ACTIVATIONS, plain.GATED_ACTIVATIONS

_DTYPES = (torch.bfloat16, torch.float16)  # TE multiplies float32 in TF32
_RECIPES = {
    "fp8-delayed": recipes.DelayedScaling,
    "fp8-current": recipes.Float8CurrentScaling,
    "fp8-block": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
}
_AVAILABLE = {
    recipes.Float8BlockScaling: "is_fp8_block_scaling_available",
    recipes.MXFP8BlockScaling: "is_mxfp8_available",
}


def recipe_of(asked: Any) -> Any:
    """TE's recipe of this name, or the recipe object itself.

    Raises:
        ValueError: it is neither, or this GPU has no kernels for it; the message says what is missing.
    """
    if isinstance(asked, str):
        asked = _RECIPES[asked]()
    if not isinstance(asked, recipes.Recipe):
        raise ValueError(f"a {type(asked).__name__} is no TE recipe, one of {', '.join(_RECIPES)} is")
    available = getattr(te, _AVAILABLE.get(type(asked), "is_fp8_available"))
    runs, why = available(return_reason=True)
    if not runs:
        raise ValueError(f"{type(asked).__name__} does not run on this GPU: {why}")
    return asked


def is_delayed(recipe: Any) -> bool:
    """Whether the recipe scales by what was seen in earlier steps."""
    return isinstance(recipe, recipes.DelayedScaling)


def multiple(recipe: Any) -> int:
    """What rows and columns of a product have to be a multiple of."""
    return 32 if isinstance(recipe, recipes.MXFP8BlockScaling) else 16


def autocast(recipe: Any, enabled: bool = True) -> contextlib.AbstractContextManager:
    """Run TE's modules in the recipe's precision."""
    if hasattr(te, "autocast"):
        return te.autocast(enabled=enabled, recipe=recipe)
    return te.fp8_autocast(enabled=enabled, fp8_recipe=recipe)  # TE before 2.8


class _Fused(nn.Module):
    """What TE's modules do here beyond TE: no product that TE refuses, and nothing lost where it has none."""

    in_torch: type[nn.Module]  # the same module of backends/torch.py
    kept: Kept | None = None  # None: not in a recipe's precision
    weight_names = ("weight",)
    normalised = False

    def _start(self) -> None:
        self.plain_calls: Counter[str] = Counter()
        for name in ("bias", "fc1_bias", "fc2_bias"):
            if name not in self._parameters and hasattr(self, name):
                setattr(self, name, None)  # TE has an empty tensor there, which it does not read

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        if traced():
            return self.in_torch.forward(self, x)
        if why := _without_kernel(x, self._weight()):
            self.plain_calls[why] += 1
            return self.in_torch.forward(self, x)
        if not _State.is_fp8_enabled():
            return super().forward(x)
        if self.kept is None:
            with autocast(_State.get_fp8_recipe(), enabled=False):
                return super().forward(x)
        return self._in_fp8(x)

    def _in_fp8(self, x: Tensor) -> Tensor:
        # never True, which would also have this call's gradient overwrite those before it
        again = False if self.kept.weights else None
        rows = x.shape[:-1].numel()
        missing = -rows % multiple(_State.get_fp8_recipe())
        if not missing:
            return super().forward(x, is_first_microbatch=again)
        # the last row once more, and again: no number in the product is larger for it, its gradient is zero
        flat = x.reshape(rows, -1)
        padded = torch.cat([flat, flat[-1:].expand(missing, -1)])
        out = super().forward(padded, is_first_microbatch=again)
        return out[:rows].reshape(*x.shape[:-1], -1)

    def _weight(self) -> Tensor:
        return getattr(self, self.weight_names[0])

    def forget_weights(self) -> None:
        """Free the quantised weights that were kept; the next call makes them anew."""
        self._fp8_workspaces.clear()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state["param_init_meta"] = {}  # closures, which cannot be pickled, for parameters that nobody resets
        # where TE keeps this module's scales among those it updates: a copy has to get a place of its own
        state["fp8_meta"] = {k: v for k, v in self.fp8_meta.items() if k != _State.get_buffer_info()}
        return state


class Linear(_Fused, te.Linear):
    """y = x W^T + b; weight [out, in]."""

    in_torch = plain.Linear
    extra_repr = in_torch.extra_repr

    def __init__(self, in_features: int, out_features: int, **options: Any):
        super().__init__(in_features, out_features, **options)
        self._start()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        if self.fuse_wgrad_accumulation or (self.kept and _State.is_fp8_enabled()):
            return super().forward(x)
        return self.in_torch.forward(self, x)  # one product in its own dtype: nothing is faster


class LayerNormLinear(_Fused, te.LayerNormLinear):
    """A linear of a LayerNorm or RMSNorm; layer_norm_weight [in], layer_norm_bias [in], weight, bias."""

    in_torch = plain.LayerNormLinear
    normalise, norm_repr, extra_repr = in_torch.normalise, in_torch.norm_repr, in_torch.extra_repr

    def __init__(self, in_features: int, out_features: int, **options: Any):
        super().__init__(in_features, out_features, **options)
        self._start()


class LayerNormMLP(_Fused, te.LayerNormMLP):
    """fc2(activation(fc1(norm(x)))); fc1_weight [ffn, hidden], twice the rows where the activation is
    gated."""

    in_torch = plain.LayerNormMLP
    normalise, norm_repr, extra_repr = in_torch.normalise, in_torch.norm_repr, in_torch.extra_repr
    weight_names = ("fc1_weight", "fc2_weight")

    def __init__(self, hidden_size: int, ffn_hidden_size: int, **options: Any):
        super().__init__(hidden_size, ffn_hidden_size, **options)
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self._start()


class DotProductAttention(plain.DotProductAttention):
    """softmax(q k^T * scale) v by cuDNN or FlashAttention, whichever TE prefers."""

    stands_for = ("eager", "sdpa")

    def __init__(self):
        super().__init__()
        self.plain_calls: Counter[str] = Counter()
        # no submodules: they have no parameters, and are made again wherever they are needed
        self.__dict__["_cores"] = {}

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """query [batch, heads, length, width], key and value likewise; the mask keeps True, or is added."""
        if not self.takes(query, key, value, mask, is_causal):
            return super().forward(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)
        # [batch, length, heads, width], or sequence first, whichever it is in memory
        order = (0, 2, 1, 3) if query.stride(0) >= query.stride(2) else (2, 0, 1, 3)
        laid_out = _packed(*(x.permute(order) for x in (query, key, value)))
        core = self._core(query, key, value, dropout_p, is_causal, scale, "bshd" if order[0] == 0 else "sbhd")
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # packed, as was checked
            out = core(*laid_out)
        back = (0, 2, 1, 3) if order[0] == 0 else (1, 2, 0, 3)
        return out.view(*laid_out[0].shape[:3], -1).permute(back)

    def takes(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
        """Whether this is a call that TE has a fast kernel for; if not, it is counted."""
        if traced():
            return False
        why = _without_attention(query, key, value, mask, is_causal)
        if why:
            self.plain_calls[why] += 1
        return why is None

    def _core(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        order: str,
    ) -> nn.Module:
        widths = (query.shape[-1], value.shape[-1])
        form = (query.shape[1], key.shape[1], widths, dropout_p, is_causal, scale, order, query.device)
        if form not in self._cores:
            core = te.DotProductAttention(
                query.shape[1],
                widths[0] if widths[0] == widths[1] else widths,
                num_gqa_groups=key.shape[1],
                attention_dropout=dropout_p,
                qkv_format=order,
                attn_mask_type="causal" if is_causal else "no_mask",
                softmax_scale=scale,
            )
            self._cores[form] = core.train(dropout_p > 0)
        return self._cores[form]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cores": {}}


def rotate(query: Tensor, key: Tensor, angles: Tensor) -> tuple[Tensor, Tensor] | None:
    """Both turned by their positions' angles, in one kernel each; None where TE has no kernel for them.

    query and key [batch, heads, length, width]; angles [1, length, width], fp32, the same for the whole
    batch.
    """
    if traced() or _without_kernel(query, key) or query.dim() != 4 or angles.dim() != 3:
        return None
    if angles.shape[0] != 1 or angles.shape[1:] != (query.shape[2], query.shape[3]):
        return None
    columns = angles.reshape(-1, 1, 1, angles.shape[-1])
    return _rotated(query, columns), _rotated(key, columns)


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    out = apply_rotary_pos_emb(x.transpose(1, 2), angles, tensor_format="bshd", fused=True)
    return out.transpose(1, 2)


def _packed(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three as they are where they fill one buffer without gaps, else each in memory of its own.

    TE tells packed tensors by their offsets, and takes it for granted that the rest of the strides fits.
    """
    _, inner, heads, width = query.shape
    row, both = heads * 3 * width, inner * heads * 3 * width
    for step, stride in ((heads * width, (both, row, width, 1)), (width, (both, row, 3 * width, 1))):
        storage = query.untyped_storage().data_ptr()
        if all(
            x.shape == query.shape
            and x.stride() == stride
            and x.storage_offset() == place * step
            and x.untyped_storage().data_ptr() == storage
            for place, x in enumerate((query, key, value))
        ):
            return query, key, value
    return _own(query), _own(key), _own(value)


def _own(x: Tensor) -> Tensor:
    """The tensor with no gaps, and no odd strides where a size is 1, which TE compares too."""
    *sizes, width = x.shape
    strides = [torch.Size([*sizes[place + 1 :], width]).numel() for place in range(len(sizes))]
    if x.storage_offset() == 0 and x.stride() == (*strides, 1):
        return x
    flat = x.reshape(-1)
    return (flat.clone() if flat.storage_offset() else flat).view(x.shape)


def _without_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
) -> str | None:
    """Why TE has no fast attention kernel for this call, or None."""
    if why := _without_kernel(query, key):
        return why
    if mask is not None:
        return "a mask that is not known to be causal"
    if query.dim() != 4:
        return f"queries of {query.dim()} dimensions, TE's kernels have 4"
    if is_causal and query.shape[2] != key.shape[2]:
        return "more keys than queries under a causal mask"
    widths = query.shape[-1], value.shape[-1]
    if any(width % 8 or width > 128 for width in widths):
        return f"heads of width {max(widths)}, TE's fast kernels have multiples of 8 up to 128"
    strided = any(x.stride(-1) != 1 for x in (query, key, value))
    return "heads that are not contiguous" if strided else None


def _without_kernel(x: Tensor, weight: Tensor) -> str | None:
    """Why TE's modules cannot take this tensor, or None."""
    if type(x) not in (Tensor, nn.Parameter):
        return f"a {type(x).__name__}"
    if x.dim() < 2 or x.numel() == 0:
        return f"an input of shape {list(x.shape)}"
    if not x.is_cuda:
        return f"an input on {x.device.type}"
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        return None if x.dtype == weight.dtype == dtype else f"{_short(x.dtype)} under torch.autocast"
    if x.dtype not in _DTYPES:
        return f"{_short(x.dtype)}, which TE would multiply in TF32"
    return None if x.dtype == weight.dtype else f"{_short(x.dtype)} with weights in {_short(weight.dtype)}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Amax:
    """The largest absolute values around one product, as 0-dim tensors; `grad` None where none was seen."""

    input: Tensor
    weight: Tensor
    grad: Tensor | None


def calibrate(fused: nn.Module, recipe: Any, products: Sequence[Amax]) -> None:
    """Give a module the scales of delayed scaling that these amaxes call for: scale = max / amax / 2^margin.

    TE's own formula (its recipe.DelayedScaling), on TE's own order: input, weight, output of each product
    forward, gradient of the output and of the input of each product backward.
    """
    with autocast(recipe):
        fused.init_fp8_metadata(num_gemms=len(products))
    forward, backward = ({}, {})
    for index, product in enumerate(products):
        forward |= {3 * index: product.input, 3 * index + 1: product.weight}
        if product.grad is not None:
            backward[2 * index] = product.grad
    limits = recipe.fp8_format.value
    _set_scales(fused.fp8_meta["scaling_fwd"], forward, limits.max_fwd, recipe)
    _set_scales(fused.fp8_meta["scaling_bwd"], backward, limits.max_bwd, recipe)


def _set_scales(state: Any, amaxes: dict[int, Tensor], limit: float, recipe: Any) -> None:
    for index, amax in amaxes.items():
        if amax > 0 and amax.isfinite():
            state.scale[index] = limit / amax / 2**recipe.margin
            state.amax_history[-1, index] = amax  # the oldest: row 0 is written to by the next step
