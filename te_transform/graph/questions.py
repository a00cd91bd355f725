"""Guards that dynamo omits.

A forward asks questions whose answers dynamo folds into the graph without a guard:

- Does a missing key or attribute exist?
- What does a class define under a name?
- Which names does an object hold?
- What is the state of the process?
- Are two objects the same?
- Of which type is a number that equals another, and which sign does a zero have?

During a capture, `guard_questions` patches dynamo's variable trackers to add one guard per question. A call
with a different answer recompiles.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import inspect
import random
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from types import MemberDescriptorType, ModuleType
from typing import Any, get_args

import torch
from torch import nn
from torch._dynamo import guards, variables
from torch._dynamo.exc import ObservedAttributeError, ObservedKeyError
from torch._dynamo.source import AttrSource, GlobalStateSource, SkipGuardSource, is_from_skip_guard_source
from torch._dynamo.variables import (
    BuiltinVariable,
    ConstantVariable,
    DefaultDictVariable,
    SetVariable,
    TensorVariable,
    builder,
    dicts,
    functions,
    lists,
    misc,
)
from torch._dynamo.variables import torch as torch_functions
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.user_defined import (
    UserDefinedClassVariable,
    UserDefinedObjectVariable,
    UserDefinedVariable,
)
from torch._guards import Guard, Source, TracingContext

from te_transform.graph.attribute_errors import attribute_patches, check_method
from te_transform.graph.built_guards import built_patches
from te_transform.graph.class_guards import (
    class_patches,
    classes_of,
    guard_class_attribute,
    guard_missing_name,
    has_users_class,
)
from te_transform.graph.class_operators import defines_text, makes_text, operands, operator_patches
from te_transform.graph.dynamo_patches import (
    IS_2_13,
    Patch,
    around,
    call_after,
    call_before,
    leave_to_user,
    patched,
)
from te_transform.graph.function_names import name_patches
from te_transform.graph.identity_guards import COMPARED_BY_VALUE, identity_patches
from te_transform.graph.lambda_guards import add_guard, description, guard_at_root
from te_transform.graph.long_containers import container_patches
from te_transform.graph.lost_writes import write_patches
from te_transform.graph.membership import key_patches
from te_transform.graph.numpy_numbers import numpy_patches
from te_transform.graph.tensor_hooks import hook_patches

_OF_AUTOGRAD = ("_backward_hooks", "_base", "_post_accumulate_grad_hooks", "output_nr", "retains_grad")
Ask = Callable[..., Hashable]  # asks an object a question; answers are compared with ==

# Dynamo folds calls of these functions too. Their answers depend only on the arguments or the hardware.
_CONSTANT = {
    torch._assert,
    torch._utils._get_device_index,
    torch.cuda.get_device_properties,
    torch.distributed.is_available,
    torch.is_complex,
    torch.is_floating_point,
    torch.nn.functional._Reduction.get_enum,
    torch.promote_types,
    torch.xpu.get_device_properties,
}


@contextmanager
def guard_questions() -> Iterator[None]:
    """Add a guard for every question that dynamo folds while it traces in this context."""
    if IS_2_13:
        variables.object_protocol._get_cached_slots.cache_clear()  # classes may have other methods by now
    with patched(_patches()):
        yield


def _guard(variable: VariableTracker, ask: Ask, **known: Any) -> None:
    """Guard the answer of `ask` for the object behind `variable`, if the variable has a source."""
    if variable.source is not None:
        _install(variable.source, ask, **known)


def _guard_process(
    function: Callable[..., Any], arguments: tuple[Any, ...] = (), named: tuple[tuple[str, Any], ...] = ()
) -> None:
    _install(GlobalStateSource(), _process_says, function=function, arguments=arguments, named=named)


def _install(source: Source, ask: Ask, **known: Any) -> None:
    """Add a guard, once for each question; `known` are further arguments of `ask`.

    Dynamo's install_guard() omits guards on objects in modules of Python's standard library, such as
    os.environ. This function adds these guards as well.
    """
    source = _without_skips(source)
    installed = TracingContext.get().guards_context.dynamo_guards
    asked = vars(installed).setdefault("_te_transform_asked", set())
    question = source.name, ask, *((type(value), value) for value in known.values())
    if question not in asked:
        asked.add(question)
        installed.add(source.make_guard(functools.partial(_same_answer, ask=functools.partial(ask, **known))))


def _without_skips(source: Source) -> Source:
    """Return the source without SkipGuardSource, which no guard can be built on."""
    if isinstance(source, SkipGuardSource):
        return _without_skips(source.base)
    if is_from_skip_guard_source(source):
        return dataclasses.replace(source, base=_without_skips(source.base))
    return source


def _same_answer(builder: Any, guard: Guard, ask: functools.partial[Hashable]) -> None:
    """Build the guard for the current answer, before the call changes any state.

    Dynamo's own guards for missing keys are faster. The manager of a dict whose order of keys is guarded
    takes no other guard. The root takes it there.
    """
    value = builder.get(guard) if guard.name else None  # a question about the process has no object
    if _guard_missing_key(builder, guard, value, ask):
        return
    manager, question = builder.get_guard_manager(guard), _question(ask, guard.name)
    if isinstance(manager, guards.DictGuardManager):
        guard_at_root(builder, guard, guard.name, ask, question)
        return
    answer = ask(value)
    add_guard(manager, guard, lambda value: ask(value) == answer, description(question, answer))


def _guard_missing_key(builder: Any, guard: Guard, value: Any, ask: functools.partial[Hashable]) -> bool:
    """Build dynamo's guard for a key that a dict lacks. Return False if the question is another one."""
    home = _own_dict(value) if ask.func is _holds_name else value if ask.func is _holds_key else None
    if type(home) is not dict or (key := ask.keywords["key"]) in home:
        return False
    if ask.func is _holds_name:
        builder.NOT_PRESENT_IN_GENERIC_DICT(guard, attr=key)
        return True
    code_parts = guards.get_verbose_code_parts(f"not ___dict_contains({key!r}, {guard.name})", guard)
    builder.get_guard_manager(guard).add_dict_contains_guard(False, key, code_parts, guard.user_stack)
    return True


