"""Which attributes of its modules a forward goes by: what it does not read cannot change what it does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import nn

Attribute = tuple[nn.Module, str]


@dataclass
class Touched:
    """The attributes that were read, and those that were written."""

    read: set[Attribute] = field(default_factory=set)
    written: set[Attribute] = field(default_factory=set)


@contextlib.contextmanager
def touched(modules: Iterable[nn.Module]) -> Iterator[Touched]:
    """Note which attributes of `modules` are used meanwhile, their training flags too, beside parameters,
    buffers, children and what else nn.Module itself keeps."""
    found = Touched()
    classes = {module: type(module) for module in modules}
    try:
        for module, kind in classes.items():
            object.__setattr__(module, "__class__", _noting(kind, found))
        yield found
    finally:
        for module, kind in classes.items():
            object.__setattr__(module, "__class__", kind)


def _noting(kind: type, found: Touched) -> type:
    def __getattribute__(self: nn.Module, name: str) -> Any:
        value = kind.__getattribute__(self, name)
        noted = name == "training" or name not in _module_attributes()
        if noted and name in kind.__getattribute__(self, "__dict__"):
            found.read.add((self, name))
        return value

    def __setattr__(self: nn.Module, name: str, value: Any) -> None:
        if name not in _module_attributes() and not _registered(self, name):
            found.written.add((self, name))
        kind.__setattr__(self, name, value)

    methods = {"__getattribute__": __getattribute__, "__setattr__": __setattr__}
    return type(kind.__name__, (kind,), methods | {"__module__": kind.__module__})


def _registered(module: nn.Module, name: str) -> bool:
    return any(name in held for held in (module._parameters, module._buffers, module._modules))


@cache
def _module_attributes() -> frozenset[str]:
    return frozenset(nn.Module().__dict__)
