"""A snapshot of all state that a forward may change, for restoring it."""

from __future__ import annotations

import functools
import threading
import types
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from te_transform.graph.bits import same_bits, shape_in_bits
from te_transform.graph.content import LEADS, Attributes, Content, Items, Leads, Named, has_slots, home_of
from te_transform.graph.content_of_code import (
    Code,
    OfClass,
    OfFunction,
    OfModule,
    constructors_of,
    holds_values,
    is_of_a_user,
    users_function,
)
from te_transform.graph.content_of_library import Copied, Unsaved, copied, kind_of

# Names in code that may change gradients. Without them, gradients are not copied, to save memory.
_OF_GRADIENTS = frozenset(("grad", "backward", "zero_grad", "clip_grad_norm_", "clip_grad_value_"))
_LONGEST_PATH = 100
_OF_DYNAMO = "_dynamo"  # prefix of the tensor attributes that dynamo sets
_HOOKS_OF_TENSORS = "_backward_hooks", "_post_accumulate_grad_hooks"  # not in a tensor's __dict__
_Kind = Callable[[Any], Content | None]


class TensorContent(Named):
    """The attributes, hooks, memory and gradient of a tensor, and its values unless it is a parameter.

    Two copies of the parameters may not fit into memory, see preserve.py.
    """

    __slots__ = ("alias", "grad", "memory", "numbers", "requires_grad")

    def __init__(self, value: Tensor):
        super().__init__(value)
        self.alias = value.detach() if is_plain(value) else None  # shares the memory
        has_numbers = not (isinstance(value, nn.Parameter) or value.is_meta or is_fake(value))
        self.numbers = value.detach().clone() if has_numbers else None
        overlaps = has_numbers and self.alias is not None and torch._debug_has_internal_overlap(value) != 0
        self.memory = value.untyped_storage().clone() if overlaps else None  # copy_() refuses such a tensor
        self.requires_grad, self.grad = value.requires_grad, value.grad if value.is_leaf else None
        self.names = self.now()
        self.inside = self.names.values()

    def now(self) -> dict[str, Any]:
        hooks = {name: held for name in _HOOKS_OF_TENSORS if (held := getattr(self.value, name)) is not None}
        return hooks | {name: x for name, x in vars(self.value).items() if not name.startswith(_OF_DYNAMO)}

    def put(self, name: str, item: Any) -> None:
        if name in _HOOKS_OF_TENSORS:
            setattr(self.value, name, item)
        else:
            super().put(name, item)

    def drop(self, name: str) -> None:
        if name in _HOOKS_OF_TENSORS:
            getattr(self.value, name).clear()
        else:
            super().drop(name)

    def put_back(self) -> None:
        super().put_back()
        value = self.value
        with torch.inference_mode(value.is_inference()), torch.no_grad():
            self._put_numbers_back()
            if not (self.requires_grad or value.is_leaf or value._is_view()):
                value.detach_()
            if value.is_leaf and value.requires_grad is not self.requires_grad:
                value.requires_grad_(self.requires_grad)
            if value.is_leaf and value.grad is not self.grad:
                value.grad = self.grad

    def _put_numbers_back(self) -> None:
        value = self.value
        if self.alias is not None and not _lie_alike(value, self.alias):
            value.data = self.alias  # the tensor was resized or has other memory
        if self.numbers is None or same_bits(value, self.numbers):
            return
        if self.memory is not None:
            value.untyped_storage().copy_(self.memory)
        elif shape_in_bits(value) == shape_in_bits(self.numbers):
            value.copy_(self.numbers)
        else:
            value.data = self.numbers


def is_plain(tensor: Tensor) -> bool:
    """Return True if a tensor is a dense Tensor or Parameter in memory, without a tensor subclass."""
    is_array = type(tensor) in (Tensor, nn.Parameter) and type(tensor.data) is Tensor
    is_dense = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)
    return is_array and is_dense and not (tensor.is_meta or is_fake(tensor))


def _lie_alike(one: Tensor, other: Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.data_ptr() == other.data_ptr()
    )