def _question(ask: functools.partial[Hashable], name: str) -> str:
    values = filter(None, (name, *map(repr, ask.keywords.values())))
    return f"{ask.func.__name__.lstrip('_')}({', '.join(values)})"


# The questions


def _has_attribute(value: Any, key: str) -> bool:
    """Return True if attribute lookup finds `key` on an object; do not run user code except of a module."""
    if isinstance(value, ModuleType):  # a module may define __getattr__
        return hasattr(value, key)
    if any(key in home for home in _dicts_of(value).values()):
        return True
    mro = classes_of(value)
    attribute = next((vars(base)[key] for base in mro if key in vars(base)), None)
    if not isinstance(attribute, MemberDescriptorType):
        return any(key in vars(base) for base in mro)
    try:  # a slot may be empty
        attribute.__get__(value)
    except AttributeError:
        return False
    return True


def _dicts_of(value: Any) -> dict[str, Mapping[str, Any]]:
    """Return the dicts of an object that attribute lookup reads, by name."""
    own = _own_dict(value)
    homes = ("_parameters", "_buffers", "_modules") if isinstance(value, nn.Module) else ()
    return {"__dict__": own} | {home: own[home] for home in homes if own.get(home) is not None}


def _own_dict(value: Any) -> Mapping[str, Any]:
    """Return the `__dict__` of an object, or an empty one; do not run user code."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}


def _holds_name(value: Any, key: str) -> bool:
    return key in _own_dict(value)


def _names_held(value: Any) -> Hashable:
    return tuple(vars(value))


def _holds_key(container: Any, key: Any) -> bool:
    return key in container


def _value_of_key(container: Any, key: Any) -> Hashable:
    return container.get(key)


def _is_instance(value: Any, classes: Any) -> bool:
    return isinstance(value, classes)


def _value_of_attribute(value: Any, key: str) -> Hashable:
    return getattr(value, key)


def _texts_of(value: Any) -> Hashable:
    return str(value), repr(value), format(value)


def _random_state(generator: random.Random) -> Hashable:
    return generator.getstate()


def _process_says(
    _: Any, function: Callable[..., Any], arguments: tuple[Any, ...], named: tuple[tuple[str, Any], ...]
) -> Hashable:
    try:
        return function(*arguments, **dict(named))
    except Exception as error:
        return type(error)


def _keys_in_order(container: Any) -> Hashable:
    keys, types = tuple(container), tuple(map(type, container))
    is_plain = COMPARED_BY_VALUE.issuperset(types)
    return keys if is_plain else tuple(map(hash, keys)), types


# The patches of dynamo's trackers


def _patches() -> Iterator[Patch]:
    """Yield the dynamo methods that answer questions, with their wrappers."""
    for tracker in _subclasses(VariableTracker):
        for name in ("var_getattr", "generic_getattr"):
            if name in vars(tracker):
                yield tracker, name, around(_attribute_lookup)
        for name in ("getitem_const_raise_exception_if_absent", "_missing_impl"):
            if name in vars(tracker):
                yield tracker, name, around(_item_lookup)
    of_all = "as_python_constant", "repr_impl", "tp_iter_impl", "unpack_var_sequence"
    of_all += () if IS_2_13 else ("debug_repr",)
    for tracker in (*_subclasses(dicts.ConstDictVariable), *_subclasses(SetVariable)):
        for name in of_all:
            if name in vars(tracker):
                yield tracker, name, call_after(_guard_all_items)
    yield dicts.ConstDictVariable, "install_dict_keys_match_guard", call_before(_guard_order)
    yield dicts.ConstDictVariable, "install_dict_contains_guard", call_before(_guard_made_key)
    yield lists.CommonListMethodsVariable, "call_method", call_before(_guard_list_method)
    yield builder.VariableBuilder, "_wrap", around(_length_limit)
    for tracker in (misc.PythonModuleVariable, *_subclasses(functions.BaseUserFunctionVariable)):
        if "call_obj_hasattr" in vars(tracker):
            yield tracker, "call_obj_hasattr", call_before(_guard_hasattr)
    yield functions.UserMethodVariable, "call_function", call_before(_guard_getattr_method)
    yield torch_functions.TorchInGraphFunctionVariable, "call_function", call_before(_guard_folded_function)
    yield torch_functions.TorchInGraphFunctionVariable, "call_function", around(_without_transform)
    yield functions.PolyfilledFunctionVariable, "call_function", call_before(_guard_polyfill)
    yield misc.RandomVariable, "call_method", call_before(_guard_random_state)
    yield BuiltinVariable, "call_function", around(_asked_of_classes)
    yield BuiltinVariable, "call_function", call_before(_guard_texts)
    yield UserDefinedClassVariable, "call_function", call_before(_guard_enum_lookup)
    for patches in (
        class_patches, identity_patches, name_patches, numpy_patches, write_patches, key_patches,
        built_patches, hook_patches, container_patches, operator_patches, attribute_patches,
    ):  # fmt: skip
        yield from patches()
    if IS_2_13:
        yield dicts.DunderDictVariable, "install_dict_contains_guard", around(_name_in_dict)
        yield dicts.DunderDictVariable, "install_dict_keys_match_guard", around(_names_in_dict)
    else:
        yield BuiltinVariable, "call_function", call_before(_guard_function_name)
        yield misc.GetAttrVariable, "call_method", call_before(_guard_dict_method)
        yield DefaultDictVariable, "call_method", call_before(_guard_default_dict)


def _subclasses(tracker: type) -> Iterator[type]:
    yield tracker
    for derived in tracker.__subclasses__():
        yield from _subclasses(derived)


def _attribute_lookup(own: Callable[..., Any], self: VariableTracker, tx: Any, name: str) -> Any:
    try:
        attribute = own(self, tx, name)
    except ObservedAttributeError:
        _guard_attribute(self, name)
        check_method(self, name)
        raise
    if isinstance(self, UserDefinedVariable) and has_users_class(self):
        guard_class_attribute(self.value, name)
    if isinstance(self, TensorVariable) and self.source is not None:
        _guard_autograd(self, name)
    if isinstance(self, UserDefinedClassVariable) and self.source:
        attribute = _value_of_metaclass(self, tx, name, attribute)
        if not IS_2_13:
            _guard_class_constant(AttrSource(self.source, name), attribute)
    return attribute


def _value_of_metaclass(self: Any, tx: Any, name: str, attribute: VariableTracker) -> VariableTracker:
    """Return a value that a metaclass holds with a guard, which dynamo omits for values found there."""
    if isinstance(attribute, misc.GetAttrVariable) and not any(
        name in vars(base) for base in self.value.__mro__
    ):
        value = inspect.getattr_static(type(self.value), name, attribute)
        if value is not attribute and not hasattr(type(value), "__get__"):
            return VariableTracker.build(tx, value, AttrSource(self.source, name))
    return attribute


def _guard_autograd(self: TensorVariable, name: str) -> None:
    """Guard if autograd made a tensor. Leave what dynamo's copies of tensors lack to the user's own code."""
    if name in ("is_leaf", "grad_fn"):
        _guard(self, _value_of_attribute, key="is_leaf")
    elif name in _OF_AUTOGRAD:
        leave_to_user(f"it reads {name} of a tensor that it did not make, which dynamo does not copy")


def _guard_class_constant(source: Source, constant: VariableTracker) -> None:
    """Guard a number, a string or an enum that a class holds; PyTorch 2.11 folds them without a guard."""
    if constant.source is not None or not constant.is_python_constant():
        return
    if isinstance(constant.as_python_constant(), enum.Enum):
        guards.install_guard(source.make_guard(guards.GuardBuilder.ID_MATCH))
    elif isinstance(constant, ConstantVariable):
        guards.install_guard(source.make_guard(guards.GuardBuilder.CONSTANT_MATCH))


def _guard_hasattr(self: VariableTracker, _: Any, name: str) -> None:
    _guard_attribute(self, name)


def _guard_attribute(variable: VariableTracker, name: str) -> None:
    """Guard whether attribute lookup finds a name on the object behind `variable`.

    A name that is found nowhere is guarded in the classes, which objects share, and in the object's dicts.
    """
    source, value = variable.source, getattr(variable, "value", None)
    if source is None:
        return
    homes = _dicts_of(value)
    is_found = any(name in home for home in homes.values())
    if value is None or is_found or isinstance(value, ModuleType) or not guard_missing_name(value, name):
        _guard(variable, _has_attribute, key=name)
        return
    _guard(variable, _holds_name, key=name)
    for home in homes:
        if home != "__dict__":
            _install(AttrSource(source, home), _holds_key, key=name)


def _guard_getattr_method(self: Any, _: Any, args: Any, kwargs: Any) -> None:
    """Guard that normal lookup still does not find a name that a class's __getattr__ handles."""
    if self.fn.__name__ == "__getattr__" and len(args) == 1 and args[0].is_python_constant():
        _guard_attribute(self.obj, args[0].as_python_constant())


