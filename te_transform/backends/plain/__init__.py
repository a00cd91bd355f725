"""The fused ops in plain PyTorch, with Transformer Engine's semantics.

The reference that everything is tested against on any machine, and the right lowering where TE gains nothing.
"""

from __future__ import annotations

from typing import Any

from te_transform.backends.plain.attention import DotProductAttention, Given, Mask
from te_transform.backends.plain.cross_entropy import CrossEntropy, reduced
from te_transform.backends.plain.experts import PAIRS, Experts, routed, taken
from te_transform.backends.plain.products import (
    ACTIVATIONS,
    EXACT_GELU,
    GATED_ACTIVATIONS,
    GATES,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    PaddedLinear,
    Product,
    activated,
    product,
)
from te_transform.backends.plain.rotary import Rotary

__all__ = [
    "ACTIVATIONS", "EXACT_GELU", "GATED_ACTIVATIONS", "GATES", "HAS_BIAS", "HAS_KERNELS", "NAME", "PAIRS",
    "CrossEntropy", "DotProductAttention", "Experts", "Given", "LayerNormLinear", "LayerNormMLP", "Linear",
    "Mask", "PaddedLinear", "Product", "Rotary", "activated", "multiple", "product", "recipe_now",
    "recipe_of", "reduced", "routed", "taken",
]  # fmt: skip

NAME = "torch"
HAS_KERNELS = False
HAS_BIAS = True


def recipe_of(asked: Any) -> Any:
    """No recipe runs in plain PyTorch.

    Raises:
        ValueError: always.
    """
    raise ValueError("it needs Transformer Engine's kernels, plain PyTorch has none: pass backend='te'")


def recipe_now() -> Any:
    """None: there is never one on."""
    return None


def multiple(recipe: Any) -> int:
    """What the rows and columns of a product have to be a multiple of."""
    return 1
