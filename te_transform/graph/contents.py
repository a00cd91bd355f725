"""What a model holds and a forward may change, noted so that it can be put back."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import types
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

_DEPTH = 5  # how deep: a module, its attributes, what these hold, ...
# Whose objects hold a user's values; Python's other objects go on.
_HOLDERS = ("types", "argparse", "collections")
_NOT_THE_USERS = ("_te_transform", "_dynamo")  # how attributes of tensors begin that others put there


def noted(model: nn.Module) -> list[Content]:
    """All that the model's modules hold, each with a copy of its content."""
    found: dict[int, Content] = {}
    level: list[Any] = list(model.modules())
    for _ in range(_DEPTH):
        below: list[Any] = []
        for value in level:
            if id(value) not in found and (kind := _kind_of(value)) is not None:
                found[id(value)] = content = kind(value)
                below += content.inside
        level = below
    return list(found.values())


class Content:
    """A value with a copy of what it holds."""

    def __init__(self, value: Any):
        self.value = value
        self.inside: Iterable[Any] = ()  # what it leads to

    def put_back(self) -> None:
        """Let the value hold what it did; what has not changed is not written to."""


class _Items(Content):
    """What a dictionary, a list, a set or a deque holds."""

    def __init__(self, value: Any):
        super().__init__(value)
        self.items = dict(value) if isinstance(value, dict) else list(value)
        self.inside = _objects(self.items)

    def put_back(self) -> None:
        if not _are_the_same(_objects(self.value), _objects(self.items)):
            self.value.clear()
            put = self.value.extend if isinstance(self.value, (list, deque)) else self.value.update
            put(self.items)


class _Leads(Content):
    """What cannot change, and leads to what may."""

    def __init__(self, value: Any):
        super().__init__(value)
        if isinstance(value, functools.partial):
            self.inside = [value.func, value.args, value.keywords]
        elif isinstance(value, types.MethodType):
            self.inside = [value.__self__, value.__func__]
        else:
            self.inside = value


class _Attributes(Content):
    """What an object has in its dictionary and in the slots of its class."""

    def __init__(self, value: Any):
        super().__init__(value)
        self.names = dict(getattr(value, "__dict__", {}))
        self.slots = _in_slots(value)
        self.inside = [*self.names.values(), *self.slots.values(), *type(value).__mro__]

    def put_back(self) -> None:
        names = getattr(self.value, "__dict__", {})
        if not _are_the_same(_objects(names), _objects(self.names)):
            names.clear()
            names.update(self.names)
        now = _in_slots(self.value)
        for slot in now.keys() - self.slots.keys():
            slot.__delete__(self.value)
        for slot, held in self.slots.items():
            if slot not in now or now[slot] is not held:
                slot.__set__(self.value, held)


class _OfClass(Content):
    """What a class has for all its objects; its methods lead to what they keep."""

    def __init__(self, value: type):
        super().__init__(value)
        self.names = self._now()
        methods = (held for held in vars(value).values() if isinstance(held, types.FunctionType))
        self.inside = [*self.names.values(), *methods]

    def _now(self) -> dict[str, Any]:
        held = vars(self.value).items()
        return {name: x for name, x in held if name[:2] != "__" and not hasattr(type(x), "__get__")}

    def put_back(self) -> None:
        now = self._now()
        for name in now.keys() - self.names.keys():
            type.__delattr__(self.value, name)
        for name, held in self.names.items():
            if name not in now or now[name] is not held:
                type.__setattr__(self.value, name, held)


class _OfFunction(Content):
    """The variables around a function, its defaults and attributes."""

    def __init__(self, value: types.FunctionType):
        super().__init__(value)
        self.cells = _around(value)
        held = (value.__dict__, value.__defaults__, value.__kwdefaults__)
        self.inside = [*(content for _, content in self.cells), *held]

    def put_back(self) -> None:
        for cell, held in self.cells:
            cell.cell_contents = held


class TensorContent(Content):
    """The numbers of a tensor that is no parameter, for these may not fit twice; and of all, whether it has a
    gradient, which one, and attributes."""

    def __init__(self, value: Tensor):
        super().__init__(value)
        has_numbers = not (isinstance(value, nn.Parameter) or value.is_meta or is_fake(value))
        self.numbers = value.detach().clone() if has_numbers else None
        self.requires_grad, self.grad = value.requires_grad, value.grad if value.is_leaf else None
        self.names = self._now()
        self.inside = self.names.values()

    def _now(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self.value).items() if not name.startswith(_NOT_THE_USERS)}

    def put_back(self) -> None:
        value, now = self.value, self._now()
        for name in now.keys() - self.names.keys():
            del value.__dict__[name]
        value.__dict__.update(self.names)
        with torch.inference_mode(value.is_inference()), torch.no_grad():
            self._put_numbers_back()
            if not (self.requires_grad or value.is_leaf or value._is_view()):
                value.detach_()
            if value.is_leaf and value.requires_grad is not self.requires_grad:
                value.requires_grad_(self.requires_grad)
            if value.is_leaf and value.grad is not self.grad:
                value.grad = self.grad

    def _put_numbers_back(self) -> None:
        if self.numbers is None or same_bits(self.value, self.numbers):
            return
        if _shape(self.value) == _shape(self.numbers):
            self.value.copy_(self.numbers)
        else:  # somebody has resized it, or given it other memory
            self.value.data = self.numbers


