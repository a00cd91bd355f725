"""A progress bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import track

T = TypeVar("T")


def progress(items: Collection[T], doing: str) -> Iterator[T]:
    """The items, one by one, with a bar on stderr if a person is watching."""
    console, watched = Console(stderr=True), sys.stderr.isatty()
    yield from track(items, f"te_transform: {doing}", console=console, disable=not watched, transient=True)
