"""A bound on the elements of one container that a capture reads one by one or changes.

Dynamo guards each element that a forward reads, and rewrites a changed container as a whole. The time for n
elements grows with n * n: a forward that appends to a list of 100,000 numbers was captured for minutes.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch._dynamo.exc import unimplemented
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import (
    ConstDictKeySource,
    DictGetItemSource,
    GetItemSource,
    NonSerializableSetGetItemSource,
)
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._guards import Source

MOST_ELEMENTS = 2**10
_OF_ELEMENTS = (ConstDictKeySource, DictGetItemSource, GetItemSource, NonSerializableSetGetItemSource)

_KEYS = "install_dict_keys_match_guard"


@contextmanager
def bounded_containers() -> Iterator[None]:
    """End a graph where the forward reads or changes a longer container: Python runs this statement."""
    read: defaultdict[Source, set[Source]] = defaultdict(set)

    def count_elements(wrap: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wrap)
        def call(self: VariableBuilder, value: Any) -> Any:
            if isinstance(source := self.source, _OF_ELEMENTS):
                read[source.base].add(source)
                _check(len(read[source.base]))
            return wrap(self, value)

        return call

    with (
        patch.object(VariableBuilder, "_wrap", count_elements(VariableBuilder._wrap)),
        patch.object(SideEffects, "mutation", _check_changed(SideEffects.mutation)),
        patch.object(ConstDictVariable, _KEYS, _check_keys(getattr(ConstDictVariable, _KEYS))),
    ):
        yield


def _check_changed(mutation: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(mutation)
    def call(self: SideEffects, variable: VariableTracker, *args: Any) -> Any:
        if variable.source is not None:
            _check(len(getattr(variable, "items", ())))
        return mutation(self, variable, *args)

    return call


def _check_keys(guard_keys: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(guard_keys)
    def call(self: ConstDictVariable) -> Any:
        if self.source is not None:
            _check(len(self.items))
        return guard_keys(self)

    return call


def _check(elements: int) -> None:
    if elements > MOST_ELEMENTS:
        unimplemented(
            gb_type=f"it reads or changes more than {MOST_ELEMENTS:,} elements of a list, dict, set or deque",
            context="", explanation="", hints=[],
        )  # fmt: skip
