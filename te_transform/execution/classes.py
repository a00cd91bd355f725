"""Subclasses of the user's module classes, whose forward runs captured graphs.

A module gets another class and one attribute. Its parameters, submodules and other attributes do not change.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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

from te_transform.backends.fp8.precision import Precision
from te_transform.backends.fp8.registry import forget_weights
from te_transform.graph.capture import is_capturing, is_compiling_here, is_our_capture
from te_transform.graph.context import set_to
from te_transform.graph.errors import message_of
from te_transform.plan.model import CONVERTED, ModelError

log = logging.getLogger(__name__)

_parts_end_graphs: ContextVar[bool] = ContextVar("_parts_end_graphs", default=False)


class Carrier(Protocol):
    """The runner of a converted model, see runner.py."""

    precision: Precision | None

    def call(
        self, role: ModuleRole, module: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict
    ) -> Any:
        """Run a call of the model, a part or a block. `forward` is the forward of the user's class."""


class Role(Enum):
    """The role of a module that is captured separately.

    A part holds blocks. It is captured if it is called directly: an encoder by generate(), a backbone by the
    trainers of TRL. A block is captured if blocks are captured one by one.
    """

    MODEL, PART, BLOCK = range(3)


@dataclass(eq=False)
class ModuleRole:
    """The link from a module to the runner of its model."""

    runner: Carrier
    kind: Role
    skipped: frozenset[str] = frozenset()  # paths in a block that skip= leaves alone
    has_run: bool = False  # True after the block ran captured outside of a backward


def swap_class(module: nn.Module, role: ModuleRole) -> None:
    """Make a module run its captured forward.

    Raises:
        ModelError: its class cannot be subclassed.
    """
    module.__dict__[CONVERTED] = role
    module.__class__ = captured_class(type(module), role.skipped)


def restore_class(module: nn.Module) -> None:
    """Restore the user's class and forward of a module."""
    module.__dict__.pop(CONVERTED, None)
    module.__class__ = user_class(module)


def user_class(module: nn.Module) -> type:
    """Return the class of a module before the conversion."""
    return _ORIGINALS.get(type(module), type(module))


def user_class_behind(kind: type) -> type:
    """Return the user's class behind a swapped class, from which FSDP2 may have derived another."""
    return next((_ORIGINALS[base] for base in kind.__mro__ if base in _ORIGINALS), kind)


def restore_classes(model: nn.Module) -> None:
    """Restore the class of every module: the model runs the user's own code and keeps its report."""
    for module in model.modules():
        module.__class__ = user_class(module)


@contextmanager
def with_user_classes(model: nn.Module) -> Iterator[None]:
    """Restore the class of every module inside of the context."""
    swapped = [(module, type(module)) for module in model.modules() if type(module) in _ORIGINALS]
    restore_classes(model)
    try:
        yield
    finally:
        for module, kind in swapped:
            module.__class__ = kind


def parts_end_graphs(end: bool) -> AbstractContextManager[None]:
    """Choose how captures inside of the context treat parts of the model.

    Args:
        end: True ends a graph at the call of a part, which then runs its own captured forward. False traces
            the part with its caller.
    """
    return set_to(_parts_end_graphs, end)


# dynamo calls these functions while tracing and leaves them out of the graph
@torch._dynamo.assume_constant_result
def _ends_graph() -> bool:
    return _parts_end_graphs.get() and is_our_capture()


