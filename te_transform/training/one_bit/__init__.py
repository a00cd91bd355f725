"""Optimizers whose ranks exchange the signs of momenta instead of gradients."""

from te_transform.training.one_bit.adam import OneBitAdam
from te_transform.training.one_bit.checks import OneBitError
from te_transform.training.one_bit.lamb import OneBitLamb
from te_transform.training.one_bit.zero_one import ZeroOneAdam

__all__ = ["OneBitAdam", "OneBitError", "OneBitLamb", "ZeroOneAdam"]
