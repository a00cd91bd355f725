"""Operators that Python code of a class defines, and that dynamo folds without a guard.

Dynamo computes `Registry["gelu"]`, `len(Registry)` or `One | Other` while it traces, if a metaclass defines
them. For the text of a str or the number of an int with a class of its own, dynamo asks the base class.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Iterable, Iterator
from inspect import getattr_static, isfunction
from typing import Any, TypeGuard

from torch._dynamo import variables
from torch._dynamo.variables import BaseListVariable, BuiltinVariable, LazyVariableTracker
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.user_defined import UserDefinedVariable

from te_transform.graph.dynamo_patches import IS_2_13, Patch, call_before, leave_to_user

_HAVE_VALUES = UserDefinedVariable if IS_2_13 else (UserDefinedVariable, variables.EnumVariable)
_TEXT_METHODS = frozenset(("__str__", "__repr__", "__format__"))
_MAKE_TEXT = (str, repr, format, str.format, operator.mod)
_BINARY = frozenset(name for name in vars(operator) if name.startswith("__")) - {"__call__", "__not__"}
_CONVERSIONS = frozenset((
    "__bool__", "__complex__", "__divmod__", "__float__", "__hash__", "__int__", "__iter__", "__len__",
    "__next__", "__rdivmod__", "__reversed__", "__round__",
))  # fmt: skip
_OPERATORS = _BINARY | _CONVERSIONS | frozenset(f"__r{name[2:]}" for name in _BINARY)
_BUILT_IN = (int, float, complex, str, bytes, set, frozenset, dict, list, tuple)  # dynamo asks the base class
# functions that call no operator of a class
_ASK_CLASSES = (
    isinstance, issubclass, type, getattr, hasattr, setattr, delattr, callable, id, super, operator.is_,
    operator.is_not,
)  # fmt: skip


def operator_patches() -> Iterator[Patch]:
    """Yield the dynamo method that calls built-in functions, with its wrapper."""
    yield BuiltinVariable, "call_function", call_before(_check_classes)


def operands(args: Iterable[VariableTracker]) -> Iterator[tuple[VariableTracker, Any]]:
    """Yield the arguments of a function, and the items of lists and tuples among them, with their values.

    The value of a variable that dynamo has wrapped is None if it is no class and no object of a user's class.
    """
    for each in args:
        yield each, users_value(each)
        if not is_unwrapped(each) and isinstance(each, BaseListVariable):
            yield from ((item, users_value(item)) for item in each.items)


def users_value(variable: VariableTracker) -> Any:
    """Return the value of a variable that dynamo has not wrapped yet, and leave it so.

    Of other variables, return the class, or the object of a user's class, or None if it is neither.
    """
    if is_unwrapped(variable):
        return variable.original_value()
    return variable.value if isinstance(variable, _HAVE_VALUES) else None


def is_unwrapped(variable: VariableTracker) -> TypeGuard[LazyVariableTracker]:
    """Return True if dynamo has not wrapped a value yet. isinstance() with another class would wrap it."""
    return isinstance(variable, LazyVariableTracker) and not variable.is_realized()


def makes_text(function: Any) -> bool:
    """Return True if a built-in function calls `__str__`, `__repr__` or `__format__` of its arguments."""
    return any(function is each for each in _MAKE_TEXT)


def defines_text(kind: type) -> bool:
    """Return True if Python code of the user makes the texts of the objects of a class."""
    return _defines(kind, _TEXT_METHODS)


def _check_classes(self: BuiltinVariable, _: Any, args: list[VariableTracker], __: Any) -> None:
    """Leave operators that Python code defines for a class to the user's own code."""
    function = self.fn
    if any(function is each for each in _ASK_CLASSES):
        return
    for _, value in operands(args):
        if _is_folded(function, value):
            name = (value if isinstance(value, type) else type(value)).__name__
            leave_to_user(f"dynamo does not trace operators that Python code defines for {name}")


def _is_folded(function: Any, value: Any) -> bool:
    """Return True if Python code defines a method that dynamo does not call for an operand."""
    texts = _TEXT_METHODS if makes_text(function) else frozenset[str]()
    if isinstance(value, type):
        is_item = function is operator.getitem and _defines_items(value)
        return is_item or _defines(type(value), texts or _OPERATORS)
    if isinstance(value, enum.Enum):  # the texts have guards; PyTorch 2.11 folds operators too
        return not IS_2_13 and _defines(type(value), _OPERATORS)
    numbers = (f"__{function.__name__}__",) if function in (int, float, complex) else ()
    return isinstance(value, _BUILT_IN) and _defines(type(value), texts or numbers)


def _defines(kind: type, names: Iterable[str]) -> bool:
    """Return True if Python code outside of the enum module defines one of these methods of a class."""
    methods = (getattr(kind, name, None) for name in names)
    return any(isfunction(method) and method.__module__ != "enum" for method in methods)


def _defines_items(kind: type) -> bool:
    """Return True if code of the user defines `__class_getitem__` of a class."""
    home = next((base for base in kind.__mro__ if "__class_getitem__" in vars(base)), None)
    if home is None or home.__module__.partition(".")[0] in ("typing", "torch"):
        return False
    return isfunction(getattr(getattr_static(home, "__class_getitem__"), "__func__", None))
