"""Progress on a terminal, text for logs, and errors in one line."""

from __future__ import annotations

import io
import os
import sys
import sysconfig
import traceback
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track

T = TypeVar("T")
_TEXT_COLUMNS = 110  # columns of as_text()
# this package, the standard library, installed packages, and code without a file
_INSTALLED = map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))
_NOT_THE_USERS = (str(Path(__file__).parents[1]), *_INSTALLED, "<")


def progress(items: Collection[T], doing: str) -> Iterator[T]:
    """Yield the items with a progress bar on stderr if stderr is a terminal."""
    console, watched = Console(stderr=True), sys.stderr.isatty()
    yield from track(items, f"te_transform: {doing}", console=console, disable=not watched, transient=True)


def as_text(shown: Any) -> str:
    """Return what rich prints of an object; text for logs must not depend on the terminal or notebook."""
    plain = {"width": _TEXT_COLUMNS, "color_system": None, "force_terminal": False, "force_jupyter": False}
    console = Console(file=io.StringIO(), legacy_windows=False, **plain)
    console.print(shown)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def in_a_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message."""
    return ": ".join((type(error).__name__, *str(error).splitlines()[:1]))


def raised_at(error: BaseException) -> str:
    """Return " at FILE:LINE" for the line of the user's code that raised an error, "" if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" at {error.filename}:{error.lineno}"
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    for file, line in reversed(frames):
        if not file.startswith(_NOT_THE_USERS):
            return f" at {os.path.relpath(file)}:{line}"
    return ""


def on_terminal(shown: Any) -> None:
    """Print an object on stderr if stderr is a terminal."""
    if sys.stderr.isatty():
        Console(stderr=True).print(shown)


def status(doing: str) -> AbstractContextManager[Any]:
    """Show a spinner on stderr if stderr is a terminal."""
    return Console(stderr=True).status(f"te_transform: {doing}") if sys.stderr.isatty() else nullcontext()
