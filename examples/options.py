"""Read the values of command line options, and reject unusable values before the training."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected a whole number of at least 1, got {text}")
    return int(text)


def output_file(text: str) -> str:
    """Return the path of a file that can be written."""
    if Path(text).is_dir() or not Path(text).parent.is_dir():
        raise ArgumentTypeError(f"expected a file in an existing folder, got {text}")
    return text