@torch._dynamo.disable
def _run_outside(module: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Run the captured forward of a part or a block. Dynamo ends the outer graph at this function."""
    role = vars(module).get(CONVERTED)
    if role is None:
        return forward(module, *args, **kwargs)
    return role.runner.call(role, module, forward, args, kwargs)


@torch._dynamo.assume_constant_result
def _warn_if_compiled_outside() -> bool:
    # if dynamo cannot trace a forward, it traces the functions that the forward calls
    if CompileContext.try_get() is not None and not is_our_capture() and not torch.compiler.is_exporting():
        warn_compiled_outside()
    return True


@functools.cache  # warn once: dynamo traces pieces of a forward repeatedly
def warn_compiled_outside() -> None:
    """Warn that torch.compile around a converted model compiles the user's own forward."""
    log.warning(
        "a converted model is compiled from outside, which compiles the user's own forward: to compile "
        "what te_transform made of it, pass compile=True to te_transform.convert()"
    )


for _traced in (_warn_if_compiled_outside, _ends_graph):
    skip_code(_traced.__code__)  # the code is not part of the user's forward

_SUBCLASSES: dict[tuple[type, frozenset[str]], type] = {}
_ORIGINALS: dict[type, type] = {}


def captured_class(kind: type, skipped: frozenset[str]) -> type:
    """Return the subclass of `kind` that runs the captured forward.

    Each class and set of skipped paths has one subclass, so instances share captured code. A class
    derived from such a subclass, as FSDP2 derives one, runs the captured forward already.

    Raises:
        ModelError: the class cannot be subclassed.
    """
    kind = _ORIGINALS.get(kind, kind)
    if user_class_behind(kind) is not kind:
        return kind
    if (kind, skipped) not in _SUBCLASSES:
        named = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
        try:
            methods = {"forward": _forward_of(kind), "train": _train_of(kind), "__reduce_ex__": _reduce}
            subclass = _metaclass(type(kind))(kind.__name__, (kind,), methods | named)
        except Exception as error:  # from a metaclass, or from the __init_subclass__ of a registry
            raise ModelError(
                f"expected a class that can be subclassed, got {kind.__name__} ({message_of(error)}); "
                "convert a model that holds it, or allow subclasses"
            ) from error
        _SUBCLASSES[kind, skipped], _ORIGINALS[subclass] = subclass, kind
    return _SUBCLASSES[kind, skipped]


@functools.cache
def _metaclass(kind: type) -> type:
    """Return a metaclass whose classes hand attributes that are set on them to the user's class.

    A forward counts in `type(self).calls`, and other code reads the count from the user's class.
    """

    def set_name(self: type, name: str, value: Any) -> None:
        setattr(_ORIGINALS[self], name, value) if self in _ORIGINALS else kind.__setattr__(self, name, value)

    def delete_name(self: type, name: str) -> None:
        delattr(_ORIGINALS[self], name) if self in _ORIGINALS else kind.__delattr__(self, name)

    return type(kind.__name__, (kind,), {"__setattr__": set_name, "__delattr__": delete_name})


def _forward_of(kind: type) -> Callable[..., Any]:
    """Return a forward that hands calls to the runner, or runs the forward of the user's class."""
    is_plain = isinstance(inspect.getattr_static(kind, "forward"), (FunctionType, functools.partialmethod))
    bound = _bound_forward(kind)

    @functools.wraps(kind.forward if is_plain else bound)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = kind.forward if is_plain else bound  # the user may replace kind.forward later
        # dynamo does not guard hooks for all modules
        if is_capturing() or _has_any_global_hook() or (role := self.__dict__.get(CONVERTED)) is None:
            if is_compiling_here():
                if _ends_graph():
                    return _run_outside(self, own, args, kwargs)
                _warn_if_compiled_outside()
            return own(self, *args, **kwargs)
        return role.runner.call(role, self, own, args, kwargs)

    return forward


def _bound_forward(kind: type) -> Callable[..., Any]:
    """Return a function that calls a forward of `kind` that is a property or another descriptor."""

    def bound(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = next(base for base in type(self).__mro__ if _ORIGINALS.get(base) is kind)
        return super(own, self).forward(*args, **kwargs)

    return bound


def _train_of(kind: type) -> Callable[..., nn.Module]:
    """Return a train() that also frees the quantized weights that a model in a recipe caches."""

    @functools.wraps(kind.train)
    def train(self: nn.Module, mode: bool = True) -> nn.Module:
        role = self.__dict__.get(CONVERTED)
        if role is not None and role.kind is Role.MODEL and role.runner.precision is not None:
            forget_weights(self.parameters())  # the next call quantizes again
        return kind.train(self, mode)

    return train


def _reduce(self: nn.Module, protocol: int) -> Any:
    """Pickle a module by the name of the user's class. A `__reduce__` of the user's class is respected."""
    kind = next(base for base in type(self).__mro__ if base in _ORIGINALS)
    reduced = super(kind, self).__reduce_ex__(max(protocol, 2))
    if not isinstance(reduced, tuple) or reduced[1][:1] != (type(self),):
        return reduced
    make, (_, *args), *rest = reduced
    role = vars(self).get(CONVERTED)
    skipped = frozenset() if role is None else role.skipped
    return (_remake, (make, _ORIGINALS[type(self)], skipped, *args), *rest)


def _remake(make: Callable[..., nn.Module], kind: type, skipped: frozenset[str], *args: Any) -> nn.Module:
    """Unpickle a module into the subclass."""
    return make(captured_class(kind, skipped), *args)
