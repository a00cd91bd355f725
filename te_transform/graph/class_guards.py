"""A guard for class attributes that a capture reads: methods, properties and values without dynamo guards.

Each graph has one such guard, since all objects of a class share the class.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from inspect import isfunction
from typing import Any

from torch._dynamo import guards
from torch._dynamo.source import GlobalStateSource
from torch._guards import Guard, TracingContext

_MISSING = object()


def guard_class_attribute(held: Any, name: str) -> None:
    """Guard that the class of `held` keeps its current method, property or value under `name`."""
    if isinstance(held, type) or name not in getattr(held, "__dict__", ()):
        _guard_definition(classes_of(held), name)


def _guard_definition(mro: tuple[type, ...], name: str) -> None:
    home = next((home for home, base in enumerate(mro) if name in vars(base)), None)
    if home is None or not _is_users(mro[home], name):
        return  # an attribute of the object, such as a parameter
    read = _classes_read()
    read.update({(base, name): _MISSING for base in mro[:home]})
    if hasattr(type(found := vars(mro[home])[name]), "__get__"):  # dynamo guards values itself
        read[mro[home], name] = found


def guard_special_methods(held: Any) -> None:
    """Guard the methods that Python and nn.Module look up implicitly: `__len__`, `__call__`, `forward`."""
    read, mro = _classes_read(), classes_of(held)
    if (mro[0], "__mro__") in read or not _is_users(mro[0], "forward"):
        return
    read[mro[0], "__mro__"] = mro[0].__mro__
    named = ((base, name) for base in mro for name, found in vars(base).items() if isfunction(found))
    for name in {name for base, name in named if _is_special(name) and _is_users(base, name)}:
        _guard_definition(mro, name)


def _is_special(name: str) -> bool:
    return name == "forward" or (name.startswith("__") and name not in ("__init__", "__new__"))


def _special_names(home: Mapping[str, Any]) -> frozenset[str]:
    """Return the special methods of a class: a forward may ask for one by an operator, as `len()` or `==`."""
    return frozenset(filter(_is_special, home))


def classes_of(held: Any) -> tuple[type, ...]:
    """Return the classes that attribute lookup on an object or a class searches, in order."""
    return (*held.__mro__, *type(held).__mro__) if isinstance(held, type) else type(held).__mro__


def _is_users(base: type, name: str) -> bool:
    """Return True if users may redefine `name`: never on Python's classes, only `forward` on PyTorch's."""
    package = base.__module__.partition(".")[0]
    return package not in sys.stdlib_module_names and (package != "torch" or name == "forward")


def _classes_read() -> dict[tuple[type, str], Any]:
    """Return the class attributes that the capture has read, and install their guard at the first call."""
    installed = TracingContext.get().guards_context.dynamo_guards
    read: dict[tuple[type, str], Any] | None = vars(installed).get("_te_transform_classes")
    if read is None:
        read = vars(installed)["_te_transform_classes"] = {}
        installed.add(GlobalStateSource().make_guard(functools.partial(_same_classes, read=read)))
    return read


def _same_classes(builder: Any, guard: Guard, read: dict[tuple[type, str], Any]) -> None:
    """Build the guard for class attributes after `read` is complete."""
    orders = [(base, found) for (base, name), found in read.items() if name == "__mro__"]
    names = [(vars(base), name, found) for (base, name), found in read.items() if name != "__mro__"]
    homes = {base: vars(base) for _, order in orders for base in order if _is_users(base, "__call__")}
    special = [(home, frozenset(home), _special_names(home)) for home in homes.values()]
    codes = [(found, found.__code__) for _, _, found in names if isfunction(found)]
    builder.guard_manager.root.add_lambda_guard(
        lambda _: (
            all(base.__mro__ is found for base, found in orders)
            and all(home.get(name, _MISSING) is found for home, name, found in names)
            and all(found.__code__ is code for found, code in codes)
            and all(home.keys() == names or _special_names(home) == held for home, names, held in special)
        ),
        guards.get_verbose_code_parts(
            [f"classes define the same {sorted({name for _, name, _ in names})}"], guard
        ),
        guard.user_stack,
    )
