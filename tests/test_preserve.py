"""A model is bitwise what it was after whatever its forward does to what it holds."""

import argparse
import asyncio
import contextlib
import ctypes
import decimal
import functools
import hashlib
import io
import itertools
import logging
import mmap
import os
import random
import string
import sys
import threading
import warnings
from array import array
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from fractions import Fraction
from graphlib import TopologicalSorter
from multiprocessing import Value
from pathlib import Path
from queue import Queue, SimpleQueue
from types import CellType, ModuleType, SimpleNamespace
from unittest.mock import Mock
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import numpy
import pytest
import torch
from torch import Tensor, nn

from te_transform.graph.preserve import ParametersWritten, preserved
from te_transform.graph.state_snapshot import same_bits


class Counts:
    """A user's own object that the forward counts in."""

    def __init__(self) -> None:
        self.calls, self.seen = 0, []
        self.inner = {"deep": [SimpleNamespace(calls=0)]}


class Writes(nn.Module):
    """Its forward writes into everything that a module can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.counts, self.total = nn.Linear(4, 4), Counts(), 0
        self.nested = {"list": [1, {2}], "tuple": ([3],), "ordered": OrderedDict(a=1)}
        self.queue, self.counter, self.options = deque([1]), Counter(a=1), argparse.Namespace(n=1)
        self.array, self.cache = numpy.zeros(3), torch.zeros(3)
        self.held = [nn.BatchNorm1d(4)]  # not one of its modules
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("none", None)

    def forward(self, x: Tensor) -> Tensor:
        self.total += 1
        self.counts.calls += 1
        self.counts.seen.append(x)
        self.counts.inner["deep"][0].calls += 1
        self.nested["list"][1].add(5)
        self.nested["tuple"][0].append(4)
        self.nested["ordered"]["b"] = 2
        self.nested["new"] = x
        self.queue.append(2)
        self.counter["a"] += 1
        self.options.n += 1
        self.array += 1
        self.cache += 1
        self.steps += 1
        self.sparse.mul_(2)
        self.none = x
        self.added = x
        del self.linear._buffers
        torch.rand(3), random.random(), numpy.random.rand()
        return self.held[0](x)


def state(model: nn.Module) -> object:
    """All of it, in a form that compares equal only if nothing has changed."""
    held = model.held[0]
    tensors = (model.cache, model.steps, model.sparse.to_dense(), held.running_mean, held.num_batches_tracked)
    inner = model.counts.inner["deep"][0].calls
    values = (model.total, model.counts.calls, list(model.counts.seen), inner, repr(model.nested))
    rest = (list(model.queue), dict(model.counter), model.options.n, list(model.array), sorted(vars(model)))
    randoms = (random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist())
    return values, rest, randoms, [tensor.tolist() for tensor in tensors], model.none


def test_everything_that_a_forward_changes_is_put_back() -> None:
    model = Writes()
    before, ids = state(model), [id(model.nested), id(model.counts), id(model.nested["list"][1])]
    with preserved(model):
        model(torch.randn(2, 4))
        assert model.total == 1
    assert state(model) == before
    assert [id(model.nested), id(model.counts), id(model.nested["list"][1])] == ids
    model.linear.register_buffer("b", torch.zeros(1))  # the dictionary is there again


def test_hooks_of_parameters_are_restored() -> None:
    model, calls = nn.Linear(4, 4), []
    kept = model.bias.register_hook(lambda grad: calls.append("kept"))
    with preserved(model):
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: calls.append("registered"))
            parameter.register_post_accumulate_grad_hook(lambda parameter: calls.append("accumulated"))
    model(torch.randn(2, 4)).sum().backward()
    assert calls == ["kept"]
    kept.remove()
    model.weight.register_hook(lambda grad: calls.append("later"))
    model(torch.randn(2, 4)).sum().backward()
    assert calls == ["kept", "later"]


def test_state_is_restored_if_the_forward_raises() -> None:
    model = Writes()
    before = state(model)
    with contextlib.suppress(RuntimeError), preserved(model):
        model(torch.randn(2, 5))
    assert model.total == 0
    assert state(model) == before


@pytest.mark.parametrize(
    "write",
    [
        lambda cache: cache.resize_(3).fill_(2),
        lambda cache: setattr(cache, "data", torch.zeros(5)),
        lambda cache: cache.squeeze_(),
    ],
    ids=["resized", "of other memory", "of fewer dimensions"],
)
def test_a_tensor_of_another_shape_gets_its_own_back(write: Callable[[Tensor], object]) -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("cache", torch.ones(1))
    model.cache, cache = model.cache.view(1, 1), model.cache
    model.held = [cache, model.cache]
    with preserved(model):
        for tensor in model.held:
            write(tensor)
    assert [tensor.tolist() for tensor in model.held] == [[1.0], [[1.0]]]
    assert model.held[1] is model.cache


def test_contents_of_collections_are_restored() -> None:
    model = nn.Linear(4, 4)
    model.seen, model.above = UserDict(n=0), ChainMap({"n": 0})
    with preserved(model):
        model.seen["n"] = model.above["n"] = 1
    assert (model.seen["n"], model.above["n"]) == (0, 0)


class Slots:
    """A user's own object that has no dictionary."""

    __slots__ = ("calls", "seen")

    def __init__(self) -> None:
        self.calls = 0


