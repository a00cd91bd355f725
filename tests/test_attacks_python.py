"""Attacks by a forward's Python state: attributes, modules, containers. Each may change after convert()."""

import functools
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from tests.attacks import Block, Pair, differ
from tests.models.tiny import WIDTH
from tests.reading import ABSENT, Options, reads

pytestmark = pytest.mark.usefixtures("at_any_size")


def through(modules: Iterable[nn.Module], x: Tensor) -> Tensor:
    for module in modules:
        x = module(x)
    return x


def late_or_one(model: Any, x: Tensor) -> float:
    try:
        return model.late
    except AttributeError:
        return 1.0


def item_or_one(model: Any, x: Tensor) -> float:
    try:
        return model.late["a"]
    except KeyError:
        return 1.0


def scaled(scale: float) -> float:
    return scale


def put(name: str, value: Any = 2.0, of: str = "") -> Callable[[nn.Module], None]:
    """Set an attribute of the model, or of what it holds at `of`."""

    def change(model: Any) -> None:
        for part in filter(None, of.split(".")):
            model = getattr(model, part)
        setattr(model, name, value)

    return change


def full(value: float = 2.0) -> Tensor:
    return torch.full((WIDTH,), value)


def array(value: float = 1.0) -> numpy.ndarray:
    return numpy.full(WIDTH, value, numpy.float32)


# Each case: what the forward reads, what `late` is at first (made for each model), and what changes.


def late(model: Any, x: Tensor) -> Any:
    return model.late


def late_or_default(model: Any, x: Tensor) -> Any:
    return getattr(model, "late", 1.0)


def late_called(model: Any, x: Tensor) -> Any:
    return 1.0 if model.late is None else model.late(x)


def late_or_none(model: Any, x: Tensor) -> Any:
    return 1.0 if model.late is None else model.late


def all_late(model: Any, x: Tensor) -> Tensor:
    return through(model.late, x)


def late_array(model: Any, x: Tensor) -> Tensor:
    return torch.from_numpy(model.late)


ATTRIBUTES = {
    "on the class": (lambda s, x: s.scale, ABSENT, put("scale", of="own_class")),
    "absent, read by getattr": (late_or_default, ABSENT, put("late")),
    "absent, set on the class": (late_or_default, ABSENT, put("late", of="own_class")),
    "absent, asked for by hasattr": (lambda s, x: 1.0 + hasattr(s, "late"), ABSENT, put("late")),
    "deleted": (late_or_default, lambda: 3.0, lambda m: delattr(m, "late")),
    "a property": (lambda s, x: s.half, ABSENT, lambda m: setattr(m, "doubled", m.doubled * 3)),
    "an int": (late, lambda: 1, put("late", 3)),
    "an int, then a float": (late, lambda: 1, put("late", 1.5)),
    "a float, then a tensor": (late, lambda: 1.0, put("late", torch.tensor(2.0))),
    "a dtype": (lambda s, x: x.to(s.late).float(), lambda: torch.float32, put("late", torch.bfloat16)),
    "None, then a number": (late_or_none, lambda: None, put("late")),
    "a method of the class": (lambda s, x: s.method(), ABSENT, put("method", lambda s: 2.0, of="own_class")),
    "a method of the instance": (lambda s, x: s.method(), ABSENT, put("method", lambda: 2.0)),
    "a function": (late_called, lambda: torch.tanh, put("late", torch.sigmoid)),
    "a child's attribute": (lambda s, x: s.norm.late, ABSENT, put("late", of="norm")),
    "a child's class": (late_called, nn.Tanh, put("__class__", nn.Sigmoid, of="late")),
    "its own training": (lambda s, x: 1.0 + s.training, ABSENT, lambda m: m.eval()),
    "a parameter's attribute": (
        lambda s, x: getattr(s.mlp.fc1.weight, "late", 1.0),
        ABSENT,
        put("late", of="mlp.fc1.weight"),
    ),
}

