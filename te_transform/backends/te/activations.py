"""Activations of TE's MLP: the exact GELU, and gated activations with a fused cast of the gradient."""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import Tensor
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.module import layernorm_mlp

from te_transform.backends.double_backward import Out
from te_transform.backends.plain import CLAMPED, EXACT_GELU, Clamp, clamp_of, is_gated
from te_transform.backends.te.recipes import is_delayed
from te_transform.graph.bound import F


class Mlp(te.LayerNormMLP):
    """TE's MLP, which also runs if neither its input nor the weight of its norm needs a gradient."""

    def forward(self, x: Tensor, **how: Any) -> Out:
        """Convert x [..., hidden] to [..., hidden]."""
        # if neither needs a gradient, TE checks the bias of a LayerNorm, which an RMSNorm does not have
        needed = x.requires_grad or self.layer_norm_weight.requires_grad
        if not torch.is_grad_enabled() or needed:
            return super().forward(x, **how)
        others = self.layer_norm_bias, self.fc1_weight, self.fc1_bias, self.fc2_weight, self.fc2_bias
        if any(weight is not None and weight.requires_grad for weight in others):
            return super().forward(x.detach().requires_grad_(), **how)
        with torch.no_grad():
            return super().forward(x, **how)


def _exact_gelu(x: Tensor, quantizer: Any) -> Any:
    """Compute GELU(x) with the interface of TE's functions."""
    return _maybe_quantized(F.gelu(x), quantizer)


def _exact_gelu_backward(grad: Tensor, x: Tensor, quantizer: Any) -> Any:
    """Compute the gradient of x with the interface of TE's functions."""
    return _maybe_quantized(torch.ops.aten.gelu_backward(grad, x), quantizer)


def _maybe_quantized(x: Tensor, quantizer: Any) -> Any:
    return x if quantizer is None else quantizer(x)


class _CastInBackward(str):
    """The name of a gated activation whose gradient is computed and cast to FP8 by one kernel."""


def activation_of(name: str, bias: bool) -> str:
    """Return the `activation` argument of TE's module, from TE's name.

    One kernel computes and casts the gradient of a gated activation. It does not support a bias, because it
    does not compute the gradient of the bias.
    """
    if not with_own_activations() or bias or not (is_gated(name) or name == CLAMPED):
        return name
    return _CastInBackward(name)


def activation_and_limits(name: str) -> tuple[str, dict[str, float]]:
    """Return TE's name of an activation, and its parameters: limits are part of our names."""
    clamp = clamp_of(name)
    return (name, {}) if clamp is None else (CLAMPED, clamp._asdict())


@cache
def with_limits() -> bool:
    """Return True if this version of TE documents all parameters of plain.Clamp."""
    return all(f"'{name}'" in (te.LayerNormMLP.__doc__ or "") for name in Clamp._fields)


@cache
def with_own_activations() -> bool:
    """Patch TE to support the exact GELU, and to cast the gradients of gated activations in one kernel.

    In each forward and backward, TE calls _act_func to get three functions. They compute the activation, its
    gradient, and its gradient with the gradient of the bias and the cast. The exact GELU is computed, and
    cast by a second kernel, because fused kernels were slower in measurements. For gated activations in
    delayed scaling, TE casts in a second kernel, although the kernel of the gradient accepts a quantizer. One
    kernel takes 0.48 ms instead of 0.74 ms, without a copy in bf16 ([8192, 2 x 14336], H100).

    Returns:
        False if this version of TE has another interface.
    """
    original = getattr(layernorm_mlp, "_act_func", None)
    if original is None or original("swiglu", recipes.DelayedScaling())[2:] != (None,):
        return False

    @wraps(original)
    def act_func(activation: str, *recipe: Any) -> tuple[Any, ...]:
        if activation == EXACT_GELU:
            return _exact_gelu, _exact_gelu_backward, None
        forward, backward, with_cast = original(activation, *recipe)
        ours = isinstance(activation, _CastInBackward) and any(map(is_delayed, recipe))
        if not ours or with_cast is not None:
            return forward, backward, with_cast
        return forward, backward, lambda *given, **limits: (None, backward(*given, **limits))

    layernorm_mlp._act_func = act_func
    return True