class OfTheClass(nn.Linear):
    """A module whose counter counts for all objects of its class."""

    calls, seen = 0, {}

    def forward(self, x: Tensor, kept: list = []) -> Tensor:  # noqa: B006
        kept.append(x)
        return super().forward(x)


def counter() -> Callable[[], int]:
    calls, seen = 0, []

    def count(kept: list = []) -> int:  # noqa: B006
        nonlocal calls
        calls += 1
        seen.append(calls)
        kept.append(calls)
        count.calls = calls
        return calls + len(seen) + len(kept)

    return count


def test_values_of_slots_classes_and_functions_are_restored() -> None:
    model, items, arrays = OfTheClass(4, 4), [], [bytearray(b"ab"), array("d", [1.0, 2.0])]
    model.slots, model.held = Slots(), [counter(), functools.partial(list.append, items), *arrays]
    model.register_forward_hook(lambda *_: items.append(0))
    objects = numpy.array([[1], [2]], dtype=object)
    model.objects, model.numbers = objects.copy(), numpy.zeros(3)
    with preserved(model):
        model(torch.ones(1, 4))
        model.slots.calls, model.slots.seen = 1, []
        model.held[0](), model.held[1](1)
        for each in arrays:
            each.append(7)
        OfTheClass.calls, OfTheClass.seen["n"], OfTheClass.new = 1, 1, 1
        model.numbers.resize(5, refcheck=False)
        model.numbers += 1
        model.objects[0] += [3]
    assert (model.slots.calls, hasattr(model.slots, "seen")) == (0, False)
    assert model.held[0]() == 3
    assert (items, arrays) == ([], [bytearray(b"ab"), array("d", [1.0, 2.0])])
    assert OfTheClass.forward.__defaults__ == ([],)
    assert (OfTheClass.calls, OfTheClass.seen, hasattr(OfTheClass, "new")) == (0, {}, False)
    assert model.numbers.tolist() == [0.0] * 3
    assert model.objects.tolist() == objects.tolist()


def test_attributes_of_tensors_are_restored() -> None:
    model = nn.BatchNorm1d(4)
    model.weight.calls = 0
    with preserved(model):
        model.weight.calls, model.weight.added = 1, 1
        model.weight.grad = torch.ones(4)
        model.bias.requires_grad_(False)
        model.running_var.requires_grad_()
        model.running_mean.add_(model.weight)  # which is what it is computed of from here on
    assert (model.weight.calls, hasattr(model.weight, "added"), model.weight.grad) == (0, False, None)
    assert [tensor.requires_grad for tensor in (model.bias, *model.buffers())] == [True] + [False] * 3
    assert model.running_mean.is_leaf
    assert model.running_mean.tolist() == [0.0] * 4


def test_a_value_that_cannot_be_restored_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.BatchNorm1d(4)
    model.queue = deque([1])
    monkeypatch.setattr(model, "seen", type("Odd", (dict,), {"clear": None})(), raising=False)

    def write() -> None:
        with preserved(model):
            model(torch.ones(2, 4))
            model.seen["n"] = model.queue.append(2)

    with pytest.raises(TypeError):
        write()
    assert (model.num_batches_tracked, list(model.queue)) == (0, [1])


