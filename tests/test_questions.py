"""Questions that dynamo folds into a graph without a guard: a later call that answers otherwise is captured
anew."""

import abc
import collections
import contextlib
import copy
import dataclasses
import enum
import math
import operator
import os
import sys
import types
import typing
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._dynamo.variables.builder import VariableBuilder

from te_transform.graph.capture import capture

X = torch.linspace(-1.0, 1.0, 16).view(2, 8)
PYTHON_MODULE = types.ModuleType("a_module_of_the_users")
SHARED: dict[str, float] = {}
ZERO = 0.0


@pytest.fixture(scope="module", autouse=True)
def captured_by_others() -> None:
    """Dynamo keeps its own functions for each type of value from its first capture on."""
    VariableBuilder._type_dispatch_impl.cache_clear()
    torch.compile(lambda x: x + 1.0, backend="eager")(X)


class Model(nn.Module):
    """A product, scaled by what `read` gets from the model, `held`, and the keyword arguments."""

    def __init__(self, held: Any = None):
        super().__init__()
        self.product, self.held = nn.Linear(8, 8), held
        self.child, self.identity = Child(), nn.Identity()

    read: Callable[..., Any]

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.product(x) * self.read(self.held, kwargs)


def or_one(look_up: Callable[..., Any], *errors: type[Exception]) -> Callable[..., Any]:
    """A look-up that may fail, as a forward asks with `try`."""

    errors = errors or (KeyError,)

    def read(model: Model, held: Any, kwargs: dict[str, Any]) -> Any:
        try:
            return look_up(model, held, kwargs)
        except errors:
            return 1.0

    return read


def attribute_or_one(look_up: Callable[..., Any]) -> Callable[..., Any]:
    return or_one(look_up, AttributeError)


def suppressed(model: Model, held: Any, kwargs: dict[str, Any]) -> float:
    scale = 1.0
    with contextlib.suppress(KeyError):
        scale = kwargs["scale"]
    return scale


def matched(model: Model, held: Any, kwargs: dict[str, Any]) -> float:
    match kwargs:
        case {"scale": scale}:
            return scale
    return 1.0


def check(read: Callable[..., Any], held: Any, change: Callable[[Any], Any], **later: Any) -> int:
    """A captured forward gives the original's numbers before and after a change, in graphs that stay.

    Returns the number of graphs.
    """
    model, graphs = type("Reads", (Model,), {"read": read})(held), []
    run = capture(type(model).forward, lambda graph, inputs: graphs.append(graph) or graph.forward)
    before = model(X)
    assert torch.equal(run(model, X), before)
    change(model)
    expected = model(X, **later)
    assert not torch.equal(expected, before)  # the change is heard at all
    assert torch.equal(run(model, X, **later), expected)
    captured = len(graphs)
    assert torch.equal(run(model, X, **later), expected)
    assert len(graphs) == captured
    return captured


# Keyword arguments that are absent at capture

