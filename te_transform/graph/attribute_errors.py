"""Exceptions that dynamo raises for another reason or with another text than Python, or does not raise."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from inspect import getattr_static
from typing import Any, NoReturn

from torch._dynamo import variables
from torch._dynamo.exc import raise_observed_exception
from torch._dynamo.variables import BuiltinVariable, ConstantVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.misc import ExceptionVariable, GetAttrVariable

from te_transform.graph.class_operators import is_unwrapped, makes_text, operands
from te_transform.graph.dynamo_patches import IS_2_13, Patch, around, call_before, leave_to_user

_NOWHERE = object()
_KNOWN_CONTAINERS = (list, dict, tuple, set, frozenset, collections.deque, range)


def attribute_patches() -> Iterator[Patch]:
    """Yield the dynamo methods that look attributes up and read exceptions, with their wrappers."""
    yield BuiltinVariable, "call_function", call_before(_leave_text)
    yield BuiltinVariable, "call_function", call_before(_check_deleted)
    lookup = variables.GetAttrBuiltinVariable if IS_2_13 else BuiltinVariable
    yield lookup, "call_function", around(_raise_if_missing)
    yield ExceptionVariable, "var_getattr", call_before(_leave_arguments)


def check_method(variable: VariableTracker, name: str) -> None:
    """Leave a method that dynamo does not find, although the object has it, to the user's own code."""
    kind = _type_of(variable)
    if kind is not None and callable(getattr_static(kind, name, None)):
        leave_to_user(f"dynamo does not find {name} of {kind.__name__}")


def _leave_text(self: BuiltinVariable, _: Any, args: list[VariableTracker], __: Any) -> None:
    if not makes_text(self.fn):
        return
    if any(not is_unwrapped(each) and isinstance(each, ExceptionVariable) for each, _ in operands(args)):
        leave_to_user("it reads the text of an exception, and dynamo's texts differ from Python's")


def _leave_arguments(_: ExceptionVariable, __: Any, name: str) -> None:
    if name == "args":
        leave_to_user("it reads the arguments of an exception, and dynamo's differ from Python's")


def _check_deleted(self: BuiltinVariable, tx: Any, args: list[VariableTracker], _: Any) -> None:
    """Raise if an object lacks the attribute that the forward deletes, where dynamo deletes nothing."""
    if self.fn is not delattr or len(args) != 2:
        return
    trace = VariableTracker.build(tx, hasattr).call_function
    is_there = trace(tx, args, {})
    if is_there.is_python_constant() and not is_there.as_python_constant():
        _raise_missing(tx, *args)


def _raise_if_missing(
    own: Callable[..., Any], self: Any, tx: Any, args: list[VariableTracker], kwargs: Any
) -> Any:
    """Raise if a built-in container lacks an attribute; dynamo raises once the value is used."""
    out = own(self, tx, args, kwargs)
    is_lookup = len(args) == 2 and (IS_2_13 or self.fn is getattr)
    if not is_lookup or is_unwrapped(out) or not isinstance(out, GetAttrVariable):
        return out
    owner, name = (given.realize() for given in args)
    if _lacks(_type_of(owner), name.as_python_constant()):
        _raise_missing(tx, owner, name)
    return out


def _lacks(kind: type | None, name: str) -> bool:
    """Return True if an object of a built-in container has no attribute of this name."""
    return kind in _KNOWN_CONTAINERS and getattr_static(kind, name, _NOWHERE) is _NOWHERE


def _raise_missing(tx: Any, owner: VariableTracker, name: VariableTracker) -> NoReturn:
    text = f"{owner.python_type_name()!r} object has no attribute {name.as_python_constant()!r}"
    raise_observed_exception(AttributeError, tx, args=[ConstantVariable.create(text)])


def _type_of(variable: VariableTracker) -> type | None:
    try:
        return variable.python_type()
    except NotImplementedError:
        return None
