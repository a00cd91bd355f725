"""Text of errors, which user code may have raised: the message of such an error may raise, too."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

_LIBRARY = str(Path(__file__).parents[1])
# the standard library, installed packages, and code without a file
_INSTALLED = (*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), "<")


def message_of(error: BaseException) -> str:
    """Return the message of an error, also if its `__str__` raises."""
    try:
        return str(error)
    except Exception:
        return "its message cannot be read"


def in_full(error: BaseException) -> str:
    """Return the class of an error and its message."""
    return ": ".join(filter(None, (type(error).__name__, message_of(error))))


def in_a_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message; a printed module is cut short."""
    lines = message_of(error).strip().splitlines()
    is_module = len(lines) > 1 and lines[0].endswith("(")  # a line for each module inside
    text = [f"{lines[0]}...{lines[-1]}"] if is_module else lines[:1]
    return ": ".join((type(error).__name__, *text))


def raised_at(error: BaseException) -> str:
    """Return " at FILE:LINE" for the line of the user's code that raised an error, "" if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" at {error.filename}:{error.lineno}"
    for file, line in reversed(_frames(error)):
        if not file.startswith((_LIBRARY, *_INSTALLED)):
            return f" at {os.path.relpath(file)}:{line}"
    return ""


def is_from_user_code(error: BaseException) -> bool:
    """Return True if user code raised an error, directly or in a call of an installed package."""
    files = [file for file, _ in _frames(error)]
    outside = [file for file in files if file.startswith(_LIBRARY) or not file.startswith(_INSTALLED)]
    return bool(outside) and not outside[-1].startswith(_LIBRARY)


def _frames(error: BaseException) -> list[tuple[str, int]]:
    return [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
