"""Wrappers of dynamo's functions, for the time of a capture."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest.mock import patch

from torch._dynamo import variables
from torch._dynamo.exc import SkipFrame, unimplemented
from torch._dynamo.utils import counters

IS_2_13 = hasattr(variables, "object_protocol")  # PyTorch 2.13 or later
Patch = tuple[Any, str, Callable[[Any], Any]]  # a class or module, the name of its function, and the wrapper


@contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """Wrap these functions in this context. Of two wrappers of one function, the later calls the earlier."""
    with ExitStack() as applied:
        for home, name, wrap in patches:
            applied.enter_context(patch.object(home, name, wrap(getattr(home, name))))
        yield


def around(act: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a wrapper of a method that calls `act` instead, with the method and the method's arguments."""

    def wrap(own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            return act(own, *args, **kwargs)

        return call

    return wrap


def call_before(act: Callable[..., None]) -> Callable[[Any], Any]:
    """Return a wrapper of a method that first calls `act` with the method's arguments."""

    def call(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        act(*args, **kwargs)
        return own(*args, **kwargs)

    return around(call)


def call_after(act: Callable[..., None]) -> Callable[[Any], Any]:
    """Return a wrapper of a method that calls `act` with the method's arguments once the method returns."""

    def call(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out = own(*args, **kwargs)
        act(*args, **kwargs)
        return out

    return around(call)


def leave_to_user(why: str) -> NoReturn:
    """End the graph of the current capture: the user's own code runs here, and the report says why."""
    unimplemented(gb_type=why, context="", explanation="", hints=[])


def leave_forward_to_user(why: str) -> NoReturn:
    """Do not capture the function that dynamo traces: the user's own code runs, and the report says why."""
    counters["unimplemented"][why] += 1
    raise SkipFrame(why)
