"""Answers of `in` for lists, tuples and sizes, which dynamo folds to False for items that are no constants.

Dynamo compares a constant with constant items only. A size that may vary, a tensor, a numpy scalar or an
object with its own `__eq__` may equal the constant too. These items are compared as by `==`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

from torch._dynamo.variables import (
    BaseListVariable,
    BuiltinVariable,
    ConstantVariable,
    SymNodeVariable,
    TensorVariable,
)
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

from te_transform.graph.dynamo_patches import leave_to_user


def compare_all_items(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a form of dynamo's iter_contains() that also compares items that are no constants."""

    @functools.wraps(own)
    def contains(items: Iterable[Any], search: VariableTracker, tx: Any, *rest: Any, **named: Any) -> Any:
        items = [item.realize() for item in items]
        found = own(items, search, tx, *rest, **named)
        if not search.is_python_constant() or found.as_python_constant():
            return found
        for item in items:
            if _may_equal(item, search.as_python_constant()):
                found = _or(tx, found, _equals(tx, item, search))
        return found

    return contains


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
