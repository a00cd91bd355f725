"""A replacement of the TE backend for plans on machines without TE. Its ops run in plain PyTorch."""

from __future__ import annotations

from typing import Any

from te_transform.backends.cudnn import DotProductAttention
from te_transform.backends.plain import (
    ACTIVATIONS,
    GATED_ACTIVATIONS,
    CrossEntropy,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    PaddedLinear,
    Rotary,
    WideLinear,
    recipe_now,
)

__all__ = [
    "ACTIVATIONS", "GATED_ACTIVATIONS", "GATES", "HAS_BIAS", "HAS_KERNELS", "NAME",
    "CrossEntropy", "DotProductAttention", "LayerNormLinear", "LayerNormMLP", "Linear",
    "PaddedLinear", "Rotary", "WideLinear", "multiple", "recipe_now", "recipe_of",
]  # fmt: skip

NAME = "te"
HAS_KERNELS = True
HAS_BIAS = False
GATES = ("no", "first half")


def recipe_of(asked: Any) -> Any:
    """Return the recipe or the name of a recipe unchanged.

    Raises:
        ValueError: `asked` is neither a name nor a recipe of TE.
    """
    homes = (kind.__module__ for kind in type(asked).__mro__)
    if isinstance(asked, str) or any(home.startswith("transformer_engine.") for home in homes):
        return asked
    raise ValueError(f"a {type(asked).__name__} is no TE recipe; pass a recipe of TE, or its name")


def multiple(recipe: Any) -> int:
    """Return the number that must divide the rows and columns of a matrix product in this recipe."""
    return 32 if recipe == "mxfp8" or type(recipe).__name__ == "MXFP8BlockScaling" else 16
