"""The classes of the modules of a converted model, whose forward is the captured one.

A module gets another class, and one attribute; its parameters, submodules and other attributes stay as they
are.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import nn
from torch._dynamo.eval_frame import skip_code
from torch._guards import CompileContext
from torch.nn.modules.module import _has_any_global_hook

from te_transform.execution.precision import Precision
from te_transform.graph.capture import is_capturing, is_compiling_here, is_our_capture
from te_transform.plan.model import CONVERTED, ModelError

log = logging.getLogger(__name__)

_cutting: ContextVar[bool] = ContextVar("_cutting", default=False)  # whether parts end the graphs, see below


class Carrier(Protocol):
    """What runs the calls of a converted model, see runner.py."""

    precision: Precision | None

    def call(
        self, role: ModuleRole, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict
    ) -> Any:
        """A call of the model, of a part of it, or of a block; `forward` is the one of its own class."""


class Role(Enum):
    """What a module of a converted model is that is captured for itself.

    A part holds blocks and is captured where it is called by itself: an encoder by generate(), a backbone by
    the trainers of TRL. A block is captured where blocks are captured one by one.
    """

    MODEL, PART, BLOCK = range(3)


@dataclass(eq=False)
class ModuleRole:
    """What a module of a converted model knows of it."""

    runner: Carrier
    kind: Role
    skipped: frozenset[str] = frozenset()  # the paths in a block of what is left alone

    @property
    def is_root(self) -> bool:
        """Whether it is the model itself."""
        return self.kind is Role.MODEL


def swap_class(module: nn.Module, role: ModuleRole) -> None:
    """Let a module run its captured forward.

    Raises:
        ModelError: its class takes no subclass.
    """
    module.__dict__[CONVERTED] = role
    module.__class__ = captured_class(type(module), role.skipped)


def restore_class(module: nn.Module) -> None:
    """Give a module its own class and forward back, if it has another."""
    module.__dict__.pop(CONVERTED, None)
    _give_class_back(module)


def _give_class_back(module: nn.Module) -> None:
    module.__class__ = own_class(module)


def own_class(module: nn.Module) -> type:
    """The class that a module was of before it was converted."""
    return _ORIGINALS.get(type(module), type(module))


def made_of(kind: type) -> type:
    """The user's class behind one of a converted model, which FSDP2 may have made another of."""
    return next((_ORIGINALS[base] for base in kind.__mro__ if base in _ORIGINALS), kind)


def give_classes_back(model: nn.Module) -> None:
    """Let every module in `model` be of its own class: it runs as it is, and still has its report."""
    for module in model.modules():
        _give_class_back(module)


@contextmanager
def own_classes(model: nn.Module) -> Iterator[None]:
    """Let every module in `model` be of its own class, whose forward is the user's."""
    found = [(module, type(module)) for module in model.modules() if type(module) in _ORIGINALS]
    give_classes_back(model)
    try:
        yield
    finally:
        for module, kind in found:
            module.__class__ = kind


@contextmanager
def parts_stay_out(stay: bool) -> Iterator[None]:
    """Whether, in what is captured meanwhile, a graph ends where a part of the model is called, and the part
    runs as it does by itself; else it is traced with what calls it."""
    token = _cutting.set(stay)
    try:
        yield
    finally:
        _cutting.reset(token)


# dynamo calls these while tracing, and no call of them is in the graph
@torch._dynamo.assume_constant_result
def _stays_out() -> bool:
    return _cutting.get() and is_our_capture()


