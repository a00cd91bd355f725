"""The fused ops in plain PyTorch, with Transformer Engine's semantics.

They are the reference in tests on any machine, and they run where TE would not be faster.
"""

from __future__ import annotations

from typing import Any

from te_transform.backends.plain.attention import DotProductAttention, Given, Mask
from te_transform.backends.plain.cross_entropy import CrossEntropy, check_targets, reduced
from te_transform.backends.plain.products import (
    ACTIVATIONS,
    CLAMPED,
    EXACT_GELU,
    GATED_ACTIVATIONS,
    GATES,
    SLOPES,
    Clamp,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    PaddedLinear,
    Product,
    activated,
    clamp_of,
    clamped,
    is_gated,
    product,
)
from te_transform.backends.plain.rotary import Rotary
from te_transform.backends.plain.wide_linear import WideLinear

__all__ = [
    "ACTIVATIONS", "CLAMPED", "EXACT_GELU", "GATED_ACTIVATIONS", "GATES", "HAS_BIAS", "HAS_KERNELS", "NAME",
    "SLOPES", "Clamp", "CrossEntropy", "DotProductAttention", "Given", "LayerNormLinear", "LayerNormMLP",
    "Linear", "Mask", "PaddedLinear", "Product", "Rotary", "WideLinear", "activated", "check_targets",
    "clamp_of", "clamped", "is_gated", "multiple", "product", "recipe_now", "recipe_of", "reduced",
]  # fmt: skip

NAME = "torch"
HAS_KERNELS = False
HAS_BIAS = True


def recipe_of(asked: Any) -> Any:
    """Raise, because no recipe runs in plain PyTorch.

    Raises:
        ValueError: always.
    """
    raise ValueError("expected a backend with FP8 kernels, got plain PyTorch; choose backend 'te'")


def recipe_now() -> Any:
    """Return None, because plain PyTorch has no recipes."""
    return None


def multiple(recipe: Any) -> int:
    """Return 1, because matrix products may have any number of rows and columns."""
    return 1
