"""Ranges of the profiler around the calls of modules, which do not change what a converted model runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

from torch import nn
from torch._C._profiler import _RecordFunctionFast

from te_transform.execution.attach import runner_of
from te_transform.graph.module_calls import around_calls
from te_transform.plan.model import is_compiled

PREFIX = "te_transform.range "
STEP = "te_transform.step"


class Label(NamedTuple):
    """The owner of operations: a module by its path and class, or a fused site by its path and rule."""

    path: str
    kind: str
    rule: str = ""


OUTSIDE = Label("", "")  # operations outside of all modules, such as the loss


class Ranges:
    """The ranges of a model, by number, and the module call that runs in each thread."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._numbers: dict[Label, int] = {OUTSIDE: 0}
        self._calls = count()
        self._running = threading.local()

    def number(self, label: Label) -> int:
        """Return the number of a label."""
        return self._numbers.setdefault(label, len(self._numbers))

    @property
    def labels(self) -> list[Label]:
        """The labels by number."""
        return [*self._numbers]

    @property
    def running(self) -> list[tuple[int, int, Any]]:
        """The module calls of this thread, outermost first: label, number of the call, range."""
        if not hasattr(self._running, "calls"):
            self._running.calls = []
        return self._running.calls

    def enter(self, number: int) -> None:
        """Begin a range."""
        opened = _RecordFunctionFast(f"{PREFIX}{number}")
        opened.__enter__()
        self.running.append((number, next(self._calls), opened))

    def leave(self) -> None:
        """End the innermost range."""
        self.running.pop()[2].__exit__(None, None, None)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Put a range around each call of a module.

        Dynamo guards the hooks of modules inside of a converted model, and would capture again.
        """

        numbered = (
            (self.number(Label(path, type(module).__name__)), module)
            for path, module in _outside_of_graphs(self.model)
        )
        with around_calls(numbered, lambda number, *_: self.enter(number), lambda *_: self.leave()):
            try:
                yield
            finally:
                while self.running:  # left over by a forward that raised
                    self.leave()


def _outside_of_graphs(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules, each once, without those inside of compiled or converted ones."""
    hidden: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(prefix) for prefix in hidden):
            continue
        compiles_hooks = module._compiled_call_impl is not None
        if compiles_hooks or is_compiled(module) or runner_of(module) is not None:
            hidden.append(f"{path}." if path else "")
        if not compiles_hooks:
            yield path, module


def is_compiled_inside(model: nn.Module) -> bool:
    """Return True if torch.compile wraps the model or a module of it."""
    modules = model.modules()
    return any(m._compiled_call_impl is not None or is_compiled(m) for m in modules)
