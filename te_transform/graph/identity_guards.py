"""A guard for the objects that a capture takes for different ones, or for one.

Dynamo folds `a is b`, and tracks a list that is found twice as two lists, without a guard that they
stay different. Each graph has one such guard, for the objects that the forward compares, uses as keys, or
changes.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch._dynamo.variables.base import VariableTracker
from torch._guards import Guard, Source

from te_transform.graph.lambda_guards import guard_at_root, notes_of_capture, value_of

# Dynamo guards the identity or the value of such objects, with other guards. Built-in functions are constant.
_GUARDED = (
    int, float, complex, str, bytes, type, types.NoneType, types.ModuleType,
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
)  # fmt: skip
_OF_MODULES = frozenset(vars(nn.Module()))  # such as _parameters: no other object refers to these


class _Compared:
    """The sources of the objects of one capture that have to stay different, or one."""

    def __init__(self) -> None:
        self.sources: dict[Source, None] = {}
        self.tracked: list[VariableTracker] = []  # objects that a capture may change
        self.changed: set[Any] = set()  # the classes of changed objects

    def names(self, builder: Any) -> list[str]:
        """Return the names of compared objects, and of all objects of changed classes."""
        found = {*self.sources, *(v.source for v in self.tracked if _class_of(v) in self.changed)}
        names = sorted({source.name for source in found})
        shared = [name for name in names if name.rpartition(".")[2] not in _OF_MODULES]
        return [name for name in shared if not isinstance(value_of(builder, name), _GUARDED)]


def _class_of(variable: VariableTracker) -> Any:
    return getattr(variable, "value_type", None) or type(variable)


def guard_identity(*sources: Source | None) -> None:
    """Guard which of the objects behind these sources, and behind all earlier ones, are the same."""
    _compared_objects().sources.update((source, None) for source in sources if source is not None)


def note_tracked(variable: VariableTracker) -> None:
    """Note an object that the capture may change."""
    if variable.source is not None:
        _compared_objects().tracked.append(variable)


def guard_changed(variable: VariableTracker) -> None:
    """Guard that an object which the capture changes stays different from others of its class."""
    if variable.source is not None:
        _compared_objects().changed.add(_class_of(variable))


def _compared_objects() -> _Compared:
    return notes_of_capture(_Compared, _same_objects)


def _same_objects(builder: Any, guard: Guard, notes: _Compared) -> None:
    """Build the guard after all objects were compared."""
    names = notes.names(builder)
    if len(names) > 1:
        guard_at_root(builder, guard, f"({', '.join(names)})", _firsts, f"identities of {len(names)} objects")


def _firsts(held: Iterable[Any]) -> tuple[int, ...]:
    """Return, for each object, the index at which it is found first."""
    indices: dict[int, int] = {}
    return tuple(indices.setdefault(id(value), index) for index, value in enumerate(held))
