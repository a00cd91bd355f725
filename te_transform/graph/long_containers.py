"""A bound on the elements of one container that a capture reads one by one or changes.

Dynamo guards each element that a forward reads, and rewrites a changed container as a whole. The time for n
elements grows with n * n: a forward that appends to a list of 100,000 numbers was captured for minutes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

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

from te_transform.graph.dynamo_patches import Patch, call_before, leave_to_user

MOST_ELEMENTS = 2**10
_OF_ELEMENTS = (ConstDictKeySource, DictGetItemSource, GetItemSource, NonSerializableSetGetItemSource)


def container_patches() -> Iterator[Patch]:
    """Yield the methods of dynamo that read or change a container, with their wrappers.

    A graph ends where the forward reads or changes a longer container: Python runs this statement.
    """
    read: defaultdict[Source, set[Source]] = defaultdict(set)

    def count_elements(self: VariableBuilder, _: Any) -> None:
        if isinstance(source := self.source, _OF_ELEMENTS):
            read[source.base].add(source)
            _check(len(read[source.base]))

    yield VariableBuilder, "_wrap", call_before(count_elements)
    yield SideEffects, "mutation", call_before(_check_changed)
    yield ConstDictVariable, "install_dict_keys_match_guard", call_before(_check_keys)


def _check_changed(_: SideEffects, variable: VariableTracker, *__: Any) -> None:
    if variable.source is not None:
        _check(len(getattr(variable, "items", ())))


def _check_keys(self: ConstDictVariable) -> None:
    if self.source is not None:
        _check(len(self.items))


def _check(elements: int) -> None:
    if elements > MOST_ELEMENTS:
        leave_to_user(
            f"it reads or changes more than {MOST_ELEMENTS:,} elements of a list, dict, set or deque"
        )
