"""Compare the dropouts of two models by their probabilities, since comparisons run without dropout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from te_transform.execution.modes import GraphMode
from te_transform.graph.module_calls import around_calls
from te_transform.verify.judged import active_probability
from te_transform.verify.names import plain_modules


class Dropouts(GraphMode):
    """The function mode that collects the probabilities of all active dropouts, by the path of the module.

    Attributes:
        calls: The number of calls by path and probability; the path is "" without `watching()`.
        running: The paths of the modules that run now, outermost first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, float]] = Counter()
        self.running: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if probability := active_probability(func, args, kwargs):
            self.calls[self.running[-1] if self.running else "", probability] += 1
        return func(*args, **kwargs)

    @property
    def probabilities(self) -> list[float]:
        """All probabilities, in order."""
        return sorted({probability for _, probability in self.calls})

    def watching(self, model: nn.Module) -> AbstractContextManager[None]:
        """Follow the calls of the modules, for their paths."""

        def start(path: str, *_: Any) -> None:
            self.running.append(path)

        def end(*_: Any) -> None:
            self.running.pop()

        return around_calls(plain_modules(model), start, end)


def first_other_dropout(first: Dropouts, second: Dropouts, rename: Callable[[str], str | None]) -> str:
    """Return the first path in the first model with another probability, or one of the second's, or ""."""
    own = {(rename(path), probability): path for path, probability in first.calls}
    missing = (path for key, path in own.items() if key not in second.calls)
    return next(missing, next((path for path, p in second.calls if (path, p) not in own), ""))
