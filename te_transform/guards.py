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


@dataclass(eq=False)
class Path:
    """One way through a forward: the source of two functions, and what it refers to.

    arguments(norm, ...), called as the forward was: the arguments of run(), or None where this path was not
    made for such a call; run(self, ...): the forward.
    """

    source: str
    names: dict[str, Any]

    def __post_init__(self) -> None:
        scope = dict(self.names)
        exec(self.source, scope)
        self.arguments: Callable[..., dict[str, Any] | None] = scope["arguments"]
        self.run: Callable[..., Any] = scope["forward"]

    def __getstate__(self) -> tuple[str, dict[str, Any], dict[str, str]]:
        modules = {
            name: value.__name__ for name, value in self.names.items() if isinstance(value, ModuleType)
        }
        return self.source, {k: v for k, v in self.names.items() if k not in modules}, modules

    def __setstate__(self, state: tuple[str, dict[str, Any], dict[str, str]]) -> None:
        self.source, names, modules = state
        self.names = names | {name: import_module(path) for name, path in modules.items()}
        self.__post_init__()


class Missing:
    """What stands for an argument that was not given; copies and pickles as itself."""


def same(one: Any, other: Any) -> bool:
    """Whether an argument is the constant that a path was made for."""
    return one is other or (not isinstance(one, Tensor) and type(one) is type(other) and one == other)


def source_of(tensor: Any, norm: nn.Module) -> Tensor | None:
    """The source of the unread output of `norm`; None if the tensor is anything else."""
    unread = isinstance(tensor, Deferred) and tensor.norm is norm and tensor.unread()
    return tensor.source if unread else None


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
    watched: list[tuple[nn.Module, str, Any]] = field(default_factory=list)  # attributes, with their values
    children: list[tuple[nn.Module, dict[str, nn.Module]]] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)

    def unchanged(self) -> bool:
        """Whether all that the recording read is still what it was, and no hook waits inside."""
        for module, name, value in self.watched:
            if not same(getattr(module, name), value):
                return False
        for parent, named in self.children:
            for name, child in named.items():
                if parent._modules.get(name) is not child or _hooked(child):
                    return False
        return all(mask.holds() for mask in self.masks)


def _hooked(module: nn.Module) -> bool:
    """Whether something waits for the module's call, a hook or a forward of its own (accelerate's);
    compiled code does not look for new hooks either."""
    if torch.compiler.is_compiling():
        return False
    forward, backward = module._forward_hooks, module._backward_hooks
    before = module._forward_pre_hooks or module._backward_pre_hooks
    return bool(forward or backward or before or "forward" in module.__dict__)


@dataclass(eq=False)
class Rewritten:
    """An owner's rewritten forward; a call that no path was made for runs the original one."""

    training: Mode
    evaluation: Mode

    def ready(
        self, owner: nn.Module, norm: nn.Module | None, args: tuple, kwargs: dict[str, Any]
    ) -> Callable[[], Any] | None:
        """The rewritten forward of this very call, or None where the original has to run."""
        mode = self.training if owner.training else self.evaluation
        for path in mode.paths:
            arguments = path.arguments(norm, *args, **kwargs)
            if arguments is not None:
                return partial(path.run, owner, **arguments) if mode.unchanged() else None
        return None