@torch._dynamo.disable
def _by_itself(forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
    """A call that dynamo cannot trace, and so ends a graph: of a part, or of a block where no part calls it,
    which is captured for itself."""
    role = vars(module).get(CONVERTED)
    if role is None:
        return forward(module, *args, **kwargs)
    return role.runner.call(role, forward, module, args, kwargs)


@torch._dynamo.assume_constant_result
def _tell_compilers() -> bool:
    # where dynamo gives up on a forward it traces what that calls: is_compiling_here() is true there
    if CompileContext.try_get() is not None and not is_our_capture() and not torch.compiler.is_exporting():
        tell_of_the_option()
    return True


@functools.cache  # once: dynamo traces each piece of a forward, some twice, and at other sizes again
def tell_of_the_option() -> None:
    log.warning(
        "a converted model is compiled from outside, which compiles the user's own forward: to compile "
        "what te_transform made of it, pass compile=True to te_transform.convert()"
    )


for _asked in (_tell_compilers, _stays_out):
    skip_code(_asked.__code__)  # and what they ask is no part of the user's forward

_CLASSES: dict[tuple[type, frozenset[str]], type] = {}
_ORIGINALS: dict[type, type] = {}


def captured_class(kind: type, skipped: frozenset[str] = frozenset()) -> type:
    """A subclass of `kind` of the same name, whose forward is the captured one; there is one for each class,
    so that its code is captured once for all instances that skip the same.

    Raises:
        ModelError: the class takes no subclass.
    """
    kind = _ORIGINALS.get(kind, kind)
    if (kind, skipped) not in _CLASSES:
        named = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
        try:
            made = type(kind.__name__, (kind,), {**_methods(kind), "__reduce_ex__": _reduce, **named})
        except Exception as error:  # of a metaclass, or of the __init_subclass__ of a registry
            raise ModelError(
                f"{kind.__name__} refuses to be subclassed, a converted model is an instance of a subclass "
                f"of its class ({error}): convert a model that holds it, or let the class be derived from"
            ) from error
        _CLASSES[kind, skipped], _ORIGINALS[made] = made, kind
    return _CLASSES[kind, skipped]


def _methods(kind: type) -> dict[str, Callable[..., Any]]:
    """What a module of a converted model does otherwise than one of `kind`."""
    is_plain = isinstance(inspect.getattr_static(kind, "forward"), (FunctionType, functools.partialmethod))

    def bound(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """A forward that is a property, or another descriptor, as the class binds it to this module."""
        own = next(base for base in type(self).__mro__ if _ORIGINALS.get(base) is kind)
        return super(own, self).forward(*args, **kwargs)

    @functools.wraps(kind.forward if is_plain else bound)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = kind.forward if is_plain else bound
        # dynamo does not guard hooks for all modules
        if is_capturing() or _has_any_global_hook() or (role := self.__dict__.get(CONVERTED)) is None:
            if is_compiling_here():
                if _stays_out():
                    return _by_itself(own, self, args, kwargs)
                _tell_compilers()
            return own(self, *args, **kwargs)
        return role.runner.call(role, own, self, args, kwargs)

    @functools.wraps(kind.train)
    def train(self: nn.Module, mode: bool = True) -> nn.Module:
        role = self.__dict__.get(CONVERTED)
        if role is not None and role.is_root and role.runner.precision is not None:
            role.runner.precision.forget(self)
        return kind.train(self, mode)

    return {"forward": forward, "train": train}


def _reduce(self: nn.Module, protocol: int) -> Any:
    """As the class's own, but for the class, which a pickle finds by the name of the one it was made of.

    What a `__reduce__` of the user's own says is handed on: it makes what it says, of the user's class.
    """
    kind = next(base for base in type(self).__mro__ if base in _ORIGINALS)
    reduced = super(kind, self).__reduce_ex__(max(protocol, 2))
    if not isinstance(reduced, tuple) or reduced[1][:1] != (type(self),):
        return reduced
    make, (_, *args), *rest = reduced
    role = vars(self).get(CONVERTED)
    skipped = frozenset() if role is None else role.skipped
    return (_made_again, (make, _ORIGINALS[type(self)], skipped, *args), *rest)


def _made_again(make: Callable[..., nn.Module], kind: type, skipped: frozenset[str], *args: Any) -> nn.Module:
    return make(captured_class(kind, skipped), *args)
