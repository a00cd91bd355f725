"""Writes of a forward to Python objects, which dynamo loses or hides from later reads of the forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from torch._dynamo.bytecode_transformation import create_call_function
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import ConstantVariable, builder, dicts, user_defined
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import UserFunctionVariable, UserMethodVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable, UserDefinedObjectVariable

from te_transform.graph.class_guards import guard_class_attribute
from te_transform.graph.dynamo_patches import IS_2_13, Patch, around, call_after, call_before, leave_to_user


def write_patches() -> Iterator[Patch]:
    """Yield the dynamo methods that trace writes, with their wrappers."""
    yield SideEffects, "store_attr", call_before(_check_owner)
    yield builder.VariableBuilder, "_wrap", around(_lists_in_tuples)  # dynamo caches wrap_listlike()
    if IS_2_13:
        yield dicts.SideEffectsProxyDict, "__init__", call_after(_follow_writes)
        yield user_defined.OrderedDictVariable, "call_method", call_after(_write_order)
        yield UserFunctionVariable, "tp_descr_get_impl", around(_bound_as_written)
        yield UserMethodVariable, "reconstruct", around(_bind_again)
    else:
        yield dicts.ConstDictVariable, "call_method", call_after(_write_order)
        yield UserDefinedObjectVariable, "method_setattr_standard", around(_property_setter)
        yield UserDefinedClassVariable, "var_getattr", around(_lists_of_classes)
        yield user_defined.UserDefinedTupleVariable, "__init__", call_after(_keep_items)


def _check_owner(_: SideEffects, variable: VariableTracker, *__: Any) -> None:
    """Leave a write to an attribute of a class to the user's own code: dynamo hides it from objects."""
    if isinstance(variable, UserDefinedClassVariable):
        leave_to_user("it writes to an attribute of a class; hold the value in an object")


class _Writes:
    """The writes of a capture so far. Dynamo replaces their table where it traces a hook of a tensor."""

    def __init__(self, capture: Any):
        self._capture = capture

    def __getattr__(self, name: str) -> Any:
        return getattr(self._capture.side_effects, name)


def _follow_writes(self: Any, _: VariableTracker, tx: Any) -> None:
    """Point a `__dict__` at the current table of writes: dynamo loses later writes to an old one."""
    self.side_effects = _Writes(tx.output)


def _bound_as_written(
    own: Callable[..., Any], self: Any, tx: Any, held: VariableTracker, owner: VariableTracker
) -> Any:
    """Trace `function.__get__(held)`: dynamo looks the method up by the function's name, after the graph."""
    method = own(self, tx, held, owner)
    kind = type(getattr(held, "value", None))
    if inspect.getattr_static(kind, self.fn.__name__, None) is not self.fn:
        method.source = None
    return method


def _bind_again(own: Callable[..., Any], self: Any, codegen: Any) -> None:
    """Make a method without a source after the graph, from its function and its object."""
    if self.source_fn is None or type(self) is not UserMethodVariable:
        return own(self, codegen)
    codegen.add_push_null(lambda: codegen.load_import_from("types", "MethodType"))
    codegen(self.source_fn)
    codegen(self.obj)
    codegen.extend_output(create_call_function(2, False))


def _property_setter(
    own: Callable[..., Any],
    self: Any,
    tx: Any,
    name: VariableTracker,
    value: VariableTracker,
    directly_update_dict: bool = False,
) -> Any:
    """Trace the setter of a property, which PyTorch 2.11 calls after the graph."""
    key = name.as_python_constant() if name.is_python_constant() else ""
    attribute = inspect.getattr_static(type(self.value), key, None)
    if directly_update_dict or not (isinstance(attribute, property) and attribute.fset):
        return own(self, tx, name, value, directly_update_dict)
    guard_class_attribute(self.value, key)
    trace = VariableTracker.build(tx, attribute.fset).call_function
    return trace(tx, [self, value], {})


def _write_order(self: Any, _: Any, name: str, *__: Any, **___: Any) -> None:
    """Write a reordered OrderedDict back as a whole: dynamo writes only its new items."""
    if name == "move_to_end":
        getattr(self, "_base_vt", self).should_reconstruct_all = True


def _lists_in_tuples(own: Callable[..., Any], self: Any, value: Any) -> Any:
    """Trace a list or set in a tuple of a module as such: dynamo makes it a constant, and loses writes."""
    if not (type(value) is tuple and any(map(_is_changeable, value))):
        return own(self, value)
    with _as_variables():
        return own(self, value)


def _lists_of_classes(own: Callable[..., Any], self: Any, tx: Any, name: str) -> Any:
    """Trace a list or set of a class as such: PyTorch 2.11 makes it a constant, and loses writes."""
    if not _is_changeable(inspect.getattr_static(self.value, name, None)):
        return own(self, tx, name)
    with _as_variables():
        return own(self, tx, name)


def _keep_items(self: Any, *_: Any, **__: Any) -> None:
    """Make a tuple of the items that an iterator gave. PyTorch 2.11 would read the iterator once more."""
    if self.init_args:
        self.init_args = [self._tuple_vt]


def _as_variables() -> AbstractContextManager[Any]:
    """Return a context in which dynamo makes no constants of lists and sets."""
    return patch.object(ConstantVariable, "is_literal", lambda *_: False)


def _is_changeable(item: Any) -> bool:
    return type(item) in (list, set) or (type(item) is tuple and any(map(_is_changeable, item)))
