"""Context variables with a value for the body of a `with` statement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def set_to(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable inside of the context."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