def _item_lookup(own: Callable[..., Any], self: Any, tx: Any, key: VariableTracker) -> Any:
    """Guard a missing key, and the value of a key in a standard library mapping such as os.environ."""
    try:
        item = own(self, tx, key)
    except ObservedKeyError:
        _guard_key(self, key, _holds_key)
        raise
    if self.source is not None and is_from_skip_guard_source(self.source) and item.is_python_constant():
        _guard_key(self, key, _value_of_key)
    return item


def _guard_all_items(self: Any, *_: Any) -> None:
    """Guard the keys of a dict or a set that dynamo reads as a whole, and their order."""
    _guard(self, _keys_in_order)


def _guard_order(self: Any) -> None:
    """Guard the order of an OrderedDict: move_to_end() does not change the order that dynamo guards."""
    if self.user_cls is collections.OrderedDict:
        _guard_all_items(self)


def _guard_list_method(self: Any, _: Any, name: str, args: list[VariableTracker], kwargs: Any) -> None:
    """Guard the keys of a dict or a set from which a list is made, as by list() and [*keys]."""
    if name == "extend" and args and isinstance(args[0], (dicts.ConstDictVariable, SetVariable)):
        _guard_all_items(args[0])


def _length_limit(own: Callable[..., Any], self: Any, value: Any) -> Any:
    """Give a deque its `maxlen`, which dynamo omits, and guard it."""
    tracker = own(self, value)
    if isinstance(tracker, lists.DequeVariable):
        tracker.maxlen = ConstantVariable.create(value.maxlen)
        _guard(tracker, _value_of_attribute, key="maxlen")
    return tracker


