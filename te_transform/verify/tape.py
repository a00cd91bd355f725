"""Record what enters and leaves each module in a run, and the gradients there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from te_transform.graph.module_calls import around_calls
from te_transform.verify.names import plain_modules
from te_transform.verify.outputs import Visible
from te_transform.verify.replay import named_tensors
from te_transform.verify.variations import only_hides


class Moment(NamedTuple):
    """The start or the end of a call of a module.

    Attributes:
        path: The path of the module.
        number: The number of earlier calls of this module.
        is_start: True for what enters the module, False for what leaves it.
    """

    path: str
    number: int
    is_start: bool


@dataclass
class Tape:
    """The tensors at each moment of one run, except masks, in the order of the run, and their gradients.

    Attributes:
        model: The model that runs.
        rename: The function from paths in `model` to paths of moments; None leaves a module out.
        visible: The function that hides values at padding.
        values: The tensors by moment.
        gradients: Their gradients, by moment and position.
        trained: The tensors that require a gradient, by moment and position.
        callers: The path of the module and of the module that calls it, in `model`, by moment.
        running: The paths of the modules that run now, outermost first.
        calls: The number of finished calls by path.
    """

    model: nn.Module
    rename: Callable[[str], str | None]
    visible: Visible
    values: dict[Moment, list[Tensor]] = field(default_factory=dict)
    gradients: dict[tuple[Moment, int], Tensor] = field(default_factory=dict)
    trained: set[tuple[Moment, int]] = field(default_factory=set)
    callers: dict[Moment, tuple[str, str]] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)

    def recording(self) -> AbstractContextManager[None]:
        """Record the modules' calls in this context, which is the forward, and gradients in the backward."""
        return around_calls(plain_modules(self.model), self._start, self._end, raising=False)

    def _start(self, path: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        # a new view, whose gradient comes from this call alone
        named = {name: _trained_view(value) for name, value in kwargs.items()}
        views = tuple(map(_trained_view, args)), named
        self._record(Moment(path, self.calls[path], True), views)
        self.running.append(path)
        return views

    def _end(self, path: str, module: nn.Module, args: tuple, output: Any) -> None:
        while self.running.pop() != path:
            pass  # a module that raised, and whose caller went on
        self._record(Moment(path, self.calls[path], False), output)
        self.calls[path] += 1

    def _record(self, at: Moment, outputs: Any) -> None:
        if (name := self.rename(at.path)) is None:
            return
        moment = at._replace(path=name)
        tensors = [t for _, t in named_tensors(outputs) if t.dtype is not torch.bool and not only_hides(t)]
        self.values[moment] = [self.visible(at.path, tensor.detach()).clone() for tensor in tensors]
        self.callers[moment] = at.path, self.running[-1] if self.running else ""
        for place, tensor in enumerate(tensors):
            if tensor.requires_grad:
                self.trained.add((moment, place))
                tensor.register_hook(partial(self._note, (moment, place), at.path))

    def _note(self, key: tuple[Moment, int], path: str, gradient: Tensor | None) -> None:
        if gradient is not None:  # quantized ops hand out none
            self.gradients[key] = self.visible(path, gradient.detach()).clone()


def _trained_view(argument: Any) -> Any:
    is_trained = isinstance(argument, Tensor) and argument.requires_grad and argument.is_floating_point()
    return argument.view_as(argument) if is_trained else argument
