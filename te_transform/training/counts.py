"""The check of numbers of steps, tokens and ranks, which the techniques share."""

from typing import Any


def is_count(value: Any, least: int = 1) -> bool:
    """Return True for an integer from `least` on. True and False are no counts."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
