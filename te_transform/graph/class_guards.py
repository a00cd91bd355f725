"""A guard for class attributes that a capture reads: methods, properties and values without dynamo guards.

Each graph has one such guard, since all objects of a class share the class.
"""

from __future__ import annotations

import enum
import gc
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from inspect import isfunction
from types import FunctionType
from typing import Any

from torch._dynamo import variables
from torch._dynamo.variables import UserMethodVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.user_defined import UserDefinedClassVariable, UserDefinedObjectVariable
from torch._guards import Guard

from te_transform.graph.content import are_the_same, home_of, objects
from te_transform.graph.dynamo_patches import IS_2_13, Patch, around, call_after, call_before, leave_to_user
from te_transform.graph.lambda_guards import add_guard, notes_of_capture, while_unchanged

_MISSING = object()
# dynamo asks the base class, and folds the truth of classes and enums
_TRUE_BY_VALUE = (set, frozenset, OrderedDict, int, float, complex, str, bytes, type, enum.Enum)
_CODE_OF, _MRO_OF = operator.attrgetter("__code__"), operator.attrgetter("__mro__")
_DEFAULTS_OF, _KEYWORDS_OF = operator.attrgetter("__defaults__"), operator.attrgetter("__kwdefaults__")


def class_patches() -> Iterator[Patch]:
    """Yield the dynamo methods that read a class or construct its objects, with their wrappers."""
    for tracker in (UserDefinedClassVariable, UserDefinedObjectVariable):
        yield tracker, "__init__", call_after(_guard_special_methods)
        yield tracker, "__init__", call_after(_check_truth)
    if not IS_2_13:
        yield variables.EnumVariable, "__init__", call_after(_check_truth)
    yield UserDefinedClassVariable, "call_function", call_before(_check_construction)
    if not IS_2_13:
        yield UserDefinedObjectVariable, "var_getattr", around(_truth_by_length)


def has_users_class(variable: VariableTracker) -> bool:
    """Return True if a guard can reach the class; False for graph classes that dynamo generates."""
    return variable.source is not None or getattr(variable, "cls_source", None) is not None


def guard_class_attribute(value: Any, name: str) -> None:
    """Guard that the class of `value` keeps its current method, property or value under `name`."""
    if isinstance(value, type) or name not in getattr(value, "__dict__", ()):
        _guard_definition(classes_of(value), name)


def _check_construction(variable: Any, *_: Any, **__: Any) -> None:
    """Leave a class whose metaclass defines `__call__`, such as a singleton, to the user's own code.

    Dynamo constructs objects without calling the metaclass's method.
    """
    kind = variable.value
    metaclass = type(kind)
    call = next(vars(base)["__call__"] for base in metaclass.__mro__ if "__call__" in vars(base))
    if isfunction(call) and not issubclass(metaclass, enum.EnumMeta):
        leave_to_user(f"dynamo does not call the __call__ that the metaclass of {kind.__name__} defines")


def _check_truth(_: Any, value: Any, *__: Any, **___: Any) -> None:
    """Leave a set, a constant, an enum or a class whose class defines `__bool__` to the user's own code.

    Dynamo does not call the method.
    """
    method = getattr(type(value), "__bool__", None)
    if isinstance(value, _TRUE_BY_VALUE) and isfunction(method) and method.__module__ != "enum":
        leave_to_user(f"dynamo does not call the __bool__ that {type(value).__name__} defines")


def _truth_by_length(own: Callable[..., Any], self: Any, tx: Any, name: str) -> Any:
    """Look up the truth of an object by its length, where a class of Python's library defines `__len__`.

    PyTorch 2.11 takes an empty list, dict or str of a derived class for true.
    """
    kind = type(self.value)
    length = getattr(kind, "__len__", None)
    if name == "__bool__" and length and not isfunction(length) and not hasattr(kind, name):
        return UserMethodVariable(_is_not_empty, self)
    return own(self, tx, name)


def _is_not_empty(items: Any) -> bool:
    return len(items) > 0


def _guard_definition(mro: tuple[type, ...], name: str) -> None:
    home = next((home for home, base in enumerate(mro) if name in vars(base)), None)
    if home is None or not _is_users(mro[home], name):
        return  # an attribute of the object, such as a parameter
    read = _attributes_read()
    read.update({(base, name): _MISSING for base in mro[:home]})
    if hasattr(type(definition := vars(mro[home])[name]), "__get__"):  # dynamo guards values itself
        read[mro[home], name] = definition