def odd_tensors(number: float) -> dict[str, Tensor]:
    rows = [torch.full((length, 3), number) for length in (2, 4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested and quantized ones are about to change, or to go
        by_channel = torch.ones(3), torch.zeros(3, dtype=torch.int64), 1, torch.qint8
        return {
            "jagged": torch.nested.nested_tensor(rows, layout=torch.jagged),
            "nested": torch.nested.nested_tensor(rows),
            "quantized": torch.quantize_per_tensor(rows[0], 0.5, 0, torch.qint8),
            "quantized by channel": torch.quantize_per_channel(rows[0], *by_channel),
        }


@pytest.mark.parametrize("name", odd_tensors(1.0))
def test_odd_tensors_are_put_back(name: str) -> None:
    model, other = nn.Linear(4, 4), odd_tensors(2.0)[name]
    model.held = odd_tensors(1.0)[name]
    before = model.held.clone()
    assert same_bits(before, model.held)
    assert not same_bits(before, other)
    with preserved(model):
        model.held.values().fill_(2) if model.held.is_nested else model.held.copy_(other)
        assert not same_bits(before, model.held)
    assert same_bits(before, model.held)


def test_unchanged_values_are_not_written() -> None:
    model = nn.BatchNorm1d(4).eval()
    model.running_mean.fill_(float("nan"))  # which equals nothing
    versions = [buffer._version for buffer in model.buffers()]
    with preserved(model):
        model(torch.randn(2, 4))
    assert [buffer._version for buffer in model.buffers()] == versions


def test_tensors_made_in_inference_mode_are_put_back() -> None:
    with torch.inference_mode():
        model = nn.BatchNorm1d(4)
    with preserved(model), torch.inference_mode():
        model(torch.randn(2, 4))
    assert model.num_batches_tracked == 0


def test_circular_references_are_visited_once() -> None:
    model = nn.Linear(2, 2)
    model.counts = Counts()
    model.counts.model, model.counts.itself = [model], model.counts
    with preserved(model):
        model.counts.calls += 1
    assert model.counts.calls == 0


@pytest.mark.parametrize(
    "write", [lambda weight: weight.mul_(1), lambda weight: weight.set_(weight)], ids=["written", "set"]
)
def test_a_forward_that_writes_into_its_parameters_is_refused(write: Callable[[Tensor], Tensor]) -> None:
    model = nn.Linear(2, 2)
    message = r"does not write to its parameters, got one that writes to or resets \['weight'\]"
    with torch.no_grad(), pytest.raises(ParametersWritten, match=message), preserved(model):
        write(model.weight)


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_tensors_are_compared_by_what_they_hold(layout: str) -> None:
    one, other = torch.eye(4), torch.eye(4)
    other[0, 1] = 1
    one, again, other = (getattr(tensor, layout)() for tensor in (one, one.clone(), other))
    assert same_bits(one, again)
    assert not same_bits(one, other)
    assert not same_bits(one, 2 * again)
    assert not same_bits(one, one.to_dense())
    assert not same_bits(one, one.double())


def test_bits_are_compared_and_not_numbers() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.randn(3, 4).t(), torch.randn(0)) is False
    assert same_bits(torch.ones(3, 4).t(), torch.ones(4, 3))
    turns = torch.randn(2, dtype=torch.complex64)
    assert same_bits(turns, turns.clone())
    assert same_bits(turns.conj(), turns.conj().resolve_conj())  # of which one is a view
    assert same_bits(turns.conj().imag, -turns.imag)
    assert not same_bits(turns.conj(), turns)


# Objects of Python's library and of numpy


class Recent(OrderedDict):
    """A dictionary that counts what is set, and forgets."""

    def __setitem__(self, key: object, value: object) -> None:
        self.sets = getattr(self, "sets", 0) + 1
        super().__setitem__(key, value)
        if len(self) > 2:
            self.popitem(last=False)


class Silent(dict):
    def update(self, *args: object) -> None:
        raise NotImplementedError


class Point(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int), ("y", ctypes.c_double))


KEY = Counts()


