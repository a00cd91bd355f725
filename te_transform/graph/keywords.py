"""Errors about arguments: the names of invalid ones, and the correct name for a misspelled one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ArgumentError(ValueError):
    """The error for arguments of a function with invalid values.

    Attributes:
        arguments: the names. The command line prints its options with these names.
    """

    def __init__(self, message: str, *arguments: str):
        super().__init__(message)
        self.arguments = arguments


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean '...'?" with the closest known name, or "" if none is close.

    Case, hyphens and underscores do not count.
    """
    spelled = {_folded(each): each for each in known}
    similar = get_close_matches(_folded(name), [*spelled], n=1)
    return f"; did you mean {spelled[similar[0]]!r}?" if similar else ""


def _folded(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def suggests(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function; its TypeError for an unknown keyword argument suggests the correct name."""
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if unknown := next((name for name in kwargs if name not in parameters), None):
            raise TypeError(
                f"{function.__name__}() got an unexpected keyword argument {unknown!r}"
                f"{did_you_mean(unknown, parameters)}"
            )
        return function(*args, **kwargs)

    return run
