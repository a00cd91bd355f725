"""Activations that TE's MLP computes."""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import Tensor
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.module import layernorm_mlp

from te_transform.backends.double_backward import Out
from te_transform.backends.plain import EXACT_GELU, GATED_ACTIVATIONS
from te_transform.backends.te.recipes import is_delayed
from te_transform.graph.bound import F


class Mlp(te.LayerNormMLP):
    """TE's, which also runs where neither its input nor its norm needs a gradient."""

    def forward(self, x: Tensor, **how: Any) -> Out:
        """x [..., hidden] -> [..., hidden]."""
        # where neither needs a gradient, TE goes on to ask a LayerNorm's bias, which an RMSNorm has not
        needed = x.requires_grad or self.layer_norm_weight.requires_grad
        if not torch.is_grad_enabled() or needed:
            return super().forward(x, **how)
        if any(weight is not None and weight.requires_grad for weight in self._others()):
            return super().forward(x.detach().requires_grad_(), **how)
        with torch.no_grad():
            return super().forward(x, **how)

    def _others(self) -> tuple[Tensor | None, ...]:
        return self.layer_norm_bias, self.fc1_weight, self.fc1_bias, self.fc2_weight, self.fc2_bias


def _exact_gelu(x: Tensor, quantizer: Any) -> Any:
    """GELU(x), as TE's functions return it."""
    return _quantized(F.gelu(x), quantizer)


def _exact_gelu_backward(grad: Tensor, x: Tensor, quantizer: Any) -> Any:
    """The gradient of x, as TE's functions return it."""
    return _quantized(torch.ops.aten.gelu_backward(grad, x), quantizer)


def _quantized(x: Tensor, quantizer: Any) -> Any:
    return x if quantizer is None else quantizer(x)


class _CastInBackward(str):
    """The name of a gated activation whose gradient is cast to FP8 in the kernel that computes it."""


def activation_of(name: str, bias: bool) -> str:
    """The activation as TE's module gets it.

    Gradients of gated ones are cast where they are computed, but for those with a bias, whose gradient that
    kernel does not compute.
    """
    if not with_own_activations() or bias or name not in GATED_ACTIVATIONS.values():
        return name
    return _CastInBackward(name)


@cache
def with_own_activations() -> bool:
    """Let TE compute the exact GELU, and cast gated activations' gradients where they are computed; False
    where this TE has another way.

    TE asks _act_func in each forward and backward: for an activation, its gradient, and that with a bias's
    gradient and the cast. The exact GELU is computed and then cast: kernels that do both were slower where
    they were tried. For gated ones in delayed scaling TE casts in another kernel; but the kernel of the
    gradient takes a quantizer. [8192, 2 x 14336] on an H100: 0.48 ms instead of 0.74, no copy in bf16.
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
        return forward, backward, lambda grad, x, quantizer: (None, backward(grad, x, quantizer))

    layernorm_mlp._act_func = act_func
    return True
