"""Snapshots of Python containers and objects that a model refers to."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

_CONTAINERS = (OrderedDict, dict, list, set, deque)


def home_of(value: type | types.FunctionType) -> str:
    """Return the name of the Python module of a class or a function, or "" if it has none.

    `__module__` of a class may be a property of its objects, as in Cython's metaclass.
    """
    home = value.__module__ if isinstance(value, type) else value.__globals__.get("__name__")
    return home if isinstance(home, str) else ""


class Content:
    """A value with a copy of its content."""

    __slots__ = ("inside", "value")
    root: str | None = None  # the start of paths to the value; None: paths start at its holder

    def __init__(self, value: Any):
        self.value = value
        self.inside: Iterable[Any] = ()  # the values that the value refers to

    def put_back(self) -> None:
        """Restore the content of the value; do not write to unchanged parts."""

    def lend(self, copies: Mapping[int, Any]) -> None:
        """Replace the values with these ids by their copies until put_back()."""

    def label(self, inside: Any) -> str:
        """Return the Python expression that leads from this value to a value inside, such as [0] or .name."""
        return ""


class Items(Content):
    """The items of a dictionary, a list, a set or a deque.

    Subclasses may count, limit or refuse new items. Items are therefore restored with the methods of the base
    class.
    """

    __slots__ = ("base", "items", "keys")

    def __init__(self, value: Any):
        super().__init__(value)
        self.base = next(base for base in _CONTAINERS if issubclass(type(value), base))
        self.keys, self.items = self._now()
        self.inside = (*self.keys, *self.items)

    def _now(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        base, value = self.base, self.value
        if issubclass(base, dict):
            return (*base.keys(value),), (*base.values(value),)
        return (), (*base.__iter__(value),)

    def put_back(self) -> None:
        keys, items = self._now()
        if not (are_the_same(keys, self.keys) and are_the_same(items, self.items)):
            self._fill(self.items)

    def _fill(self, items: Iterable[Any]) -> None:
        self.value.clear()
        if issubclass(self.base, dict):
            for key, item in zip(self.keys, items, strict=True):
                self.base.__setitem__(self.value, key, item)
        else:
            (self.base.update if self.base is set else self.base.extend)(self.value, items)

    def lend(self, copies: Mapping[int, Any]) -> None:
        self._fill([copies.get(id(item), item) for item in self.items])

    def label(self, inside: Any) -> str:
        keys = self.keys or range(len(self.items))
        return next((f"[{k!r}]" for k, item in zip(keys, self.items, strict=True) if item is inside), "")


def _in_context(value: ContextVar[Any]) -> list[Any]:
    try:
        return [value.get()]
    except LookupError:
        return []


# immutable values, each with the function that returns the values that it refers to
LEADS: dict[type, Callable[[Any], Iterable[Any]]] = {
    tuple: lambda value: value,
    frozenset: lambda value: value,
    functools.partial: lambda value: [value.func, value.args, value.keywords],
    types.MethodType: lambda value: [value.__self__, value.__func__],
    types.BuiltinMethodType: lambda value: [value.__self__],  # such as list.append of a list
    types.MethodWrapperType: lambda value: [value.__self__],
    types.MappingProxyType: lambda value: [*value.values()],
    weakref.ref: lambda value: [value()],
    functools._lru_cache_wrapper: lambda value: [getattr(value, "__wrapped__", None)],
    ContextVar: _in_context,
    ctypes._Pointer: lambda value: [value.contents] if value else [],
}


class Leads(Content):
    """An immutable value that refers to mutable values."""

    __slots__ = ()

    def __init__(self, value: Any):
        super().__init__(value)
        leads = next(leads for kind, leads in LEADS.items() if isinstance(value, kind))
        self.inside = leads(value)

    def label(self, inside: Any) -> str:
        if isinstance(self.value, tuple):
            return next(f"[{n}]" for n, item in enumerate(self.value) if item is inside)
        return ""


class Named(Content):
    """A value that holds others by name, in its `__dict__` unless a subclass has another place.

    `names` are the values that now() returned at the snapshot.
    """

    __slots__ = ("names",)

    def now(self) -> dict[Any, Any]:
        """Return the values that the value holds, by name."""
        raise NotImplementedError

    def put(self, name: Any, item: Any) -> None:
        """Hold a value under a name."""
        self.value.__dict__[name] = item

    def drop(self, name: Any) -> None:
        """Hold no value under a name any more."""
        del self.value.__dict__[name]

    def put_back(self) -> None:
        now = self.now()
        for name in now.keys() - self.names.keys():
            self.drop(name)
        for name, item in self.names.items():
            if name not in now or now[name] is not item:
                self.put(name, item)

    def lend(self, copies: Mapping[int, Any]) -> None:
        for name, item in self.names.items():
            if id(item) in copies:
                self.put(name, copies[id(item)])

    def label(self, inside: Any) -> str:
        named = self.names.items()
        return next((f".{getattr(name, '__name__', name)}" for name, item in named if item is inside), "")


class Attributes(Named):
    """The attributes of an object, from its dictionary and from the slots of its class."""

    __slots__ = ()

    def __init__(self, value: Any):
        super().__init__(value)
        self.names = self.now()
        self.inside = [*self.names.values(), *type(value).__mro__]

    def now(self) -> dict[Any, Any]:
        return {**getattr(self.value, "__dict__", {}), **_in_slots(self.value)}

    def put(self, name: Any, item: Any) -> None:
        if isinstance(name, types.MemberDescriptorType):
            name.__set__(self.value, item)
        else:
            super().put(name, item)

    def drop(self, name: Any) -> None:
        if isinstance(name, types.MemberDescriptorType):
            name.__delete__(self.value)
        else:
            super().drop(name)

    def put_back(self) -> None:
        super().put_back()
        names = getattr(self.value, "__dict__", {})
        order = [name for name in self.names if name in names]
        for name in order if [*names] != order else ():
            names[name] = names.pop(name)


def has_slots(kind: type) -> bool:
    """Return True if a class stores attributes in slots."""
    return any(_slots(kind))


def _slots(kind: type) -> Iterator[Any]:
    in_c = defaultdict, BaseException
    own = (vars(each) for each in kind.__mro__ if "__slots__" in vars(each) or issubclass(each, in_c))
    return (
        member for names in own for member in names.values() if isinstance(member, types.MemberDescriptorType)
    )


def _in_slots(value: Any) -> dict[Any, Any]:
    values = {}
    for slot in _slots(type(value)):
        with contextlib.suppress(AttributeError):
            values[slot] = slot.__get__(value)
    return values


def objects(mapping: Any) -> list[Any]:
    """Return the keys and values of a dictionary."""
    return [*mapping, *mapping.values()]


def are_the_same(some: Iterable[Any], others: Iterable[Any]) -> bool:
    """Return True if two sequences hold the same objects, compared by identity."""
    return [*map(id, some)] == [*map(id, others)]