def _guard_default_dict(self: Any, _: Any, name: str, args: list[VariableTracker], kwargs: Any) -> None:
    if name == "__getitem__" and len(args) == 1 and args[0] not in self:
        _guard_key(self, args[0], _holds_key)


def _guard_key(container: Any, key: VariableTracker, ask: Ask) -> None:
    """Guard the answer for a key, or all keys of a dict if the key is not constant."""
    if key.is_python_constant():
        _guard(container, ask, key=key.as_python_constant())
    elif hasattr(container, "install_dict_keys_match_guard"):
        container.install_dict_keys_match_guard()


def _guard_made_key(self: Any, _: Any, args: list[VariableTracker]) -> None:
    """Guard all keys of a dict for a key that the forward makes, such as a tuple of a module and a number."""
    if args[0].source is None and not args[0].is_python_constant():
        self.install_dict_keys_match_guard()


def _guard_dict_method(self: Any, _: Any, name: str, args: list[VariableTracker], kwargs: Any) -> None:
    is_lookup = self.name == "__dict__" and name in ("get", "__getitem__", "__contains__")
    if is_lookup and args:
        _guard_key(self.obj, args[0], _holds_name)


def _name_in_dict(own: Callable[..., Any], self: Any, tx: Any, args: list[VariableTracker]) -> None:
    _guard_key(self.items.item, args[0], _holds_name)