class Noted:
    """A snapshot of every value that the modules of a model refer to, each with a copy of its content."""

    def __init__(self, model: nn.Module):
        self.contents: list[Content] = []
        self._model, self._code = model, Code(model)
        self._found: dict[int, Content | None] = {}
        self._holders: dict[int, Content] = {}  # by the id of a value: its first holder
        self._lenders: dict[int, tuple[Content, Any]] = {}  # an iterator's holder, and the iterator
        self._of_modules: dict[int, OfModule] = {}
        self._entered: set[int] = set()  # functions that may be called
        self._kinds_of = functools.cache(_kinds_of)
        self._pending: list[Any] = [*model.modules()]
        while self._pending:
            self._note(self._pending.pop())
        if self._code.mentioned & _OF_GRADIENTS:
            with_gradient = [c for c in self.contents if isinstance(c, TensorContent) and c.grad is not None]
            self.contents += [TensorContent(content.grad) for content in with_gradient]

    def unsaved(self) -> list[str]:
        """Return a clause for each value that cannot be restored, with its path and the reason."""
        reasons = {id(c.value): (c.value, c.why) for c in self.contents if isinstance(c, Unsaved)}
        for holder, value in self._lenders.values():
            if type(holder).lend is Content.lend:
                why = f"which a {type(holder.value).__name__} holds"
                reasons.setdefault(id(value), (value, why))
        names = {id(module): name for name, module in self._model.named_modules()}
        return [f"{self._path(x, names)} is a {type(x).__name__}, {why}" for x, why in reasons.values()]

    def lend_copies(self) -> None:
        """Replace the model's iterators by copies until the model is restored: iterators cannot be reset."""
        copies = {id(c.value): c.copy for c in self.contents if isinstance(c, Copied)}
        for holder, _ in self._lenders.values():
            holder.lend(copies)

    def _note(self, value: Any) -> None:
        if isinstance(value, types.FunctionType):
            self._enter(users_function(value))
        elif isinstance(value, types.ModuleType):
            for variables, name in self._code.add_module(value):
                self._note_variable(variables, name)
        elif id(value) not in self._found:
            self._found[id(value)] = None
            for kind in self._kinds_of(type(value)):
                if (content := kind(value)) is not None:
                    self._found[id(value)] = content
                    self.contents.append(content)
                    self._lead(content, content.inside)
                    self._note_methods(content.methods if isinstance(content, OfClass) else ())

    def _note_methods(self, methods: Iterable[tuple[str, types.FunctionType]]) -> None:
        """Record the state that methods keep, and all that a method refers to if a forward may call it."""
        for name, method in methods:
            if self._code.add_method(name, method):
                self._enter(method)
            elif (content := self._of_function(method)) is not None:
                called = types.FunctionType, type
                self._lead(content, [value for value in content.inside if not isinstance(value, called)])

    def _of_function(self, function: types.FunctionType) -> Content | None:
        if id(function) not in self._found and is_of_a_user(home_of(function)):
            content = self._found[id(function)] = OfFunction(function)
            self.contents.append(content)
        return self._found.get(id(function))

    def _enter(self, function: types.FunctionType) -> None:
        """Record all values that a function refers to, if a forward may call it."""
        content = self._of_function(function)
        if content is not None and id(function) not in self._entered:
            self._entered.add(id(function))
            for mentioned in self._code.mention(function):
                if isinstance(mentioned, tuple):
                    self._note_variable(*mentioned)
                else:
                    self._pending.append(mentioned)
            self._lead(content, content.inside)

    def _lead(self, content: Content, inside: Iterable[Any]) -> None:
        for value in inside:
            if kinds := self._kinds_of(type(value)):
                self._pending.append(value)
                self._holders.setdefault(id(value), content)
                if kinds == (copied,):
                    self._lenders[id(content), id(value)] = content, value

    def _note_variable(self, variables: dict[str, Any], name: str) -> None:
        """Record a variable of a Python module."""
        content = self._of_modules.get(id(variables))
        if content is None:
            content = self._of_modules[id(variables)] = OfModule(variables)
            self.contents.append(content)
        if isinstance(variable := users_function(content.note(name)), types.ModuleType):
            self._note(variable)
        elif not isinstance(variable, (type, types.FunctionType)) or self._code.follows(home_of(variable)):
            self._lead(content, (variable,))
            self._pending += constructors_of(variable) if isinstance(variable, type) else ()

    def _path(self, value: Any, names: dict[int, str]) -> str:
        """Return the path to a value from the model, or from a class, a function or a Python module."""
        labels: list[str] = []
        for _ in range(_LONGEST_PATH):
            holder = self._holders.get(id(value))
            if id(value) in names or holder is None:
                break
            labels.append(holder.label(value))
            value = holder.value
            if holder.root is not None:
                return holder.root + "".join(reversed(labels))
        return (names.get(id(value), "") + "".join(reversed(labels))).removeprefix(".")


def _of_class(value: type) -> Content | None:
    return OfClass(value) if is_of_a_user(home_of(value)) else None


_SNAPSHOT_CLASSES: tuple[tuple[tuple[type, ...], _Kind], ...] = (
    ((type,), _of_class),
    ((types.FunctionType,), OfFunction),
    ((types.ModuleType,), Content),
    ((dict, list, set, deque), Items),
    (tuple(LEADS), Leads),
    ((Tensor,), TensorContent),
)
_WITHOUT_ATTRIBUTES = (type, types.FunctionType, types.ModuleType, Tensor, threading.Thread)
_PLAIN_CONTAINERS = (dict, list, set, deque, OrderedDict, Counter)


def _kinds_of(kind: type) -> tuple[_Kind, ...]:
    """Return the snapshot functions for values of a class; the last snapshot is restored first."""
    of_items = next(
        (content for kinds, content in _SNAPSHOT_CLASSES if issubclass(kind, kinds)), None
    ) or kind_of(kind)
    has_attributes = issubclass(kind, (nn.Module, threading.local, BaseException)) or (
        (kind.__dictoffset__ or has_slots(kind)) and holds_values(kind)
    )
    is_plain = kind in _PLAIN_CONTAINERS or issubclass(kind, _WITHOUT_ATTRIBUTES)
    attributes = (Attributes,) if has_attributes and not is_plain else ()
    return attributes + (() if of_items is None else (of_items,))
