"""The fused ops on NVIDIA Transformer Engine, which only this folder imports.

Matrix products run in TE's modules, which are built on the meta device without parameters. Each call assigns
its weights to them. The modules keep FP8 state between steps. They belong to the parameters, see
fp8/registry.py. The op runs in plain PyTorch if TE has no kernel for a call (another device, float32), or no
faster one (few tokens). `plain_calls` counts the reasons.
"""

from te_transform.backends.cublas import fastest_product
from te_transform.backends.library import KERNELS
from te_transform.backends.plain import ACTIVATIONS, GATED_ACTIVATIONS
from te_transform.backends.te.attention import DotProductAttention, attend, attend_backward
from te_transform.backends.te.casts import activate, activate_backward, quantize
from te_transform.backends.te.cross_entropy import CrossEntropy
from te_transform.backends.te.products import LayerNormLinear, LayerNormMLP, Linear, PaddedLinear
from te_transform.backends.te.recipes import (
    autocast,
    forgetting_scales,
    is_delayed,
    multiple,
    needs_update,
    recipe_now,
    recipe_of,
    scaling_of,
    update_scales_after_backward,
    within_step,
)
from te_transform.backends.te.rotary import Rotary
from te_transform.backends.te.wide_linear import WideLinear

__all__ = [
    "ACTIVATIONS", "GATED_ACTIVATIONS", "GATES", "HAS_BIAS", "HAS_KERNELS", "NAME",
    "CrossEntropy", "DotProductAttention", "LayerNormLinear", "LayerNormMLP", "Linear",
    "PaddedLinear", "Rotary", "WideLinear", "autocast", "forgetting_scales", "is_delayed", "multiple",
    "needs_update", "recipe_now", "recipe_of", "scaling_of", "update_scales_after_backward", "within_step",
]  # fmt: skip

NAME = "te"
HAS_KERNELS = True
HAS_BIAS = False
GATES = ("no", "first half")

KERNELS.update(
    quantize=quantize,
    activate=activate,
    activate_backward=activate_backward,
    multiply=fastest_product,
    attend=attend,
    attend_backward=attend_backward,
)