def in_context() -> ContextVar[list[int]]:
    variable: ContextVar[list[int]] = ContextVar("variable")
    variable.set([])
    return variable


class Counting(type):
    """A metaclass that counts the objects of its classes."""

    made = 0

    def __call__(cls, *args: object) -> object:
        Counting.made += 1
        return super().__call__(*args)


class Counted(metaclass=Counting):
    called = 0


class Naming(type):
    """A metaclass whose `__module__` is a property of its classes, as that of Cython."""

    __module__ = property(lambda cls: "elsewhere")


class Named(metaclass=Naming):
    called = 0


LOOP = asyncio.new_event_loop()


def done(future: object, result: object) -> object:
    future.set_result(result)
    return future


# What makes an object, what a forward does to it, and what shows it.
LIBRARY: dict[str, tuple[Callable, Callable, Callable]] = {
    "a queue": (Queue, lambda q: q.put(1), lambda q: (q.qsize(), q.unfinished_tasks)),
    "a simple queue": (SimpleQueue, lambda q: q.put(1), lambda q: q.qsize()),
    "bytes in memory": (
        lambda: io.BytesIO(b"abc"),
        lambda f: f.write(b"x"),
        lambda f: (f.getvalue(), f.tell()),
    ),
    "text in memory": (
        lambda: io.StringIO("abc"),
        lambda f: f.write("x"),
        lambda f: (f.getvalue(), f.tell()),
    ),
    "a file": (lambda: open(__file__), lambda f: f.readline(), lambda f: f.tell()),  # noqa: SIM115
    "a mapped file": (lambda: mmap.mmap(-1, 4), lambda m: m.write(b"x"), lambda m: m[:]),
    "values of a thread": (threading.local, lambda x: setattr(x, "n", 1), lambda x: dict(vars(x))),
    "an event": (threading.Event, lambda event: event.set(), lambda event: event.is_set()),
    "weak keys": (WeakKeyDictionary, lambda d: d.__setitem__(KEY, 1), lambda d: dict(d)),
    "weak keys that go": (lambda: WeakKeyDictionary({KEY: 1}), lambda d: d.pop(KEY), lambda d: dict(d)),
    "weak values": (WeakValueDictionary, lambda d: d.__setitem__(1, KEY), lambda d: dict(d)),
    "a weak set": (WeakSet, lambda s: s.add(KEY), lambda s: list(s)),
    "a value of C": (ctypes.c_int, lambda c: setattr(c, "value", 5), lambda c: c.value),
    "memory behind a pointer of C": (
        lambda: ctypes.pointer(ctypes.c_int(0)),
        lambda p: p.__setitem__(0, 5),
        lambda p: p[0],
    ),
    "an array of C": (lambda: (ctypes.c_int * 2)(), lambda c: c.__setitem__(0, 5), lambda c: list(c)),
    "a structure of C": (Point, lambda c: setattr(c, "y", 5.0), lambda c: (c.x, c.y)),
    "a value of processes": (lambda: Value("i", 0), lambda v: setattr(v, "value", 5), lambda v: v.value),
    "an order": (lambda: OrderedDict(a=1, b=2), lambda d: d.move_to_end("a"), lambda d: list(d)),
    "what is dropped": (
        lambda: deque([1, 2], maxlen=2),
        lambda d: d.append(3),
        lambda d: (list(d), d.maxlen),
    ),
    "a factory": (
        lambda: defaultdict(list),
        lambda d: (d["a"], setattr(d, "default_factory", int)),
        lambda d: (dict(d), d.default_factory),
    ),
    "a dictionary that forgets": (
        lambda: Recent(a=1, b=2),
        lambda d: d.__setitem__("c", 3),
        lambda d: (dict(d), d.sets),
    ),
    "a dictionary without update()": (Silent, lambda d: d.__setitem__("a", 1), lambda d: dict(d)),
    "a view of memory": (
        lambda: memoryview(bytearray(b"abc")),
        lambda m: m.__setitem__(0, 1),
        lambda m: m.tobytes(),
    ),
    "a count": (itertools.count, next, repr),
    "a list's iterator": (lambda: iter([1, 2]), next, lambda it: it.__length_hint__()),
    "a cycle": (lambda: itertools.cycle([1, 2]), next, lambda it: [*it.__reduce__()[2][0]]),
    "a hash": (hashlib.sha256, lambda h: h.update(b"x"), lambda h: h.hexdigest()),
    "a context variable's list": (
        in_context,
        lambda held: held.get().append(1),
        lambda held: list(held.get()),
    ),
    "a quasirandom engine": (
        lambda: torch.quasirandom.SobolEngine(2),
        lambda sobol: sobol.draw(3),
        lambda sobol: (sobol.num_generated, sobol.quasi.tolist()),
    ),
    "a mock": (Mock, lambda mock: mock(1), lambda mock: mock.call_count),
    "a method of a list": (lambda: [].append, lambda push: push(1), lambda push: list(push.__self__)),
    "a RandomState": (
        lambda: numpy.random.RandomState(0),
        lambda r: r.normal(),
        lambda r: str(r.get_state(legacy=False)),
    ),
    "numpy's Generator": (
        numpy.random.default_rng,
        lambda r: r.normal(),
        lambda r: str(r.bit_generator.state),
    ),
    "children of a SeedSequence": (
        numpy.random.SeedSequence,
        lambda seeds: seeds.spawn(2),
        lambda seeds: seeds.n_children_spawned,
    ),
    "children of a Generator": (
        numpy.random.default_rng,
        lambda r: r.spawn(1),
        lambda r: r.bit_generator.seed_seq.n_children_spawned,
    ),
    "children of a BitGenerator": (
        numpy.random.Philox,
        lambda bits: bits.spawn(1),
        lambda bits: bits.seed_seq.n_children_spawned,
    ),
    "a decimal context's precision": (decimal.Context, lambda c: setattr(c, "prec", 3), lambda c: c.prec),
    "a decimal context's flags": (
        decimal.Context,
        lambda c: c.divide(decimal.Decimal(1), decimal.Decimal(3)),
        lambda c: [signal for signal, is_set in c.flags.items() if is_set],
    ),
    "a decimal context's traps": (
        decimal.Context,
        lambda c: c.traps.__setitem__(decimal.Inexact, True),
        lambda c: c.traps[decimal.Inexact],
    ),
    "an array behind a view": (
        lambda: numpy.zeros(4)[1:3],
        lambda a: a.base.__iadd__(1),
        lambda a: a.base.tolist(),
    ),
    "an array that becomes read-only": (
        lambda: numpy.zeros(2),
        lambda a: (a.__iadd__(1), a.setflags(write=False)),
        lambda a: (a.tolist(), a.flags.writeable),
    ),
    "a graph of the standard library": (
        TopologicalSorter,
        lambda sorter: sorter.add(1),
        lambda sorter: len(sorter._node2info),
    ),
    "a template": (
        lambda: string.Template("a"),
        lambda made: setattr(made, "template", "b"),
        lambda made: made.template,
    ),
    "bytes of a storage": (
        lambda: torch.arange(6.0).untyped_storage(),
        lambda storage: storage.fill_(3),
        lambda storage: storage.tolist(),
    ),
    "a storage that shrinks": (
        lambda: torch.arange(6.0).untyped_storage(),
        lambda storage: storage.resize_(4),
        lambda storage: storage.tolist(),
    ),
    "a storage with a dtype": (
        lambda: torch.TypedStorage(
            wrap_storage=torch.ones(2).untyped_storage(), dtype=torch.float32, _internal=True
        ),
        lambda storage: storage._untyped_storage.fill_(0),
        lambda storage: storage._untyped_storage.tolist(),
    ),
    "a closure's variable": (
        lambda: CellType(1),
        lambda cell: setattr(cell, "cell_contents", 2),
        lambda cell: cell.cell_contents,
    ),
    "a closure's first value": (CellType, lambda cell: setattr(cell, "cell_contents", []), repr),
    "a result of PyTorch": (
        lambda: done(torch.futures.Future(), []),
        lambda future: future.value().append(1),
        lambda future: list(future.value()),
    ),
    "a result of asyncio": (
        lambda: done(LOOP.create_future(), []),
        lambda future: future.result().append(1),
        lambda future: list(future.result()),
    ),
    "a future without a result": (Future, lambda future: future.set_result(1), lambda future: future.done()),
    "a fraction": (
        lambda: Fraction(1, 3),
        lambda fraction: setattr(fraction, "_numerator", 2),
        lambda fraction: fraction.numerator,
    ),
    "notes of an error": (
        lambda: ValueError([]),
        lambda error: (error.add_note("a"), error.args[0].append(1)),
        lambda error: (getattr(error, "__notes__", None), list(error.args[0])),
    ),
    "arguments of an error": (
        ValueError,
        lambda error: setattr(error, "args", (1,)),
        lambda error: error.args,
    ),
    "the cause of an error": (
        ValueError,
        lambda error: setattr(error, "__cause__", KeyError()),
        lambda error: (error.__cause__, error.__suppress_context__),
    ),
    "the value of an error": (
        StopIteration,
        lambda error: setattr(error, "value", 1),
        lambda error: error.value,
    ),
    "a counter of a metaclass": (
        lambda: Counted,
        lambda counted: counted(),
        lambda counted: type(counted).made,
    ),
    "a counter of a base class": (
        lambda: type("Derived", (Counted,), {}),
        lambda derived: setattr(Counted, "called", 1),
        lambda derived: Counted.called,
    ),
    "a class whose metaclass names its modules": (
        lambda: Named(),
        lambda named: (setattr(Named, "called", 1), setattr(named, "called", 2)),
        lambda named: (Named.called, named.called),
    ),
    "a masked array": (
        lambda: numpy.ma.array([1.0, 2.0], mask=[False, True]),
        lambda a: a.__setitem__(1, 5.0),
        lambda a: (a.data.tolist(), a.mask.tolist()),
    ),
}


