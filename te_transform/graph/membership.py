"""Answers of `in` that dynamo folds to False, and keys that dynamo does not find.

In lists, tuples and sizes, dynamo compares a constant with constant items only. A size that may vary, a
tensor, a numpy scalar or an object with its own `__eq__` may equal the constant too. Among keys of dicts and
items of sets, dynamo compares objects by identity. All of these are compared as by `==`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from inspect import isfunction
from typing import Any

from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import specialize_symnode
from torch._dynamo.variables import (
    BaseListVariable,
    BuiltinVariable,
    ConstantVariable,
    SymNodeVariable,
    TensorVariable,
    lists,
)
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.user_defined import (
    FrozenDataClassVariable,
    UserDefinedObjectVariable,
    UserDefinedTupleVariable,
)

from te_transform.graph.class_operators import users_value
from te_transform.graph.dynamo_patches import IS_2_13, Patch, around, leave_to_user


def key_patches() -> Iterator[Patch]:
    """Yield the dynamo functions that search items, and hash and compare keys, with their wrappers."""
    yield lists, "iter_contains", around(_compare_all_items)
    for tracker in (UserDefinedObjectVariable, UserDefinedTupleVariable):
        yield tracker, "is_python_equal", around(_equal_keys)
    # Dynamo's own methods for frozen dataclasses read all fields, whatever __eq__() and __hash__() read.
    for name in ("is_python_equal", "hash_impl" if IS_2_13 else "is_python_hashable"):
        yield FrozenDataClassVariable, name, around(_of_objects)


def _of_objects(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return getattr(UserDefinedObjectVariable, own.__name__)(*args, **kwargs)


def _equal_keys(own: Callable[..., bool], self: Any, other: VariableTracker) -> bool:
    """Compare keys also by an `__eq__` of Python code, which dynamo's is_python_equal() does not call."""
    is_same = own(self, other)
    if is_same or not isfunction(type(self.value).__eq__):
        return is_same
    equal = _equals(InstructionTranslator.current_tx(), self, other)
    return bool(specialize_symnode(equal).as_python_constant())


def _compare_all_items(
    own: Callable[..., Any], items: Iterable[Any], search: VariableTracker, tx: Any, *rest: Any, **named: Any
) -> Any:
    """Compare also items that are no constants, which dynamo's iter_contains() leaves out."""
    items = [item.realize() for item in items]
    is_contained = own(items, search, tx, *rest, **named)
    if not search.is_python_constant() or is_contained.as_python_constant():
        return is_contained
    for item in items:
        if _is_compared_by_code(item, search) or _may_equal(item, search.as_python_constant()):
            is_contained = _or(tx, is_contained, _equals(tx, item, search))
    return is_contained


def _is_compared_by_code(*compared: VariableTracker) -> bool:
    """Return True if the class of one of them, such as an enum, defines `__eq__` in Python."""
    return any(isfunction(type(users_value(variable)).__eq__) for variable in compared)


def _may_equal(item: VariableTracker, constant: Any) -> bool:
    """Return True if an item that is no constant may equal this constant."""
    if item.is_python_constant():
        return False
    if isinstance(item, TensorVariable):  # numpy's arrays and scalars too
        return isinstance(constant, (bool, int, float, complex))
    if isinstance(item, UserDefinedObjectVariable):
        return type(item.value).__eq__ is not object.__eq__
    return isinstance(item, (SymNodeVariable, BaseListVariable))


def _equals(tx: Any, item: VariableTracker, search: VariableTracker) -> VariableTracker:
    """Return the answer of `item == search`, a constant or a symbol."""
    if not isinstance(item, TensorVariable):
        equal = _traced_answer(operator.eq, tx, item, search)
        if isinstance(equal, (ConstantVariable, SymNodeVariable)):
            return equal
    leave_to_user("`in` compares a number with a tensor, a numpy number or an object of a class with __eq__")


def _or(tx: Any, one: VariableTracker, other: VariableTracker) -> VariableTracker:
    """Return `one or other` for two answers of `==`."""
    for answer, rest in ((one, other), (other, one)):
        if answer.is_python_constant():
            return ConstantVariable.create(True) if answer.as_python_constant() else rest
    return _traced_answer(operator.or_, tx, one, other)


def _traced_answer(operation: Callable[..., Any], tx: Any, *operands: VariableTracker) -> VariableTracker:
    trace = BuiltinVariable(operation).call_function
    return trace(tx, operands, {})
