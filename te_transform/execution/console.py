"""Progress on a terminal, and text for logs."""

from __future__ import annotations

import io
import sys
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track

T = TypeVar("T")
_TEXT_COLUMNS = 110  # columns of as_text()


def progress(items: Collection[T], doing: str) -> Iterator[T]:
    """Yield the items with a progress bar on stderr if stderr is a terminal."""
    console, watched = Console(stderr=True), sys.stderr.isatty()
    yield from track(items, f"te_transform: {doing}", console=console, disable=not watched, transient=True)


def as_text(shown: Any, encoding: str = "utf-8") -> str:
    """Return what rich prints of an object, in characters of an encoding.

    Text for logs must not depend on the terminal or notebook.
    """
    plain = {"width": _TEXT_COLUMNS, "color_system": None, "force_terminal": False, "force_jupyter": False}
    file = io.TextIOWrapper(io.BytesIO(), encoding, errors="replace", newline="\n")
    Console(file=file, legacy_windows=False, **plain).print(shown)
    file.seek(0)
    return "\n".join(line.rstrip() for line in file.read().splitlines())


def on_terminal(shown: Any) -> None:
    """Print an object on stderr if stderr is a terminal."""
    if sys.stderr.isatty():
        Console(stderr=True).print(shown)


def status(doing: str) -> AbstractContextManager[Any]:
    """Show a spinner on stderr if stderr is a terminal."""
    return Console(stderr=True).status(f"te_transform: {doing}") if sys.stderr.isatty() else nullcontext()