@pytest.mark.parametrize("name", LIBRARY)
def test_objects_of_libraries_are_put_back(name: str) -> None:
    make, write, read = LIBRARY[name]
    model = nn.Linear(2, 2)
    model.held = value = make()
    before = read(value)
    with preserved(model) as noted:
        write(model.held)
        assert read(model.held) != before
    assert not noted.unsaved()
    assert model.held is value
    assert read(value) == before


SETTINGS: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "recursion limit": (lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 1), sys.getrecursionlimit),
    "default dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "print options": (lambda: torch.set_printoptions(precision=7), lambda: repr(torch.ones(1) / 3)),
    "gradients": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "environment": (lambda: os.environ.update(CALLED="1"), lambda: dict(os.environ)),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_process_are_put_back(name: str) -> None:
    write, read = SETTINGS[name]
    before = read()
    with preserved(nn.Linear(2, 2)):
        write()
        assert read() != before
    assert read() == before


def test_deep_values_are_restored() -> None:
    model = nn.Linear(2, 2)
    model.first = last = SimpleNamespace(calls=0, next=None)
    for _ in range(2000):
        last.next = last = SimpleNamespace(calls=0, next=None)
    with preserved(model):
        last.calls = 1
    assert last.calls == 0


CALLS, SEEN, STEPS = 0, [], itertools.count()


