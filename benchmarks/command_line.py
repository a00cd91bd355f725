"""Read the values of command line options, and reject unusable values before the measurement."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any


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


def json_file(text: str) -> Any:
    """Return the contents of a JSON file."""
    try:
        return json.loads(Path(text).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentTypeError(f"expected a JSON file, got {text} ({error})") from error


def json_lines(text: str) -> list[Any]:
    """Return the contents of a file with a JSON value on each line."""
    try:
        return [json.loads(line) for line in Path(text).read_text("utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ArgumentTypeError(f"expected a file of JSON lines, got {text} ({error})") from error
