"""Read the values of command line options, and reject unusable values before the measurement."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # to import the models of the tests
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))  # to import what both read

from options import output_file, positive

__all__ = ["json_file", "json_lines", "on_gpu", "output_file", "positive"]


def on_gpu(parser: ArgumentParser, *packages: str) -> Namespace:
    """Return the arguments of the command line, or exit if a GPU or a package is missing."""
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected an NVIDIA GPU that PyTorch can use, got none")
    if missing := [name for name in packages if find_spec(name) is None]:
        parser.error(f"expected the package {missing[0]}, got none; install it with pip")
    return asked


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