def count_for_the_module() -> int:
    global CALLS, NEW
    CALLS += 1
    NEW = CALLS
    SEEN.append(CALLS)
    return next(STEPS)


class CountsForTheModule(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.count()

    def count(self) -> int:
        return count_for_the_module()


def test_variables_of_the_module_of_code_are_put_back() -> None:
    model, steps = CountsForTheModule(2, 2), STEPS
    with preserved(model):
        model(torch.ones(1, 2))
        assert (CALLS, NEW, SEEN) == (1, 1, [1])
    assert (CALLS, "NEW" in globals(), SEEN, STEPS is steps, repr(STEPS)) == (0, False, [], True, "count(0)")


class CountsInItsModule(nn.Linear):
    """Counts in a Python module that it holds."""

    def forward(self, x: Tensor) -> Tensor:
        self.counting.calls += 1
        self.counting.seen.append(1)
        return super().forward(x)


def test_variables_of_a_held_module_are_put_back() -> None:
    model = CountsInItsModule(2, 2)
    model.counting = counting = ModuleType("counting")
    counting.calls, counting.seen = 0, []
    with preserved(model):
        model(torch.ones(1, 2))
        assert (counting.calls, counting.seen) == (1, [1])
    assert (counting.calls, counting.seen) == (0, [])


class Backward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        super().forward(x).sum().backward()
        return super().forward(x)


def test_gradients_that_a_forward_adds_to_are_put_back() -> None:
    model = Backward(2, 2)
    model(torch.ones(1, 2))
    grad = model.weight.grad
    before = grad.clone()
    with preserved(model):
        model(torch.ones(1, 2))
        assert not torch.equal(grad, before)
    assert model.weight.grad is grad
    assert torch.equal(grad, before)


@pytest.mark.parametrize(
    "write",
    [lambda weight: weight.data.mul_(2), lambda weight: setattr(weight, "data", 2 * weight.data)],
    ids=["written", "given other memory"],
)
def test_parameters_that_are_written_through_data_are_put_back(write: Callable[[Tensor], object]) -> None:
    model = nn.Linear(2, 2)
    before, place = model.weight.detach().clone(), model.weight.data_ptr()
    with preserved(model):
        write(model.weight)
    assert torch.equal(model.weight, before)
    assert model.weight.data_ptr() == place


def test_writes_of_a_refused_forward_are_restored() -> None:
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    with torch.no_grad(), pytest.raises(ParametersWritten, match="got one that writes to"), preserved(model):
        model.weight.mul_(2)
    assert torch.equal(model.weight, before)


def test_errors_name_the_path_of_values_that_cannot_be_restored(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].source = {"a": [(number for number in range(3))]}
    model.waiting = [torch.futures.Future(), LOOP.create_future()]
    model.iterators = numpy.nditer(numpy.ones(2)), numpy.ones(2).flat, numpy.ndenumerate(numpy.ones(2))
    model.pair, model.lock, model.log = (itertools.count(),), threading.Lock(), logging.getLogger("a")
    with open(tmp_path / "log", "w") as model.file, preserved(model) as noted:
        assert sorted(noted.unsaved()) == [
            "0.source['a'][0] is a generator, which cannot be copied",
            "file is a TextIOWrapper, which has state outside of this process",
            "iterators[0] is a nditer, which cannot be copied",
            "iterators[1] is a flatiter, which cannot be copied",
            "iterators[2].iter is a flatiter, which cannot be copied",
            "pair[0] is a count, which a tuple holds",
            "waiting[0] is a Future, which cannot be reset",
            "waiting[1] is a Future, which cannot be reset",
        ]


OVERLAPPING = {
    "expanded": lambda base: base[:1].expand(4),
    "a part of what is expanded": lambda base: base[:1].expand(4)[1:],
    "windows": lambda base: base.as_strided((3, 2), (1, 1)),
    "transposed": lambda base: base.view(2, 2).mT,
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_a_buffer_whose_base_is_written_is_put_back(name: str) -> None:
    base = torch.arange(4.0)
    model = nn.Module()
    model.register_buffer("held", OVERLAPPING[name](base))
    before = model.held.clone()
    with preserved(model):
        base.add_(5)
    assert torch.equal(model.held, before)


calls_of_wrapped: list[str] = []


@torch.no_grad()
def averages_into(mean: list[float], x: Tensor) -> None:
    calls_of_wrapped.append("function")
    mean[0] = 0.9 * mean[0] + 0.1 * float(x.mean())


@contextlib.contextmanager
def counted() -> Iterator[None]:
    calls_of_wrapped.append("context")
    yield


def averaging() -> Callable[[Tensor], None]:
    mean = [0.0]

    @torch.no_grad()
    def average(x: Tensor) -> None:
        averages_into(mean, x)

    average.mean = mean
    return average


class OfWrappedFunctions(nn.Linear):
    average = staticmethod(averaging())

    @torch.no_grad()
    def note(self) -> None:
        calls_of_wrapped.append("method")

    def forward(self, x: Tensor) -> Tensor:
        with counted():
            self.average(x)
            self.note()
        return super().forward(x)


def test_state_of_functions_in_wrappers_of_libraries_is_put_back() -> None:
    """Decorators of PyTorch and contextlib make functions of their own around the user's."""
    model = OfWrappedFunctions(2, 2)
    with preserved(model):
        model(torch.ones(1, 2))
        assert calls_of_wrapped == ["context", "function", "method"]
    assert not calls_of_wrapped
    assert model.average.mean == [0.0]
