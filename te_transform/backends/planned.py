"""Transformer Engine where it is missing: what plans ask of it, with ops in plain PyTorch."""

from __future__ import annotations

from typing import Any

from te_transform.backends.cudnn import DotProductAttention
from te_transform.backends.plain import (
    ACTIVATIONS,
    GATED_ACTIVATIONS,
    CrossEntropy,
    Experts,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    PaddedLinear,
    Rotary,
    recipe_now,
)

__all__ = [
    "ACTIVATIONS", "GATED_ACTIVATIONS", "GATES", "HAS_BIAS", "HAS_KERNELS", "NAME",
    "CrossEntropy", "DotProductAttention", "Experts", "LayerNormLinear", "LayerNormMLP", "Linear",
    "PaddedLinear", "Rotary", "multiple", "recipe_now", "recipe_of",
]  # fmt: skip

NAME = "te"
HAS_KERNELS = True
HAS_BIAS = False
GATES = ("no", "first half")


def recipe_of(asked: Any) -> Any:
    """The recipe as it was named.

    Raises:
        ValueError: it is no recipe of TE's.
    """
    if isinstance(asked, str) or type(asked).__module__.startswith("transformer_engine."):
        return asked
    raise ValueError(f"a {type(asked).__name__} is no TE recipe, one of TE's own or a name is needed")


def multiple(recipe: Any) -> int:
    """What the rows and columns of a product have to be a multiple of."""
    return 32 if recipe == "mxfp8" or type(recipe).__name__ == "MXFP8BlockScaling" else 16
