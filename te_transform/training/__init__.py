"""Techniques of large-scale training, for converted models and any other. The core never imports them."""

from te_transform.training.one_bit import OneBitAdam, OneBitError, OneBitLamb, ZeroOneAdam

__all__ = ["OneBitAdam", "OneBitError", "OneBitLamb", "ZeroOneAdam"]