def _names_in_dict(own: Callable[..., Any], self: Any) -> None:
    _guard(self.items.item, _names_held)


def _guard_folded_function(self: Any, _: Any, args: Any, kwargs: Any) -> None:
    is_folded = self.value in torch_functions.constant_fold_functions and self.value not in _CONSTANT
    if is_folded and all(given.is_python_constant() for given in (*args, *kwargs.values())):
        arguments = tuple(given.as_python_constant() for given in args)
        named = tuple((name, given.as_python_constant()) for name, given in kwargs.items())
        _guard_process(self.value, arguments, named)


def _without_transform(own: Callable[..., Any], self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Answer peek_interpreter_stack() outside of torch.func transforms, where dynamo makes an object of None.

    Dynamo guards the stack of transforms itself.
    """
    peek = torch._C._functorch.peek_interpreter_stack
    if self.value is peek and peek() is None:
        return ConstantVariable.create(None)
    return own(self, tx, args, kwargs)


def _guard_random_state(self: Any, *_: Any, **__: Any) -> None:
    """Guard the state of a generator: dynamo draws from the state at capture."""
    _guard(self, _random_state)


def _guard_polyfill(self: Any, tx: Any, args: Any, kwargs: Any) -> None:
    """Guard a folded function without arguments, such as sys.getrecursionlimit(), which reads the process."""
    # inspect.unwrap() reads the recursion limit, which PyTorch increases when inductor is imported
    by_inspect = tx.f_code.co_filename == inspect.__file__
    if self.can_constant_fold_through() and not args and not kwargs and not by_inspect:
        _guard_process(self.wrapped_fn)


def _guard_texts(self: Any, _: Any, args: list[VariableTracker], kwargs: Any) -> None:
    """Guard the text of an enum member if Python code computes it, because dynamo folds the text."""
    if makes_text(self.fn):
        for given, value in operands(args):
            if isinstance(value, enum.Enum) and defines_text(type(value)):
                _guard(given, _texts_of)


def _guard_enum_lookup(self: Any, _: Any, args: list[VariableTracker], kwargs: Any) -> None:
    """Guard the enum member that `_missing_` of a class returns, because dynamo folds the call."""
    kind = self.value
    if not isinstance(kind, enum.EnumMeta) or len(args) != 1 or kwargs or not args[0].is_python_constant():
        return
    value = args[0].as_python_constant()
    if inspect.isfunction(kind._missing_.__func__) and value not in kind._value2member_map_:
        _guard_process(kind, (value,))


def _guard_function_name(self: Any, _: Any, args: Any, kwargs: Any) -> None:
    """Guard `__name__` and `__module__` of a function, which PyTorch 2.11 folds."""
    if self.fn is getattr and isinstance(args[0], functions.UserFunctionVariable):
        for key in ("__name__", "__module__"):
            if args[1].is_constant_match(key):
                _guard(args[0], _value_of_attribute, key=key)


def _asked_of_classes(own: Callable[..., Any], self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Guard what a metaclass answers: a protocol asks for attributes, ABCs register classes.

    For isinstance(), dynamo asks issubclass(), and takes an error for False: the answer is Python's here.
    """
    if self.fn not in (isinstance, issubclass) or len(args) != 2 or kwargs:
        return own(self, tx, args, kwargs)
    subject, asked = (given.realize() for given in args)
    classes = asked.as_python_constant() if asked.is_python_constant() else ()
    if any(map(_answers_itself, _classes_in(classes))):
        if self.fn is issubclass and subject.is_python_constant():
            _guard_process(issubclass, (subject.as_python_constant(), classes))
        elif isinstance(subject, UserDefinedObjectVariable) and subject.source:
            _guard(subject, _is_instance, classes=classes)
            return ConstantVariable.create(_is_instance(subject.value, classes))
    return own(self, tx, args, kwargs)


def _classes_in(asked: Any) -> Iterator[Any]:
    """Yield the classes of nested tuples and unions."""
    if isinstance(asked, tuple):
        for each in asked:
            yield from _classes_in(each)
    else:
        yield from get_args(asked) or (asked,)


def _answers_itself(kind: Any) -> bool:
    """Return True if the metaclass of a class answers isinstance() or issubclass()."""
    asked = "__instancecheck__", "__subclasscheck__"
    return any(getattr(type(kind), name, None) is not getattr(type, name) for name in asked)
