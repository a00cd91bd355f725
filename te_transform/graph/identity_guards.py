"""A guard for the objects that a capture takes for different ones, or for one.

Dynamo folds `a is b`, and tracks a list that is found twice as two lists, without a guard that they
stay different. Each graph has one such guard, for the objects that the forward compares, uses as keys, or
changes.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch._dynamo import variables
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import BuiltinVariable, builder, dicts
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._guards import Guard, Source

from te_transform.graph.dynamo_patches import IS_2_13, Patch, around, call_after, call_before
from te_transform.graph.lambda_guards import guard_at_root, notes_of_capture, value_of

COMPARED_BY_VALUE = frozenset((bool, int, float, complex, str, bytes, type(None)))  # by ==, as keys
# Dynamo guards the identity or the value of such objects, with other guards. Built-in functions are constant.
_GUARDED = (
    int, float, complex, str, bytes, type, types.NoneType, types.ModuleType,
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
)  # fmt: skip
_OF_MODULES = frozenset(vars(nn.Module()))  # such as _parameters: no other object refers to these


def identity_patches() -> Iterator[Patch]:
    """Yield the dynamo methods that take two objects for one, or for two, with their wrappers."""
    yield BuiltinVariable, "call_function", call_before(_guard_is)
    if IS_2_13:
        yield variables.object_protocol, "vt_identity_compare", call_before(_guard_compared)
        yield variables.hashable.HashableTracker, "__init__", call_after(_guard_hashed)
    else:
        yield UserDefinedObjectVariable, "is_python_equal", call_before(_guard_compared)
        yield UserDefinedObjectVariable, "call_method", call_before(_guard_eq)
        yield dicts.ConstDictVariable._HashableTracker, "__init__", call_after(_guard_hashed)
    yield builder, "make_dupe_guard", around(_one_object_in_two_places)
    for name in ("_track_obj", "track_mutable"):
        yield SideEffects, name, call_before(_note_tracked)
    for name in ("mutation", "store_attr"):
        yield SideEffects, name, call_before(_note_changed)


def _guard_is(self: BuiltinVariable, _: Any, args: Any, kwargs: Any) -> None:
    if self.fn in (operator.is_, operator.is_not):
        _guard_compared(*args)


def _guard_eq(self: Any, _: Any, name: str, args: list[VariableTracker], kwargs: Any) -> None:
    if name == "__eq__" and args:
        _guard_compared(self, args[0])


def _guard_compared(*compared: VariableTracker) -> None:
    """Guard the identity of objects that `is`, `==` or `in` compares, if guards can reach all of them."""
    if all(each.source is not None for each in compared):
        _guard_identity(*(each.source for each in compared))


def _guard_hashed(self: Any, _: VariableTracker) -> None:
    """Guard the identity of objects that are keys of a dict or items of a set."""
    key = self.vt
    if isinstance(key, LazyVariableTracker) and not key.is_realized():  # dynamo cannot hash all others
        if type(key.original_value()) not in COMPARED_BY_VALUE:
            _guard_identity(key.original_source())
    elif not key.is_python_constant():
        _guard_identity(key.source)


def _one_object_in_two_places(own: Callable[..., Any], source: Source, known: Source | None) -> Any:
    """Guard that an argument and a global variable stay one object, where dynamo has no guard."""
    guard_of_duplicate = own(source, known)
    if guard_of_duplicate is None and known is not None and known != source:
        _guard_identity(source, known)
    return guard_of_duplicate


class _Compared:
    """The sources of the objects of one capture that have to stay different, or one."""

    def __init__(self) -> None:
        self.sources: dict[Source, None] = {}
        self.tracked: list[VariableTracker] = []  # objects that a capture may change
        self.changed: set[Any] = set()  # the classes of changed objects

    def names(self, builder: Any) -> list[str]:
        """Return the names of compared objects, and of all objects of changed classes."""
        sources = {*self.sources, *(v.source for v in self.tracked if _class_of(v) in self.changed)}
        names = sorted({source.name for source in sources})
        shared = [name for name in names if name.rpartition(".")[2] not in _OF_MODULES]
        return [name for name in shared if not isinstance(value_of(builder, name), _GUARDED)]


def _class_of(variable: VariableTracker) -> Any:
    return getattr(variable, "value_type", None) or type(variable)


def _guard_identity(*sources: Source | None) -> None:
    """Guard which of the objects behind these sources, and behind all earlier ones, are the same."""
    _compared_objects().sources.update((source, None) for source in sources if source is not None)


def _note_tracked(_: SideEffects, __: Any, variable: VariableTracker, **___: Any) -> None:
    """Note an object that the capture may change, except dynamo's own stack of modes, which has no name."""
    if variable.source is not None and type(variable.source) is not Source:
        _compared_objects().tracked.append(variable)


def _note_changed(_: SideEffects, variable: VariableTracker, *__: Any, **___: Any) -> None:
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


def _firsts(values: Iterable[Any]) -> tuple[int, ...]:
    """Return, for each object, the index at which it is found first."""
    indices: dict[int, int] = {}
    return tuple(indices.setdefault(id(value), index) for index, value in enumerate(values))