MODULES = {
    "None, then a child": (
        lambda s, x: 1.0 if s.child is None else s.child(x),
        ABSENT,
        lambda m: m.register_module("child", nn.Tanh()),
    ),
    "a child, then None": (late_called, nn.Tanh, put("late", None)),
    "absent, then a child": (
        lambda s, x: s.late(x) if hasattr(s, "late") else 1.0,
        ABSENT,
        lambda m: m.add_module("late", nn.Tanh()),
    ),
    "ModuleList grows": (all_late, lambda: nn.ModuleList([nn.Tanh()]), lambda m: m.late.append(nn.Sigmoid())),
    "ModuleList shrinks": (
        all_late,
        lambda: nn.ModuleList([nn.Tanh(), nn.Sigmoid()]),
        lambda m: m.late.__delitem__(0),
    ),
    "ModuleDict grows": (
        lambda s, x: through(s.late.values(), x),
        lambda: nn.ModuleDict({"a": nn.Tanh()}),
        lambda m: m.late.update({"b": nn.Sigmoid()}),
    ),
    "a plain list of modules": (all_late, lambda: [nn.Tanh()], lambda m: m.late.append(nn.Sigmoid())),
    "None, then a buffer": (
        lambda s, x: 1.0 if s.buffer is None else s.buffer,
        ABSENT,
        lambda m: m.register_buffer("buffer", full()),
    ),
    "a buffer written to": (late, lambda: nn.Buffer(full()), lambda m: m.late.mul_(2)),
    "a buffer replaced": (late, lambda: nn.Buffer(full()), put("late", full(4.0))),
    "None, then a parameter": (
        lambda s, x: 1.0 if s.parameter is None else s.parameter,
        ABSENT,
        lambda m: m.register_parameter("parameter", nn.Parameter(full())),
    ),
    "a tensor written to": (late, full, lambda m: m.late.mul_(2)),
    "a tensor's data": (late, full, put("data", full(4.0), of="late")),
}

CONTAINERS = {
    "a config": (lambda s, x: s.late.scale, lambda: SimpleNamespace(scale=1.0), put("scale", of="late")),
    "an object's truth": (lambda s, x: 1.0 if s.late else 2.0, Options, put("scale", of="late")),
    "an object's length": (lambda s, x: len(s.late), Options, lambda m: m.late.items.append(1)),
    "a dict's default": (lambda s, x: s.late.get("a", 1.0), dict, lambda m: m.late.update(a=2.0)),
    "a dict's size": (lambda s, x: 1.0 + len(s.late), dict, lambda m: m.late.update(a=2.0)),
    "a tensor in a dict": (
        lambda s, x: s.late["a"],
        lambda: {"a": full()},
        lambda m: m.late.update(a=full(4.0)),
    ),
    "a list's sum": (lambda s, x: sum(s.late), lambda: [1.0], lambda m: m.late.append(1.0)),
    "a tuple": (lambda s, x: s.late[0], lambda: (1.0,), put("late", (2.0,))),
    "a set": (lambda s, x: 1.0 + ("a" in s.late), set, lambda m: m.late.add("a")),
    "an array written to": (late_array, array, lambda m: m.late.__setitem__(0, 2.0)),
    "an array's number": (lambda s, x: float(s.late[0]), array, lambda m: m.late.__setitem__(0, 2.0)),
}


# What such code does not find has no guard of dynamo's; graph/questions.py adds one.
MISSING = {
    "absent, asked for in vars": (lambda s, x: 1.0 + ("late" in vars(s)), ABSENT, put("late")),
    "absent, read from __dict__": (lambda s, x: s.__dict__.get("late", 1.0), ABSENT, put("late")),
    "absent, AttributeError": (late_or_one, ABSENT, put("late")),
    "absent, AttributeError of a child": (lambda s, x: late_or_one(s.mlp, x), ABSENT, put("late", of="mlp")),
    "absent, KeyError": (item_or_one, dict, lambda m: m.late.update(a=2.0)),
    "absent on a function": (
        lambda s, x: getattr(s.late, "scale", 1.0),
        lambda: lambda: None,
        put("scale", of="late"),
    ),
}


CASES = ATTRIBUTES | MODULES | CONTAINERS | MISSING


@pytest.mark.parametrize("name", CASES)
def test_attributes_that_a_forward_reads_may_change(name: str) -> None:
    read, first, change = CASES[name]
    reads(read, first).attack(change)


# A forward that is no function of its class


class ByMode(Block):
    @property
    def forward(self) -> Callable[[Tensor], Tensor]:
        return self.mlp if self.training else self.norm


class Partial(Block):
    def shifted(self, x: Tensor, by: float = 0.0) -> Tensor:
        return self.mlp(self.norm(x)) + by

    forward = functools.partialmethod(shifted, by=2.0)


class ByType(Block):
    @functools.singledispatchmethod
    def forward(self, x: Any) -> Tensor:
        raise NotImplementedError

    @forward.register
    def _(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x))


@pytest.mark.parametrize("kind", [ByMode, Partial, ByType])
def test_a_forward_may_be_any_descriptor(kind: type[nn.Module]) -> None:
    pair = Pair.of(kind)
    pair.agree()
    for model in pair.models:
        model.eval()
    pair.agree()


@pytest.mark.parametrize("late", [("__defaults__", (3.0,)), ("__kwdefaults__", {"other": 3.0})])
def test_a_forward_may_have_other_defaults_later(late: tuple[str, Any]) -> None:
    def forward(self: Block, x: Tensor, scale: float = 1.0, *, other: float = 1.0) -> Tensor:
        return self.mlp(self.norm(x)) * scale * other

    pair = Pair.of(type("Scales", (Block,), {"forward": forward}))
    before = pair.agree()
    setattr(forward, *late)
    assert differ(before, pair.agree())
