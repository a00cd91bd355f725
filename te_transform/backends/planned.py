"""A replacement of the TE backend for plans on machines without TE. Its ops run in plain PyTorch."""

from __future__ import annotations

from typing import Any

from te_transform.backends import plain
from te_transform.backends.cudnn import DotProductAttention

__all__ = ["GATES", "HAS_BIAS", "HAS_KERNELS", "NAME", "DotProductAttention", "multiple", "recipe_of"]

NAME = "te"
HAS_KERNELS = True
HAS_BIAS = False
GATES = ("no", "first half")


def __getattr__(name: str) -> Any:
    """Return an op, or another public name, of plain PyTorch."""
    if name in plain.__all__:
        return getattr(plain, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def recipe_of(asked: Any) -> Any:
    """Return the recipe or the name of a recipe unchanged.

    Raises:
        ValueError: `asked` is neither a name nor a recipe of TE.
    """
    homes = (kind.__module__ for kind in type(asked).__mro__)
    if isinstance(asked, str) or any(home.startswith("transformer_engine.") for home in homes):
        return asked
    raise ValueError(f"expected a recipe of TE or its name, got {asked!r}")


def multiple(recipe: Any) -> int:
    """Return the number that must divide the rows and columns of a matrix product in this recipe."""
    return 32 if recipe == "mxfp8" or type(recipe).__name__ == "MXFP8BlockScaling" else 16
