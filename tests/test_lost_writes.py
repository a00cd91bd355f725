"""A captured forward that writes to Python objects reads and leaves the same values as the original."""

from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from te_transform.graph.capture import capture

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """A product, scaled by what `change` returns after it has changed the attribute `held`."""

    def __init__(self, held: Any):
        super().__init__()
        self.product, self.held = nn.Linear(8, 8), held

    change: Callable[..., Any]

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x) * self.change()


class Counts:
    """An object whose property and class count."""

    total, items = 1.0, [1.0]

    def __init__(self) -> None:
        self.hidden, self.writes = 1.0, 0.0

    @property
    def value(self) -> float:
        return self.hidden

    @value.setter
    def value(self, value: float) -> None:
        self.hidden, self.writes = value, self.writes + 1


class Pair(NamedTuple):
    one: float
    other: float


def first_to_end(model: Model) -> float:
    model.held.move_to_end(next(iter(model.held)))
    return next(iter(model.held.values()))


def last_to_begin(model: Model) -> float:
    model.held.move_to_end([*model.held][-1], last=False)
    return next(iter(model.held.values()))


def by_setter(model: Model) -> float:
    model.held.value = model.held.value + 1
    return model.held.hidden + 10 * model.held.writes


def of_class(model: Model) -> float:
    type(model.held).total = type(model.held).total + 1
    return model.held.total


def item_of_class(model: Model) -> float:
    type(model.held).items[0] += 1
    return model.held.items[0]


def made(model: Model) -> float:
    return model.held().total


def replaced(model: Model) -> float:
    model.held = model.held._replace(one=model.held.one + 1)
    return model.held.one + 10 * model.held.other


def read_later(held: Counts) -> float:
    held.writes += 1
    return held.hidden + held.writes


def a_method(model: Model) -> float:
    if not hasattr(model.held, "read"):
        model.held.read = read_later.__get__(model.held)
    return model.held.read()


def a_method_of_the_model(model: Model) -> float:
    model.read = read_later.__get__(model.held, Counts)
    return model.read()


def in_order() -> collections.OrderedDict[str, float]:
    return collections.OrderedDict(a=1.0, b=2.0, c=3.0)


def counting() -> Counts:
    return type("Counting", (Counts,), {"items": [1.0]})()


def closing() -> type:
    calls: list[float] = []

    class Closes:
        def __init__(self) -> None:
            calls.append(1.0)
            self.total = sum(calls)

    return Closes


def with_default() -> type:
    class Appends:
        def __init__(self, calls: list[float] = []) -> None:  # noqa: B006
            calls.append(1.0)
            self.total = sum(calls)

    return Appends


@pytest.mark.parametrize(
    ("change", "held"),
    [
        (first_to_end, in_order),
        (last_to_begin, in_order),
        (by_setter, Counts),
        (of_class, counting),
        (item_of_class, counting),
        (made, closing),
        (made, with_default),
        (a_method, Counts),
        (a_method_of_the_model, Counts),
        (replaced, functools.partial(Pair, 1.0, 2.0)),
    ],
    ids=lambda each: getattr(each, "__name__", "pair"),
)
def test_writes_are_read_and_stay(change: Callable[..., Any], held: Callable[[], Any]) -> None:
    model = type("Changes", (Model,), {"change": change})(held())
    twin = copy.deepcopy(model)
    twin.held = held()  # a copy would share its class
    run = capture(type(model).forward, lambda graph, inputs: graph.forward)
    for _ in range(3):
        assert torch.equal(run(model, X), twin(X))
    assert change(model) == change(twin)


def test_writes_before_and_after_a_hook_stay() -> None:
    class Counted(Model):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                self.held += 1.0
                x = self.product(x)
                x.register_hook(lambda grad: 2 * grad)
                x = x * self.held
            return x

    model, twin = Counted(0.0), Counted(0.0)
    twin.load_state_dict(model.state_dict())
    run = capture(Counted.forward, lambda graph, inputs: graph.forward)
    for _ in range(3):
        assert torch.equal(run(model, X), twin(X))
        assert model.held == twin.held
