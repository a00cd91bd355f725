"""Read the values of command line options, and reject unusable values before the measurement."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))  # to import what both read

from options import output_file, positive

__all__ = ["json_file", "json_lines", "output_file", "positive"]


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
