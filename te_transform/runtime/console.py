"""What a person is told: of long work, on a terminal alone, and of an error in a line."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track

T = TypeVar("T")


def progress(items: Collection[T], doing: str) -> Iterator[T]:
    """The items, one by one, with a bar on stderr if a person is watching."""
    console, watched = Console(stderr=True), sys.stderr.isatty()
    yield from track(items, f"te_transform: {doing}", console=console, disable=not watched, transient=True)


def in_a_line(error: BaseException) -> str:
    """The class of an error, and the first line of what it says."""
    return ": ".join((type(error).__name__, *str(error).splitlines()[:1]))


def status(doing: str) -> AbstractContextManager[Any]:
    """A moving line on stderr meanwhile, if a person is watching."""
    return Console(stderr=True).status(f"te_transform: {doing}") if sys.stderr.isatty() else nullcontext()
