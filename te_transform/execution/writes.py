"""Undo the writes of observed calls when they end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import is_fake
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from te_transform.canonicalize import written


class Writes:
    """The contents of memory before graphs wrote to it.

    Storages are copied rather than tensors, so views, expanded tensors and inference tensors need no special
    cases, and no version counter changes. References to storages are weak, so activations are freed as usual.
    """

    def __init__(self) -> None:
        self.storages: dict[int, tuple[StorageWeakRef, torch.UntypedStorage]] = {}
        self.generators: dict[torch.Generator, Tensor] = {}

    def note_graph(self, captured: fx.GraphModule, arguments: Sequence[Any]) -> None:
        """Copy the arguments that a graph changes, unless they were copied before."""
        placeholders, seen = captured.graph.find_nodes(op="placeholder"), written(captured.graph)
        self.note([a for n, a in zip(placeholders, arguments, strict=True) if n in seen])
        for generator in arguments:
            if isinstance(generator, torch.Generator):
                self.generators.setdefault(generator, generator.get_state())

    def note(self, arguments: Sequence[Any]) -> None:
        """Copy the storages of tensors, unless they were copied before."""
        if not arguments:  # the fast path of CUDA graph replays, most of which write to no argument
            return
        dead = [key for key, (reference, _) in self.storages.items() if reference.expired()]
        for key in dead:
            del self.storages[key]
        with _disable_current_modes():
            for storage in (each for argument in arguments for each in _storages(argument)):
                if storage._cdata not in self.storages:
                    self.storages[storage._cdata] = StorageWeakRef(storage), storage.clone()

    def undo(self) -> None:
        """Restore the contents of living storages, and the states of random generators."""
        for generator, state in self.generators.items():
            generator.set_state(state)
        with _disable_current_modes():
            for reference, before in self.storages.values():
                storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
                if storage is not None and storage.nbytes() == before.nbytes():  # FSDP may have freed it
                    storage.copy_(before)


def _storages(argument: Any) -> Iterator[torch.UntypedStorage]:
    """Return the storages of a tensor. Fake and meta tensors have none."""
    if not isinstance(argument, Tensor) or is_fake(argument) or argument.is_meta:
        return
    while torch._C._functorch.is_functorch_wrapped_tensor(argument):
        argument = torch._C._functorch.get_unwrapped(argument)
    if is_traceable_wrapper_subclass(argument):
        names, _ = argument.__tensor_flatten__()
        for name in names:
            yield from _storages(getattr(argument, name))
    elif argument.layout is torch.strided:  # no captured graph writes to a sparse tensor
        yield argument.untyped_storage()


@contextmanager
def unwritten() -> Iterator[Writes]:
    """Undo all writes to noted tensors at the end."""
    writes = Writes()
    try:
        yield writes
    finally:
        writes.undo()
