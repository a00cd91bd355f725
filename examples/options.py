"""Read the values of command line options, and reject unusable values before the training."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import te_transform


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


@contextmanager
def usable() -> Iterator[None]:
    """End the script with one line, as argparse does, if this machine cannot convert with its options."""
    try:
        yield
    except te_transform.OptionError as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        sys.exit(2)