class _OfArray(Content):
    """The numbers of numpy's arrays, which may be objects too."""

    def __init__(self, value: Any):
        super().__init__(value)
        self.numbers = value.copy()
        self.inside = self.numbers.flat if value.dtype.hasobject else ()

    def put_back(self) -> None:
        value, numbers = self.value, self.numbers
        if value.shape != numbers.shape:
            value.resize(numbers.shape, refcheck=False)
        if value.tobytes() != numbers.tobytes():
            value[...] = numbers


class _OfBytes(Content):
    """What a bytearray or one of Python's arrays holds."""

    def __init__(self, value: Any):
        super().__init__(value)
        self.held = value[:]

    def put_back(self) -> None:
        if bytes(self.value) != bytes(self.held):
            self.value[:] = self.held


class _OfRandom(Content):
    """Where a random number generator stands."""

    def __init__(self, value: Any):
        super().__init__(value)
        if isinstance(value, torch.Generator):
            self.state = value.get_state()
        elif isinstance(value, random.Random):
            self.state = value.getstate()
        else:
            self.state = value.bit_generator.state

    def put_back(self) -> None:
        if isinstance(self.value, torch.Generator):
            self.value.set_state(self.state)
        elif isinstance(self.value, random.Random):
            self.value.setstate(self.state)
        else:
            self.value.bit_generator.state = self.state


_KINDS: tuple[tuple[tuple[type, ...], type[Content]], ...] = (
    ((dict, list, set, deque), _Items),
    ((tuple, functools.partial, types.MethodType), _Leads),
    ((bytearray, array), _OfBytes),
    ((Tensor,), TensorContent),
    ((torch.Generator, random.Random), _OfRandom),
    ((nn.Module,), _Attributes),
)


def _kind_of(value: Any) -> type[Content] | None:
    """How its content is noted; None where nothing in it can change."""
    if isinstance(value, (type, types.FunctionType)):
        home = value.__module__ if isinstance(value, type) else value.__globals__.get("__name__")
        kind = _OfClass if isinstance(value, type) else _OfFunction
        return kind if _is_of_a_user(home) else None
    if found := next((kind for types_, kind in _KINDS if isinstance(value, types_)), None):
        return found
    if hasattr(getattr(value, "bit_generator", None), "state"):  # numpy's
        return _OfRandom
    if "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].ndarray):
        return _OfArray
    has_attributes = hasattr(value, "__dict__") or any(_slots(type(value)))
    is_object = has_attributes and not isinstance(value, types.ModuleType)
    return _Attributes if is_object and _is_of_a_user(type(value).__module__) else None


def _is_of_a_user(home: Any) -> bool:
    """Whether code of this module is the user's or of a library, and neither Python's, PyTorch's nor ours."""
    home = str(home).partition(".")[0]
    return home not in ("torch", "te_transform") and (home not in sys.stdlib_module_names or home in _HOLDERS)


def _slots(kind: type) -> Iterator[Any]:
    """What Python reads and writes the slots of a class by."""
    own = (vars(each) for each in kind.__mro__ if "__slots__" in vars(each))
    return (held for names in own for held in names.values() if isinstance(held, types.MemberDescriptorType))


def _in_slots(value: Any) -> dict[Any, Any]:
    """What the slots of an object hold that hold something."""
    held = {}
    for slot in _slots(type(value)):
        with contextlib.suppress(AttributeError):
            held[slot] = slot.__get__(value)
    return held


def _around(function: types.FunctionType) -> list[tuple[types.CellType, Any]]:
    """The variables around a function that have a value, each with it."""
    held = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):
            held.append((cell, cell.cell_contents))
    return held


def _objects(held: Any) -> list[Any]:
    return [*held, *held.values()] if isinstance(held, dict) else [*held]


def _are_the_same(some: list[Any], others: list[Any]) -> bool:
    return [*map(id, some)] == [*map(id, others)]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are of one kind and hold the same bits, of sparse ones in the same places."""
    return _kind(one) == _kind(other) and all(map(_same_dense, _parts(one), _parts(other)))


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return _shape(tensor), tensor.dtype, tensor.layout, tensor.qscheme() if tensor.is_quantized else None


def _shape(tensor: Tensor) -> torch.Size | None:
    """Its shape, which nested tensors do not have."""
    return None if tensor.is_nested else tensor.shape


def _same_dense(one: Tensor, other: Tensor) -> bool:
    one, other = (tensor.detach().resolve_conj().resolve_neg() for tensor in (one, other))
    one, other = (tensor.contiguous().flatten() for tensor in (one, other))
    return one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _parts(tensor: Tensor) -> list[Tensor]:
    """The dense tensors that a tensor is made of."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.is_nested:
        is_jagged = tensor.layout is torch.jagged
        sizes = [tensor.offsets(), tensor.lengths()] if is_jagged else [tensor._nested_tensor_size()]
        return [tensor.values(), *(size for size in sizes if size is not None)]
    if tensor.is_quantized:  # whose bits PyTorch compares without an end
        if tensor.qscheme() is torch.per_channel_affine:
            return [tensor.int_repr(), tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
        return [tensor.int_repr(), torch.tensor([tensor.q_scale(), tensor.q_zero_point()])]
    return [tensor]
