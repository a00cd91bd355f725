"""The captured forwards of a converted model, by class."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from torch import nn

from te_transform.execution.captured_graph import CapturedGraph
from te_transform.execution.classes import user_class
from te_transform.plan.match import Site

Capture = Callable[..., Any]
Checker = Callable[[CapturedGraph, Sequence[Any]], dict[Site, str]]
_CODE_AND_DEFAULTS = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")


class Captures:
    """The captured forward of each class, until a method on the path of its calls is replaced.

    Dynamo guards the class of a module, but not the forward of the class, nor the methods that call it. A
    forward is also captured anew if it gets other code or default arguments.

    Attributes:
        graphs: the graphs that were captured so far.
        checker: finds the wrong sites of a graph at its first call; None if checks are off.
    """

    def __init__(self, checker: Checker | None = None):
        self.checker = checker
        self.graphs: list[CapturedGraph] = []
        self.runs: dict[type, tuple[Capture, tuple[Any, ...]]] = {}  # with code and defaults of the forward
        self.methods: dict[type, tuple[Any, ...]] = {}

    def of(self, kind: type, forward: Callable[..., Any], capture: Callable[[], Capture]) -> Capture:
        """Return the captured forward of a class. Capture it if there is none with this code and defaults."""
        run, parts = self.runs.get(kind, (None, ()))
        now = _CODE_AND_DEFAULTS(forward) if isinstance(forward, FunctionType) else ()
        if run is None or not all(map(operator.is_, now, parts)):
            run = capture()
            self.runs[kind] = run, now
        return run

    def forget(self, kind: type) -> None:
        """Discard the captured forward of a class. It is captured anew at its next call."""
        self.runs.pop(kind, None)

    def clear(self) -> None:
        """Discard all captured forwards."""
        self.runs.clear()

    def note_methods(self, model: nn.Module) -> None:
        """Note the current methods on the path of the modules' calls."""
        self.methods |= {kind: _methods_called(kind) for kind in map(user_class, model.modules())}

    def forget_replaced(self) -> None:
        """Discard all captured forwards if a method on the path of the modules' calls was replaced."""
        if list(map(_methods_called, self.methods)) != list(self.methods.values()):
            self.runs.clear()
            self.methods.clear()


def _methods_called(kind: type) -> tuple[Any, ...]:
    """Return the methods on the path of a class's calls.

    A descriptor may return another forward at each access; such a forward is ignored.
    """
    forward = kind.forward if kind.forward is kind.forward else None
    return kind.__call__, kind._call_impl, forward
