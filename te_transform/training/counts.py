"""The check of numbers of steps, tokens and ranks, which the techniques share."""

from typing import Any


def is_count(value: Any) -> bool:
    """Return True for an integer from 1 on; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
