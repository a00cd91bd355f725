"""A rewritten forward at run time: functions, and the conditions under which they are the original one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from te_transform.deferred import Deferred
from te_transform.slots import Fusion


@dataclass(eq=False)
class Path:
    """One way through a forward: a function of its arguments, and the arguments it was made for."""

    tensors: dict[str, tuple[int, torch.dtype]]  # name -> rank and dtype
    passed: tuple[str, ...]  # arguments of any kind that the forward only hands on to a child
    constants: dict[str, Any]
    deferred: str | None  # the tensor that must be the unread output of the fusion's norm
    any_float: bool  # whether the floating tensors may have another dtype
    sizes: str  # the guards on sizes, source of a function of the tensors' shapes
    source: str  # of a function forward(self, **tensors, **passed)
    names: dict[str, Any]  # what the source refers to

    def __post_init__(self) -> None:
        scope = dict(self.names)
        exec(self.source, scope)
        self.run: Callable[..., Any] = scope["forward"]
        self.fits: Callable[..., bool] = eval(self.sizes)

    def __getstate__(self) -> dict[str, Any]:
        modules = {
            name: value.__name__ for name, value in self.names.items() if isinstance(value, ModuleType)
        }
        names = {name: value for name, value in self.names.items() if name not in modules}
        return {k: v for k, v in self.__dict__.items() if k not in ("run", "fits")} | {
            "names": (names, modules)
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        names, modules = state["names"]
        self.__dict__.update(
            state, names=names | {name: import_module(path) for name, path in modules.items()}
        )
        self.__post_init__()

    def arguments(self, fusion: Fusion, given: dict[str, Any]) -> dict[str, Any] | None:
        """The function's arguments for a call of the original, or None where this path was not made for such
        a call."""
        if len(given) != len(self.tensors) + len(self.passed) + len(self.constants):
            return None
        for name, value in self.constants.items():
            if name not in given or not _same(given[name], value):
                return None
        tensors = {}
        for name, (rank, dtype) in self.tensors.items():
            tensor = given.get(name)
            if name == self.deferred:
                if not (isinstance(tensor, Deferred) and tensor.norm is fusion.norm and tensor.unread()):
                    return None
                tensor = tensor.source
            if not isinstance(tensor, Tensor) or tensor.dim() != rank:
                return None
            floats = tensor.is_floating_point() and dtype.is_floating_point
            if tensor.dtype != dtype and not (self.any_float and floats):
                return None
            tensors[name] = tensor
        if not self.fits(*[tensor.shape for tensor in tensors.values()]):
            return None
        return tensors | {name: given[name] for name in self.passed}


def _same(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, Tensor) and type(one) is type(other) and one == other)


@dataclass(eq=False)
class Mask:
    """A buffer that was proved to hold a causal mask, and that somebody may load over."""

    module: nn.Module
    name: str
    value: Tensor
    seen: tuple[weakref.ref, int] | None = None

    @classmethod
    def of(cls, owner: nn.Module, path: str, value: Tensor) -> Mask:
        """The mask at `path` below `owner`, whose proved value was `value`."""
        parent, _, name = path.rpartition(".")
        return cls(owner.get_submodule(parent), name, value)

    def holds(self) -> bool:
        """Whether the buffer is what it was; compared only where it is another tensor or was written to."""
        buffer = getattr(self.module, self.name)
        if torch.compiler.is_compiling():
            return True
        if self.seen and self.seen[0]() is buffer and self.seen[1] == buffer._version:
            return True
        if not torch.equal(buffer.to(self.value.device), self.value.to(buffer.dtype)):
            return False
        self.seen = (weakref.ref(buffer), buffer._version)
        return True

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "seen": None}


@dataclass(eq=False)
class Mode:
    """The paths of a forward in training, or in evaluation, and what they rely on beside their arguments."""

    paths: list[Path] = field(default_factory=list)
    watched: list[tuple[nn.Module, dict[str, Any]]] = field(default_factory=list)
    children: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)

    def unchanged(self, training: bool) -> bool:
        """Whether all that the recording may have read is still what it was, and no hook waits inside."""
        for module, attributes in self.watched:
            if module.training is not training:
                return False
            for name, value in attributes.items():
                if getattr(module, name) != value:
                    return False
        for parent, name, child in self.children:
            if parent._modules.get(name) is not child or child._forward_hooks or child._forward_pre_hooks:
                return False
            if child._backward_hooks or child._backward_pre_hooks:
                return False
        return all(mask.holds() for mask in self.masks)


@dataclass(eq=False)
class Rewritten:
    """An owner's rewritten forward; a call that no path was made for runs the original one."""

    parameters: tuple[str, ...]  # of the original forward, by position
    defaults: dict[str, Any]
    training: Mode
    evaluation: Mode

    def ready(
        self, owner: nn.Module, fusion: Fusion, args: tuple, kwargs: dict[str, Any]
    ) -> Callable[[], Any] | None:
        """The rewritten forward of this very call, or None where the original has to run."""
        mode = self.training if owner.training else self.evaluation
        if not mode.paths or len(args) > len(self.parameters) or not mode.unchanged(owner.training):
            return None
        given = {**self.defaults, **dict(zip(self.parameters, args, strict=False)), **kwargs}
        for path in mode.paths:
            arguments = path.arguments(fusion, given)
            if arguments is not None:
                return partial(path.run, owner, **arguments)
        return None