KEYWORDS = {
    "KeyError": or_one(lambda m, held, kwargs: kwargs["scale"]),
    "LookupError": or_one(lambda m, held, kwargs: kwargs["scale"], LookupError),
    "suppress": suppressed,
    "match": matched,
    "repr()": lambda m, held, kwargs: float(len(repr(kwargs))),
    "itemgetter": or_one(lambda m, held, kwargs: operator.itemgetter("scale")(kwargs)),
    "ChainMap": or_one(lambda m, held, kwargs: collections.ChainMap(kwargs, {"scale": 1.0})["scale"]),
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_a_keyword_may_be_given_later(name: str) -> None:
    check(KEYWORDS[name], None, lambda model: None, scale=5.0)


# Keys that are absent at capture


def put(key: Any = "a", value: Any = 3.0) -> Callable[[Model], None]:
    return lambda model: model.held.__setitem__(key, value)


KEYS = {
    "dict": (lambda m, held, kwargs: held["a"], dict, put()),
    "a key that is computed": (lambda m, held, kwargs: held[m.product], dict, lambda m: put(m.product)(m)),
    "OrderedDict": (lambda m, held, kwargs: held["a"], collections.OrderedDict, put()),
    "UserDict": (lambda m, held, kwargs: held["a"], collections.UserDict, put()),
    "ChainMap": (
        lambda m, held, kwargs: held["a"],
        lambda: collections.ChainMap({}, {"a": 1.0}),
        put(),
    ),
    "defaultdict without a factory": (
        lambda m, held, kwargs: held["a"], lambda: collections.defaultdict(None), put(),
    ),
    "defaultdict with a factory": (
        lambda m, held, kwargs: held["a"], lambda: collections.defaultdict(float), put(),
    ),
    "ModuleDict": (
        lambda m, held, kwargs: held["a"](X).sum(),
        nn.ModuleDict,
        lambda m: m.held.update({"a": nn.Tanhshrink()}),
    ),
    "_modules": (
        lambda m, held, kwargs: m._modules["late"](X).sum(),
        lambda: None,
        lambda m: m.add_module("late", nn.Tanhshrink()),
    ),
    "a tuple with a module": (
        lambda m, held, kwargs: held.get((m.product, 1), 1.0),
        dict,
        lambda m: put((m.product, 1))(m),
    ),
    "a weakly held module": (
        or_one(lambda m, held, kwargs: held[m.product]),
        weakref.WeakKeyDictionary,
        lambda m: put(m.product)(m),
    ),
    "a dict of the process": (
        lambda m, held, kwargs: SHARED["a"], lambda: None, lambda m: SHARED.update(a=3.0),
    ),
    "all keys": (lambda m, held, kwargs: 1.0 + len(list(held)), dict, put()),
    "all items of a set": (lambda m, held, kwargs: 1.0 + len([*held]), set, lambda m: m.held.add(1)),
    "the first key": (
        lambda m, held, kwargs: 1.0 + list(held).index("a"),
        lambda: {"a": 1.0, "b": 1.0},
        lambda m: put(value=m.held.pop("a"))(m),
    ),
    "an item that is gone": (
        lambda m, held, kwargs: held["a"], lambda: {"a": 3.0}, lambda m: m.held.clear(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_a_key_may_come_or_go(name: str) -> None:
    look_up, held, change = KEYS[name]
    try:
        check(or_one(look_up), held(), change)
    finally:
        SHARED.clear()


@pytest.mark.parametrize("factory", [float, None])
def test_a_default_dict_may_be_asked_by_a_method(factory: Callable[[], float] | None) -> None:
    look_up = or_one(lambda m, held, kwargs: held.__getitem__("a"))
    assert check(look_up, collections.defaultdict(factory), put()) == 2  # graphs


# Keys and items that compare themselves


class Own:
    """A key of a cache."""

    def __init__(self, width: int):
        self.width = width

    def __hash__(self) -> int:
        return hash(self.width)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own) and self.width == other.width


@dataclasses.dataclass(frozen=True)
class Partly:
    """A dataclass of which one field is compared."""

    width: int
    name: str = dataclasses.field(compare=False)


OWN = {
    "a key": (lambda m, held, kwargs: held.get(Own(8), 1.0), lambda: {Own(8): 3.0}),
    "a new key": (lambda m, held, kwargs: {Own(len(held)): 3.0}.get(Own(1), 1.0), lambda: {Own(8): 3.0}),
    "a key in a tuple": (lambda m, held, kwargs: held.get((Own(8), 1), 1.0), lambda: {(Own(8), 1): 3.0}),
    "a key of a defaultdict": (
        lambda m, held, kwargs: 1.0 + held[Own(8)], lambda: collections.defaultdict(float, {Own(8): 3.0}),
    ),
    "an item": (lambda m, held, kwargs: 1.0 + (Own(8) in held), lambda: {Own(8)}),
    "a dataclass": (lambda m, held, kwargs: held.get(Partly(8, "a"), 1.0), lambda: {Partly(8, "b"): 3.0}),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_a_key_may_have_an_equal_one(name: str) -> None:
    look_up, held = OWN[name]
    check(look_up, held(), lambda model: model.held.clear())


def test_a_key_may_equal_another_one_later() -> None:
    key = type("Same", (Own,), {"__hash__": lambda self: 8})(8)
    check(lambda m, held, kwargs: 1.0 + (Own(8) in held), {key}, lambda model: setattr(key, "width", 3))


# Attributes that are absent at capture


class Falls:
    """Has an answer for names that it does not hold."""

    def __getattr__(self, name: str) -> float:
        if name.startswith("__"):
            raise AttributeError(name)
        return 1.0


class FallsModule(nn.Linear):
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name != "late":
                raise
            return 1.0


class Slots:
    __slots__ = ("late",)


@typing.runtime_checkable
class HasLate(typing.Protocol):
    late: float


class Registers(abc.ABC):
    @abc.abstractmethod
    def scale(self) -> float: ...


def late(model: Model, held: Any, kwargs: dict[str, Any]) -> Any:
    return held.late


def set_late(model: Model) -> None:
    model.held.late = 3.0


def function() -> None: ...


ATTRIBUTES = {
    "of an object": (attribute_or_one(late), types.SimpleNamespace, set_late),
    "of a module": (attribute_or_one(late), lambda: nn.Linear(1, 1), set_late),
    "a buffer": (
        attribute_or_one(late),
        lambda: nn.Linear(1, 1),
        lambda m: m.held.register_buffer("late", torch.tensor(3.0)),
    ),
    "of a class": (attribute_or_one(late), lambda: type("Own", (), {}), set_late),
    "of an object's class": (
        attribute_or_one(late),
        lambda: type("Own", (), {})(),
        lambda m: setattr(type(m.held), "late", 3.0),
    ),
    "of a slot": (attribute_or_one(late), Slots, set_late),
    "of a function": (attribute_or_one(late), lambda: function, set_late),
    "of a parameter": (
        attribute_or_one(lambda m, held, kwargs: m.product.weight.late),
        lambda: None,
        lambda m: setattr(m.product.weight, "late", 3.0),
    ),
    "of a Python module": (attribute_or_one(late), lambda: PYTHON_MODULE, set_late),
    "hasattr of a Python module": (
        lambda m, held, kwargs: 1.0 + hasattr(held, "late"), lambda: PYTHON_MODULE, set_late,
    ),
    "__getattr__": (late, Falls, set_late),
    "__getattr__, then on the class": (
        late, type("Own", (Falls,), {}), lambda m: setattr(type(m.held), "late", 3.0),
    ),
    "__getattr__ of a module": (late, lambda: FallsModule(1, 1), set_late),
    "__getattr__ of a module, then a buffer": (
        late, lambda: FallsModule(1, 1), lambda m: m.held._buffers.update(late=torch.tensor(3.0)),
    ),
    "of a protocol": (
        lambda m, held, kwargs: 1.0 + isinstance(held, HasLate), types.SimpleNamespace, set_late,
    ),
    "of a protocol, or a number": (
        lambda m, held, kwargs: 1.0 + isinstance(held, (int, HasLate)), types.SimpleNamespace, set_late,
    ),
    "in vars()": (lambda m, held, kwargs: 1.0 + ("late" in vars(held)), types.SimpleNamespace, set_late),
    "in __dict__, of the model": (
        lambda m, held, kwargs: 1.0 + ("late" in m.__dict__), lambda: None, lambda m: setattr(m, "late", 1),
    ),
    "__dict__.get": (lambda m, held, kwargs: held.__dict__.get("late", 1.0), types.SimpleNamespace, set_late),
    "how many there are": (lambda m, held, kwargs: 1.0 + len(vars(held)), types.SimpleNamespace, set_late),
    "all that there are": (
        lambda m, held, kwargs: 1.0 + sum(vars(held).values()), types.SimpleNamespace, set_late,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_may_come_later(name: str) -> None:
    read, held, change = ATTRIBUTES[name]
    try:
        check(read, held(), change)
    finally:
        for shared in (PYTHON_MODULE, function):
            vars(shared).pop("late", None)


class Config(collections.OrderedDict):
    """A dict with attributes, as configs of diffusers. Dynamo guards the order of its keys."""


@pytest.mark.parametrize("where", [lambda m, held: held, lambda m, held: m.__dict__["held"]])
def test_a_dict_whose_order_is_guarded_may_get_an_attribute(where: Callable[..., Any]) -> None:
    def read(model: Model, held: Any, kwargs: dict[str, Any]) -> float:
        return where(model, held)["width"] + hasattr(where(model, held), "late")

    assert check(read, Config(width=8.0), set_late) == 2  # the graph before the change, and the one after


class Empty(dict):
    """A dict with an attribute."""

    value = 1.0


EMPTY = {
    "an attribute": (lambda m, held, kwargs: held.value, lambda m: setattr(m.held, "value", 3.0)),
    "a key": (lambda m, held, kwargs: 1.0 + len([*held]), put()),
}


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_dict_with_attributes_may_change(name: str) -> None:
    read, change = EMPTY[name]
    check(read, Empty(), change)


# Classes


class Kind(enum.Enum):
    FIRST = 1.0
    OTHER = 3.0


class Meta(type):
    factor, factors, kind_of, unknown = 1.0, [1.0], "one", None

    def of_metaclass(cls) -> Any:
        return cls.factor


class Helper(metaclass=Meta):
    value, kind = 1.0, Kind.FIRST

    def method(self) -> float:
        return 1.0

    @property
    def described(self) -> float:
        return 1.0

    @classmethod
    def of_class(cls) -> float:
        return 1.0

    @staticmethod
    def static(*_: Any) -> float:
        return 1.0

    def __len__(self) -> int:
        return 1

    def __call__(self) -> float:
        return 1.0

    def __getattr__(self, name: str) -> float:
        return 1.0


class Derived(Helper):
    def inherited(self) -> float:
        return super().method()


class OtherBase(Helper):
    def method(self) -> float:
        return 3.0


class Child(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x

    def scale(self) -> float:
        return 1.0


CLASSES = {  # what the forward asks, the class that defines it, the name, and what is found there later
    "a method": (lambda m, held, kwargs: held.method(), Helper, "method", lambda self: 3.0),
    "an override": (lambda m, held, kwargs: held.method(), Derived, "method", lambda self: 3.0),
    "super()": (lambda m, held, kwargs: held.inherited(), Helper, "method", lambda self: 3.0),
    "a property": (lambda m, held, kwargs: held.described, Helper, "described", property(lambda self: 3.0)),
    "a class method": (
        lambda m, held, kwargs: type(held).of_class(), Helper, "of_class", classmethod(lambda cls: 3.0),
    ),
    "a static method": (lambda m, held, kwargs: held.static(), Helper, "static", staticmethod(lambda: 3.0)),
    "a value": (lambda m, held, kwargs: held.value, Derived, "value", 3.0),
    "a value of a class": (lambda m, held, kwargs: type(held).value, Helper, "value", 3.0),
    "a value of a global class": (lambda m, held, kwargs: Helper.value, Helper, "value", 3.0),
    "an enum of a class": (lambda m, held, kwargs: Helper.kind.value, Helper, "kind", Kind.OTHER),
    "a value of a metaclass": (lambda m, held, kwargs: Helper.factor, Meta, "factor", 3.0),
    "a string of a metaclass": (
        lambda m, held, kwargs: 1.0 if Helper.kind_of == "one" else 3.0, Meta, "kind_of", "two",
    ),
    "None of a metaclass": (lambda m, held, kwargs: Helper.unknown or 1.0, Meta, "unknown", 3.0),
    "a list of a metaclass": (lambda m, held, kwargs: type(held).factors[0], Meta, "factors", [3.0]),
    "a value that hides one of a metaclass": (lambda m, held, kwargs: Helper.factor, Helper, "factor", 3.0),
    "a method of a metaclass": (lambda m, held, kwargs: Helper.of_metaclass(), Meta, "factor", 3.0),
    "a new method of a metaclass": (
        lambda m, held, kwargs: Helper.of_metaclass(), Meta, "of_metaclass", lambda cls: 3.0,
    ),
    "len()": (lambda m, held, kwargs: float(len(held)), Derived, "__len__", lambda self: 3),
    "a call": (lambda m, held, kwargs: held(), Derived, "__call__", lambda self: 3.0),
    "__getattr__": (lambda m, held, kwargs: held.missing, Derived, "__getattr__", lambda self, name: 3.0),
    "a new object": (lambda m, held, kwargs: Derived().method(), Helper, "method", lambda self: 3.0),
    "a method of a module": (lambda m, held, kwargs: m.child.scale(), Child, "scale", lambda self: 3.0),
    "the forward of a module": (
        lambda m, held, kwargs: m.child(torch.ones(())), Child, "forward", lambda self, x: 3.0 * x,
    ),
    "the forward of PyTorch's": (
        lambda m, held, kwargs: m.identity(torch.ones(())), nn.Identity, "forward", lambda self, x: 3.0 * x,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_may_define_something_else_later(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, changed, attribute, later = CLASSES[name]

    def change(model: Model) -> None:
        monkeypatch.setattr(changed, attribute, later, raising=False)

    check(read, Derived(), change)


SPECIAL = {  # what the forward asks by a special method that a class does not define yet
    "__len__": (or_one(lambda m, held, kwargs: 1.0 + len(held), TypeError), lambda self: 2),
    "__bool__": (lambda m, held, kwargs: 1.0 if held else 2.0, lambda self: False),
    "__eq__": (lambda m, held, kwargs: 1.0 + (held == 3), lambda self, other: True),
    "__contains__": (or_one(lambda m, held, kwargs: 1.0 + (3 in held), TypeError), lambda self, key: True),
    "__getitem__": (or_one(lambda m, held, kwargs: held[0], TypeError), lambda self, key: 3.0),
    "__add__": (or_one(lambda m, held, kwargs: held + 1, TypeError), lambda self, other: 3.0),
    "__call__": (lambda m, held, kwargs: 1.0 + callable(held), lambda self: None),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_a_class_may_define_an_operator_later(name: str) -> None:
    read, method = SPECIAL[name]
    check(read, type("Plain", (), {})(), lambda model: setattr(type(model.held), name, method))


@pytest.mark.parametrize("base", [set, frozenset, collections.OrderedDict, int, str])
def test_a_class_of_values_may_define_its_truth(base: type) -> None:
    kind = type("Own", (base,), {"__bool__": lambda self: self.is_true, "is_true": True})
    check(
        lambda m, held, kwargs: 1.0 if held else 2.0,
        kind(),
        lambda model: setattr(model.held, "is_true", False),
    )


@pytest.mark.parametrize("base", [dict, collections.OrderedDict, list, tuple, set, collections.deque, str])
def test_an_empty_object_is_false(base: type) -> None:
    kind = type("Own", (base,), {})
    check(
        lambda m, held, kwargs: 1.0 if held else 2.0,
        kind(),
        lambda model: setattr(model, "held", kind({"a": 1.0})),
    )


def test_a_class_may_define_an_operator_in_place_of_another_attribute() -> None:
    """The class has as many attributes as before."""
    read, method = SPECIAL["__bool__"]

    def change(model: Model) -> None:
        del type(model.held).other
        type(model.held).__bool__ = method

    check(read, type("Plain", (), {"other": 1})(), change)


def test_a_class_attribute_that_no_forward_reads_may_change() -> None:
    """The graph stays, and a later change of a method is still noticed."""
    plain, graphs = type("Plain", (), {"calls": 0, "scale": lambda self: 2.0}), []
    held = plain()
    run = capture(
        lambda x: x * (held.scale() if held else 3.0),
        lambda graph, inputs: graphs.append(graph) or graph.forward,
    )
    for calls in range(3):
        plain.calls = calls
        torch.testing.assert_close(run(X), X * 2.0)
    assert len(graphs) == 1
    plain.__bool__ = SPECIAL["__bool__"][1]
    torch.testing.assert_close(run(X), X * 3.0)


def test_a_forward_that_enters_a_mode_is_one_graph() -> None:
    """As transformers enters one to compute a mask with tensors as indices."""
    graphs: list[Any] = []

    def forward(x: Tensor) -> Tensor:
        with TransformGetItemToIndex():
            return torch.vmap(lambda index: x[index] * 2.0)(torch.arange(len(x)))

    run = capture(forward, lambda graph, inputs: graphs.append(graph) or graph.forward)
    torch.testing.assert_close(run(X), X * 2.0)
    assert len(graphs) == 1


@pytest.mark.parametrize("asked", [types.GenericAlias, (types.GenericAlias, int), int | Registers])
def test_classes_that_describe_types_are_asked_in_one_graph(asked: Any) -> None:
    """types.GenericAlias has a slot named as the list of classes in a union is, __args__."""
    graphs: list[Any] = []
    held = type("Plain", (), {})()
    run = capture(
        lambda x: x * 2.0 if isinstance(held, asked) else x * 3.0,
        lambda graph, inputs: graphs.append(graph) or graph.forward,
    )
    torch.testing.assert_close(run(X), X * 3.0)
    assert len(graphs) == 1


@pytest.mark.parametrize(
    "asked", [lambda held: isinstance(held, Registers), lambda held: issubclass(type(held), Registers)]
)
def test_a_class_may_be_registered_later(asked: Callable[[Any], bool]) -> None:
    check(
        lambda m, held, kwargs: 1.0 + asked(held),
        type("Plain", (), {})(),
        lambda model: Registers.register(type(model.held)),
    )


def test_a_function_may_have_another_name_later(monkeypatch: pytest.MonkeyPatch) -> None:
    check(
        lambda m, held, kwargs: float(len(function.__name__)),
        None,
        lambda model: monkeypatch.setattr(function, "__name__", "another name"),
    )


def test_a_class_may_have_another_name_later() -> None:
    named = type("Named", (), {})
    check(
        lambda m, held, kwargs: float(len(type(held).__name__)),
        named(),
        lambda model: setattr(named, "__name__", "Other name"),
    )


def test_a_method_may_have_other_code_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(model: Model) -> None:
        monkeypatch.setattr(Helper.method, "__code__", OtherBase.method.__code__)

    check(lambda m, held, kwargs: held.method(), Derived(), change)


DEFAULTS = pytest.mark.parametrize("late", [("__defaults__", (5.0,)), ("__kwdefaults__", {"other": 5.0})])


@DEFAULTS
def test_a_base_class_may_have_other_defaults_later(late: tuple[str, Any]) -> None:
    class Base:
        def __init__(self, value: float = 1.0, *, other: float = 1.0):
            self.value = value + other

    class Heir(Base):
        def __init__(self) -> None:
            super().__init__()

    check(lambda m, held, kwargs: Heir().value, None, lambda model: setattr(Base.__init__, *late))


@DEFAULTS
@pytest.mark.parametrize("name", ["__init__", "scale"])
def test_a_method_may_have_other_defaults_later(name: str, late: tuple[str, Any]) -> None:
    def method(self: Any, value: float = 1.0, *, other: float = 1.0) -> float | None:
        self.value = value + other
        return None if name == "__init__" else self.value

    made = type("Made", (), {name: method, "value": 1.0})

    def read(m: Model, held: Any, kwargs: dict[str, Any]) -> float:
        new = made()
        return new.value if name == "__init__" else new.scale()

    check(read, None, lambda model: setattr(method, *late))


def test_a_class_may_have_other_bases_later() -> None:
    try:
        check(
            lambda m, held, kwargs: held.method(),
            Derived(),
            lambda model: setattr(Derived, "__bases__", (OtherBase,)),
        )
    finally:
        Derived.__bases__ = (Helper,)


# The process


@contextlib.contextmanager
def process_group() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def autocast_dtype(device: str, dtype: torch.dtype) -> Any:
    before = torch.get_autocast_dtype(device)
    torch.set_autocast_dtype(device, dtype)
    try:
        yield
    finally:
        torch.set_autocast_dtype(device, before)


@contextlib.contextmanager
def recursion_limit() -> Any:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(before + 1)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


@contextlib.contextmanager
def default_dtype() -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def variable(value: str) -> Any:
    os.environ["A_SWITCH"] = value
    try:
        yield
    finally:
        del os.environ["A_SWITCH"]


PROCESS = {
    "is_initialized": (lambda m, held, kwargs: 1.0 + dist.is_initialized(), process_group),
    "get_world_size": (
        or_one(lambda m, held, kwargs: 5.0 * dist.get_world_size(), ValueError, RuntimeError), process_group,
    ),
    "get_world_size, of a named group": (
        or_one(lambda m, held, kwargs: 5.0 * dist.get_world_size(group=None), ValueError, RuntimeError),
        process_group,
    ),
    "get_rank": (
        lambda m, held, kwargs: 5.0 + dist.get_rank() if dist.is_initialized() else 1.0, process_group,
    ),
    "get_backend": (
        lambda m, held, kwargs: 5.0 + len(dist.get_backend()) if dist.is_initialized() else 1.0,
        process_group,
    ),
    "autocast's dtype while it is off": (
        lambda m, held, kwargs: 1.0 + (torch.get_autocast_dtype("cpu") is torch.float16),
        lambda: autocast_dtype("cpu", torch.float16),
    ),
    "the default dtype": (
        lambda m, held, kwargs: 1.0 + (torch.get_default_dtype() is torch.float64), default_dtype,
    ),
    "sys": (lambda m, held, kwargs: float(sys.getrecursionlimit()), recursion_limit),
    "os.environ": (
        or_one(lambda m, held, kwargs: float(os.environ["A_SWITCH"])), lambda: variable("3"),
    ),
    "os.getenv": (lambda m, held, kwargs: float(os.getenv("A_SWITCH", "1")), lambda: variable("3")),
    "os.getenv, without a default": (
        lambda m, held, kwargs: 3.0 if os.getenv("A_SWITCH") else 1.0, lambda: variable("3"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROCESS)
def test_the_process_may_answer_otherwise_later(name: str) -> None:
    read, context = PROCESS[name]
    with contextlib.ExitStack() as changed:
        graphs = check(read, None, lambda model: changed.enter_context(context()))
    assert graphs == 2, "a guard that cannot be built leaves the call to the user's code"


def test_a_variable_of_the_environment_may_have_another_value() -> None:
    with variable("2"):
        check(
            lambda m, held, kwargs: float(os.getenv("A_SWITCH", "1")),
            None,
            lambda model: os.environ.update(A_SWITCH="3"),
        )


# Numbers that are equal, and different


def sign(value: float) -> float:
    return math.copysign(1.0, value)


def default(value: float = 0.0) -> float:
    return sign(value)


NEGATIVE = {
    "an attribute": (lambda m, held, kwargs: sign(held), 0.0, -0.0),
    "in a tuple": (lambda m, held, kwargs: sign(held[0]), (0.0,), (-0.0,)),
    "in a frozenset": (
        lambda m, held, kwargs: sign(next(iter(held))), frozenset((0.0,)), frozenset((-0.0,)),
    ),
    "the imaginary part": (lambda m, held, kwargs: sign(held.imag), complex(1, 0.0), complex(1, -0.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", NEGATIVE)
def test_zero_may_become_negative(name: str) -> None:
    read, first, then = NEGATIVE[name]
    check(read, first, lambda model: setattr(model, "held", then))


def test_zero_may_become_negative_in_default_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(model: Model) -> None:
        monkeypatch.setattr(default, "__defaults__", (-0.0,))

    check(lambda m, held, kwargs: default(), None, change)


def test_zero_may_become_negative_in_global_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(model: Model) -> None:
        monkeypatch.setitem(globals(), "ZERO", -0.0)

    check(lambda m, held, kwargs: sign(ZERO), None, change)


TYPES = {"in a tuple": (1,), "in a frozenset": frozenset((1,)), "in a set": {1}}


@pytest.mark.parametrize("other", [True, 1.0])
@pytest.mark.parametrize("name", TYPES)
def test_a_number_may_become_one_of_another_type(name: str, other: Any) -> None:
    check(
        lambda m, held, kwargs: 1.0 + (type(next(iter(held))) is int),
        TYPES[name],
        lambda model: setattr(model, "held", type(model.held)((other,))),
    )


# Names that functions look up


def closing(values: list[float]) -> type:
    class Closes:
        def __call__(self) -> float:
            return sum(values)

    return Closes


def test_a_method_of_a_new_object_reads_its_closure() -> None:
    values = [1.0]
    check(lambda m, held, kwargs: held()(), closing(values), lambda model: values.append(2.0))


def test_a_variable_may_hide_a_builtin_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(model: Model) -> None:
        monkeypatch.setitem(globals(), "abs", lambda value: 3.0)

    check(lambda m, held, kwargs: abs(1.0), None, change)


def imports(model: Model, held: Any, kwargs: dict[str, Any]) -> float:
    import a_module_of_the_users

    return a_module_of_the_users.scale


def test_an_import_may_find_another_module_later(monkeypatch: pytest.MonkeyPatch) -> None:
    name = PYTHON_MODULE.__name__

    def found(scale: float) -> None:
        module = types.ModuleType(name)
        module.scale = scale
        monkeypatch.setitem(sys.modules, name, module)

    found(1.0)
    check(imports, None, lambda model: found(3.0))


# Tensors that autograd made


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.is_leaf,
        lambda x: x.grad_fn is None,
        lambda x: x._base is None,
        lambda x: x.retains_grad,
        lambda x: x.output_nr,
    ],
)
def test_a_later_input_may_be_made_by_autograd(ask: Callable[[Tensor], Any]) -> None:
    model = type("Reads", (nn.Module,), {"forward": lambda self, x: x * (1.0 + ask(x))})()
    run = capture(type(model).forward, lambda graph, inputs: graph.forward)
    made = torch.stack([X, X]).requires_grad_().unbind()[1]
    made.retain_grad()
    for x in (X, X.clone().requires_grad_(), made, X):
        assert torch.equal(run(model, x), model(x))


# Objects that are one, or two


class Two:
    """Two objects that are equal."""

    def __init__(self, make: Callable[[], Any]):
        self.one, self.other = make(), make()


def appended(model: Model, held: Two, kwargs: dict[str, Any]) -> float:
    held.one.append(1.0)
    return 1.0 + len(held.other)


def assigned(model: Model, held: Two, kwargs: dict[str, Any]) -> float:
    held.one.late = 3.0
    return getattr(held.other, "late", 1.0)


def put_key(model: Model, held: Two, kwargs: dict[str, Any]) -> float:
    held.one["late"] = 3.0
    return held.other.get("late", 1.0)


IDENTITY = {  # what the forward asks, and what makes each of the two objects
    "is": (lambda m, held, kwargs: 1.0 + (held.one is held.other), list),
    "is, of parameters": (
        lambda m, held, kwargs: 1.0 + (held.one.weight is held.other.weight), lambda: nn.LayerNorm(1),
    ),
    "is not": (lambda m, held, kwargs: 1.0 + (held.one is not held.other), Child),
    "==": (lambda m, held, kwargs: 1.0 + (held.one == held.other), Child),
    "in a list": (lambda m, held, kwargs: 1.0 + (held.one in [held.other]), Child),
    "in a set": (lambda m, held, kwargs: 1.0 + len({held.one, held.other}), Child),
    "a list that is changed": (appended, list),
    "an object that is changed": (assigned, Child),
    "a dict that is changed": (put_key, dict),
}  # fmt: skip


def test_a_guard_adds_no_key_to_a_dict() -> None:
    """Two lists in a dict stay different: a later dict may make keys that are asked for."""

    def forward(x: Tensor, held: dict[str, list[float]]) -> Tensor:
        held["one"].append(1.0)
        held.setdefault("other", [1.0]).append(2.0)
        return x * held["other"][0]

    run = capture(forward, lambda graph, inputs: graph.forward)
    run(X, {"one": [], "other": [3.0]})
    later = collections.defaultdict(lambda: [0.0])
    assert torch.equal(run(X, later), X)
    assert later == {"one": [0.0, 1.0], "other": [1.0, 2.0]}


@pytest.mark.parametrize("name", IDENTITY)
def test_two_objects_may_become_one(name: str) -> None:
    read, make = IDENTITY[name]
    model = type("Reads", (Model,), {"read": read})(Two(make))
    run = capture(type(model).forward, lambda graph, inputs: graph.forward)
    run(model, X)
    model.held.one, model.held.other = make(), make()
    expected, model.held.one, model.held.other = model(X), make(), make()
    assert torch.equal(run(model, X), expected)
    model.held.one = model.held.other = make()
    expected, model.held.one = model(X), make()
    model.held.other = model.held.one
    assert torch.equal(run(model, X), expected)


def test_a_global_variable_may_become_another_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward reads the object through the model first, to which all other guards belong."""
    monkeypatch.setitem(globals(), "SHARED", shared := {"a": 2.0})
    check(
        lambda m, held, kwargs: held["a"] + 10.0 * SHARED["a"],
        shared,
        lambda model: globals().update(SHARED={"a": 5.0}),
    )


def first(item: Any) -> float:
    return float(item[0] if isinstance(item, tuple) else item)


@pytest.mark.parametrize("view", ["keys", "values", "items", "itself"])
def test_an_ordered_dict_may_have_another_order_later(view: str) -> None:
    check(
        lambda m, held, kwargs: first(next(iter(held if view == "itself" else getattr(held, view)()))),
        collections.OrderedDict({"1": 1.0, "2": 2.0}),
        lambda model: model.held.move_to_end("1"),
    )


def unpacked(held: Iterable[float]) -> float:
    first, _ = held
    return first


ORDER = {
    "a loop": lambda held: next(iter(held)),
    "unpacked": unpacked,
    "a list": lambda held: 1.0 + [*held].index(9),
    "repr()": lambda held: 1.0 + repr(held).startswith("{9"),
    "a text": lambda held: 1.0 + f"{held}".startswith("{9"),
}


@pytest.mark.parametrize("kind", [dict, set])
@pytest.mark.parametrize("name", ORDER)
def test_equal_dicts_or_sets_may_have_another_order_later(name: str, kind: type) -> None:
    """A set of 1 and 9, which share a slot, keeps the order in which they came."""
    made = dict.fromkeys if kind is dict else set
    look_up, later = ORDER[name], made((9, 1))
    check(lambda m, held, kwargs: look_up(held), made((1, 9)), lambda model: setattr(model, "held", later))


def test_a_deque_drops_its_first_items() -> None:
    def read(model: Model, held: Any, kwargs: dict[str, Any]) -> float:
        held.append(held[-1] + 1.0)
        return sum(held)

    model = type("Reads", (Model,), {"read": read})(collections.deque([1.0], maxlen=2))
    twin = copy.deepcopy(model)
    run = capture(type(model).forward, lambda graph, inputs: graph.forward)
    for _ in range(3):
        assert torch.equal(run(model, X), twin(X))
    assert model.held == twin.held


@pytest.mark.parametrize(
    ("forward", "held"),
    [
        (lambda model, x: x * (model.held[1].append(2.0) or sum(model.held[1])), (1, [1.0])),
        (lambda model, x: x * (model.held[0][1].append(2.0) or sum(model.held[0][1])), ((2, [1.0]),)),
        (
            lambda model, x: x * (model.held[1].add(len(model.held[1]) + 1.0) or sum(model.held[1])),
            (1, {1.0}),
        ),
    ],
)
def test_a_list_or_set_in_a_tuple_keeps_what_is_added(forward: Callable[..., Tensor], held: tuple) -> None:
    model = type("Adds", (Model,), {"forward": forward})(held)
    twin = copy.deepcopy(model)
    run = capture(type(model).forward, lambda graph, inputs: graph.forward)
    for _ in range(3):
        assert torch.equal(run(model, X), twin(X))
    assert model.held == twin.held


# Items that equal a constant


class Equals:
    def __init__(self, other: int):
        self.other = other

    def __eq__(self, other: object) -> bool:
        return self.other == other

    __hash__ = None


EQUALS = types.SimpleNamespace(
    tensor=torch.tensor(5), number=numpy.int64(5), equal=Equals(5), other=Equals(4), array=numpy.array(5.0)
)
MEMBERS = {
    "a size": lambda x: 5 in x.shape,
    "a size in a dict": lambda x: 5 in {"rows": x.shape[0]}.values(),
    "an item with a size": lambda x: ("rows", 5) in {"rows": x.shape[0]}.items(),
    "not a size": lambda x: 5 not in x.size(),
    "a number of elements": lambda x: 40 in [0, x.numel()],
    "one of two computed sizes": lambda x: 4 in (x.shape[0] * 2, x.shape[0] - 1),
    "a tuple with a size": lambda x: (5, 8) in [(1, 1), (x.shape[0], 8)],
    "a tensor": lambda x: 5 in [EQUALS.tensor],
    "a numpy number": lambda x: 5 in (EQUALS.number,),
    "an object": lambda x: 5 in [EQUALS.equal],
    "no object": lambda x: 5 in [EQUALS.other],
    "a deque": lambda x: 5 in collections.deque([EQUALS.equal]),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_items_that_are_no_constants_may_equal_one(name: str) -> None:
    follows(MEMBERS[name])


def follows(ask: Callable[[Tensor], Any]) -> None:
    """A captured forward gives the original's numbers and dtypes at all sizes."""
    model = type("Reads", (nn.Module,), {"forward": lambda self, x: x * (1.0 + ask(x))})()
    run = capture(type(model).forward, lambda graph, inputs: graph.forward)
    for size in (3, 4, 5, 6, 5):
        x = torch.ones(size, 8)
        torch.testing.assert_close(run(model, x), model(x), rtol=0, atol=0)


def test_no_transform_is_none() -> None:
    follows(lambda x: torch._C._functorch.peek_interpreter_stack() is None)


# Numbers of numpy

NUMBERS = {
    "isinstance() of numpy's numbers": lambda x: isinstance(EQUALS.number, numpy.generic),
    "isinstance() of arrays": lambda x: isinstance(EQUALS.number, numpy.ndarray),
    "type()": lambda x: type(EQUALS.number) is numpy.int64,
    "a key": lambda x: {5: 3.0}.get(EQUALS.number, 1.0),
    "is_tensor()": lambda x: torch.is_tensor(EQUALS.number),
    "an array that widens": lambda x: x * EQUALS.array,
    "a new array": lambda x: x * numpy.array(2.0),
    "an array of a number": lambda x: x * numpy.asarray(numpy.sqrt(8)),
    "a reshaped array": lambda x: x * x.numpy()[:1, 0].astype(float).reshape(()),
    "an array of an array": lambda x: x * x.numpy().astype(float)[0, 0, ...],
    "an array of a tensor": lambda x: x * x.double().sum().numpy(),
    "a product with integers": lambda x: torch.ones(1, dtype=torch.int64) * numpy.sqrt(8),
    "a tensor of integers": lambda x: torch.full((1,), EQUALS.number).is_floating_point(),
    "a tensor of integers, by name": (
        lambda x: torch.full((1,), fill_value=EQUALS.number).is_floating_point()
    ),
    "a product with a scalar": lambda x: x.sum() * EQUALS.number / numpy.sqrt(8),
    "a number of another dtype in PyTorch": lambda x: x * numpy.sqrt(numpy.uint8(2)),
    "an array of another shape in PyTorch": lambda x: x * numpy.median(numpy.ones(2)),
    "a number that a graph returns": lambda x: after_break(numpy.sqrt(8)) * x,
}


def after_break(value: Any) -> Any:
    torch._dynamo.graph_break()
    return value


@pytest.mark.filterwarnings("ignore:__array_wrap__")
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_of_numpy_is_no_array(name: str) -> None:
    follows(NUMBERS[name])


@pytest.mark.parametrize("number", [numpy.float16, numpy.float32, numpy.bool_, numpy.float64, numpy.int64])
def test_a_number_of_numpy_is_assigned_or_raises_as_in_pytorch(number: type) -> None:
    def assigns(x: Tensor, value: Any) -> Tensor:
        x = x * 2
        x[0] = value
        return x

    def given(function: Callable[..., Tensor]) -> Any:
        try:
            return function(X, number(1)).tolist()
        except TypeError as error:
            return str(error)

    assert given(capture(assigns, lambda graph, inputs: graph.forward)) == given(assigns)


def test_a_product_with_a_number_of_numpy_is_captured() -> None:
    model = type("Reads", (nn.Module,), {"forward": lambda self, x: x / numpy.sqrt(8) * EQUALS.number})()
    graphs: list[Any] = []
    run = capture(type(model).forward, lambda graph, inputs: graphs.append(graph) or graph.forward)
    assert torch.equal(run(model, X), model(X))
    assert len(graphs) == 1


@pytest.mark.parametrize(
    "compute", [numpy.mean, numpy.median, lambda array: array[0, 0], lambda array: array]
)
def test_a_captured_number_of_numpy_is_returned_as_a_number(compute: Callable[[Any], Any]) -> None:
    run = capture(lambda x: compute(x.numpy() * 2), lambda graph, inputs: graph.forward)
    assert type(run(X)) is type(compute(X.numpy()))


# Hooks


def test_one_guard_asks_for_all_hooks_of_a_module() -> None:
    """Dynamo has one for each of six dicts: a third of the guards of a model."""
    model = type("Reads", (Model,), {"read": lambda self, held, kwargs: 1.0})(None)
    run = capture(type(model).forward, lambda graph, inputs: graph.forward)
    run(model, X)
    (entry,) = _debug_get_cache_entry_list(run._torchdynamo_orig_callable.__code__)
    guards = str(entry.guard_manager)
    assert "_forward_hooks or other hooks" in guards
    assert "._forward_pre_hooks" not in guards


# Metaclasses that construct objects


class Singleton(type):
    one: Any = None

    def __call__(cls) -> Any:
        if cls.one is None:
            cls.one = super().__call__()
        return cls.one


class Shared(metaclass=Singleton):
    def __init__(self) -> None:
        self.scale = 1.0


def test_a_metaclass_constructs_objects() -> None:
    Shared().scale = 3.0
    follows(lambda x: Shared().scale)