def guard_missing_name(value: Any, name: str) -> bool:
    """Guard that no class of `value` defines `name`. Return False if a class defines it."""
    mro = classes_of(value)
    if any(name in vars(base) for base in mro):
        return False
    read = _attributes_read()
    read[mro[0], "__mro__"] = mro[0].__mro__
    read.update({(base, name): _MISSING for base in mro if base.__module__ != "builtins"})
    return True


def _guard_special_methods(variable: Any, value: Any, *_: Any, **__: Any) -> None:
    """Guard the methods that Python and nn.Module look up implicitly: `__len__`, `__call__`, `forward`."""
    if not has_users_class(variable):
        return
    read, mro = _attributes_read(), classes_of(value)
    if (mro[0], "__mro__") in read or not _is_users(mro[0], "forward"):
        return
    read[mro[0], "__mro__"] = mro[0].__mro__
    named = ((base, name) for base in mro for name, attribute in vars(base).items() if isfunction(attribute))
    for name in {name for base, name in named if _is_special(name) and _is_users(base, name)}:
        _guard_definition(mro, name)


def _is_special(name: str) -> bool:
    return name == "forward" or (name.startswith("__") and name not in ("__init__", "__new__"))


def _special_names(base: type) -> frozenset[str]:
    """Return the special methods of a class: a forward may ask for one by an operator, as `len()` or `==`."""
    return frozenset(filter(_is_special, vars(base)))


def classes_of(value: Any) -> tuple[type, ...]:
    """Return the classes that attribute lookup on an object or a class searches, in order."""
    return (*value.__mro__, *type(value).__mro__) if isinstance(value, type) else type(value).__mro__


def _is_users(base: type, name: str) -> bool:
    """Return True if users may redefine `name`: never on Python's classes, only `forward` on PyTorch's."""
    package = home_of(base).partition(".")[0]
    return package not in sys.stdlib_module_names and (package != "torch" or name == "forward")


class _Read(dict[tuple[type, str], Any]):
    """The attributes of classes that a capture has read, with their values; _MISSING if there is none."""


def _attributes_read() -> _Read:
    return notes_of_capture(_Read, _same_classes)


def _same_classes(builder: Any, guard: Guard, notes: _Read) -> None:
    """Build the guard for class attributes after all were read.

    Built-in functions loop over classes and functions, because each call runs the guard.
    """
    orders = {base: order for (base, name), order in notes.items() if name == "__mro__"}
    attributes = {key: attribute for key, attribute in notes.items() if key[1] != "__mro__"}
    bases, mros = list(orders), list(orders.values())
    define_the_same = _same_attributes(attributes, {base for mro in mros for base in mro})
    have_same_code = _same_functions(list(filter(isfunction, attributes.values())))

    def are_same(_: Any) -> bool:
        return list(map(_MRO_OF, bases)) == mros and define_the_same() and have_same_code()

    code_part = f"classes define the same {sorted({name for _, name in attributes})}"
    add_guard(builder.guard_manager.root, guard, are_same, code_part)


def _same_attributes(read: dict[tuple[type, str], Any], bases: set[type]) -> Callable[[], bool]:
    """Return a function that is True while classes define these attributes, and no new special methods."""
    special = {base: _special_names(base) for base in bases if _is_users(base, "__call__")}
    # vars() of a class is a proxy, whose only referent is the dict of the class
    dicts = gc.get_referents(*map(vars, {base: None for base, _ in read} | special))

    def define_the_same() -> bool:
        if any(vars(base).get(name, _MISSING) is not attribute for (base, name), attribute in read.items()):
            return False
        return all(_special_names(base) == names for base, names in special.items())

    return while_unchanged(dicts, define_the_same)


def _same_functions(functions: list[FunctionType]) -> Callable[[], bool]:
    """Return a function that is True while these functions have the same code and default arguments."""
    codes, defaults = list(map(_CODE_OF, functions)), list(map(_DEFAULTS_OF, functions))
    without_keywords = [function for function in functions if not function.__kwdefaults__]
    keywords = [(of, objects(of.__kwdefaults__)) for of in functions if of.__kwdefaults__]

    def are_same() -> bool:
        if list(map(_CODE_OF, functions)) != codes or any(map(_KEYWORDS_OF, without_keywords)):
            return False
        return all(map(operator.is_, map(_DEFAULTS_OF, functions), defaults)) and all(
            are_the_same(objects(of.__kwdefaults__ or {}), known) for of, known in keywords
        )

    return are_same
