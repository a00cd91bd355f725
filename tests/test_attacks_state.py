"""State that a forward keeps: convert() advances none of it, and each call advances it once."""

import copy
import itertools
import random
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_transform
from tests.attacks import Attends, Pair, X, each, odd
from tests.models.tiny import WIDTH, Tiny
from tests.zoo import seeded

pytestmark = pytest.mark.usefixtures("at_any_size")


def counting(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return x + self.mlp(self.norm(x)) * self.calls


def counting_in_a_buffer(self: Any, x: Tensor) -> Tensor:
    self.calls.add_(1)
    return x + self.mlp(self.norm(x)) * self.calls


def counting_in_a_config(self: Any, x: Tensor) -> Tensor:
    self.config.calls += 1
    return x + self.mlp(self.norm(x)) * self.config.calls


def counting_in_a_dict(self: Any, x: Tensor) -> Tensor:
    self.calls["all"] = self.calls.get("all", 0) + 1
    return x + self.mlp(self.norm(x)) * self.calls["all"]


def remembering(self: Any, x: Tensor) -> Tensor:
    y = self.mlp(self.norm(x))
    self.seen.append(y.detach())
    return x + sum(self.seen)


def keeping(self: Any, x: Tensor) -> Tensor:
    self.last = self.norm(x)
    return x + self.mlp(self.last)


def averaging(self: Any, x: Tensor) -> Tensor:
    y = self.norm(x)
    with torch.no_grad():
        self.mean.mul_(0.9).add_(y.mean((0, 1)), alpha=0.1)
    return x + self.mlp(y - self.mean)


def replacing_a_buffer(self: Any, x: Tensor) -> Tensor:
    y = self.norm(x)
    self.mean = 0.9 * self.mean + 0.1 * y.mean((0, 1)).detach()
    return x + self.mlp(y - self.mean)


def lazy(self: Any, x: Tensor) -> Tensor:
    if self.table is None or self.table.shape[0] < x.shape[1]:
        self.table = torch.linspace(0, 1, x.shape[1])[:, None]
    return x + self.mlp(self.norm(x + self.table[: x.shape[1]]))


def cached_by_length(self: Any, x: Tensor) -> Tensor:
    if x.shape[1] not in self.tables:
        self.tables[x.shape[1]] = torch.linspace(0, 1, x.shape[1])[:, None]
    return x + self.mlp(self.norm(x + self.tables[x.shape[1]]))


STATE: dict[str, tuple[Callable, dict[str, Any]]] = {
    "counts": (counting, {"calls": 0}),
    "counts in a buffer": (counting_in_a_buffer, {"calls": nn.Buffer(torch.zeros(()))}),
    "counts in a tensor": (counting_in_a_buffer, {"calls": torch.zeros(())}),
    "counts in a config": (counting_in_a_config, {"config": SimpleNamespace(calls=0)}),
    "counts in a dict": (counting_in_a_dict, {"calls": {}}),
    "remembers in a list": (remembering, {"seen": []}),
    "keeps its norm": (keeping, {"last": None}),
    "averages in a buffer": (averaging, {"mean": nn.Buffer(torch.zeros(WIDTH))}),
    "replaces a buffer": (replacing_a_buffer, {"mean": nn.Buffer(torch.zeros(WIDTH))}),
    "makes a table at first": (lazy, {"table": None}),
    "makes a table for each length": (cached_by_length, {"tables": {}}),
}


@each(STATE, "counts in a tensor", "counts in a config", "counts in a dict", "makes a table at first")
def test_state_that_a_forward_keeps(name: str) -> None:
    forward, attributes = STATE[name]
    pair = Pair.of(odd(forward, **attributes))

    def thrice(model: nn.Module, x: Tensor) -> list[Any]:
        lengths = (5, 3, 5) if "table" in name else (5, 5, 5)
        return [
            *(model(x[:, :length]) for length in lengths),
            *(getattr(model.odd, name) for name in attributes),
        ]

    pair.agree(thrice)
    pair.agree(thrice)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("inplace", [True, False])
def test_convert_advances_no_state_of_the_users(verify: bool, inplace: bool) -> None:
    model = odd(counting, calls=0)
    states = torch.get_rng_state(), random.getstate(), str(numpy.random.get_state())
    converted = te_transform.convert(model, X, verify=verify, inplace=inplace)
    assert te_transform.report(converted).fused
    assert model.odd.calls == converted.odd.calls == 0
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), str(numpy.random.get_state()))


class Cached(Attends):
    """Attention over all that it has seen so far, kept by whoever calls it."""

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        a, y = self.attention, self.norm(x)
        key, value = a.k_proj(y), a.v_proj(y)
        if isinstance(cache, dict):
            if "key" in cache:
                key, value = torch.cat([cache["key"], key], 1), torch.cat([cache["value"], value], 1)
            cache.update(key=key, value=value)
        elif cache is not None:
            cache.append((key, value))
            key, value = (torch.cat(parts, 1) for parts in zip(*cache, strict=True))
        return x + a.out_proj(F.scaled_dot_product_attention(a.q_proj(y), key, value))


@pytest.mark.parametrize("kind", [pytest.param(dict, marks=pytest.mark.integration), list])
def test_a_cache_is_filled_as_the_original_fills_it(kind: type) -> None:
    def by_parts(model: nn.Module, x: Tensor) -> list[Any]:
        cache = kind()
        outputs = [model(part, cache) for part in x.split([2, 1, 1, 1], 1)]
        held = [*cache] if kind is list else [cache["key"], cache["value"]]
        return [torch.cat(outputs, 1), held]

    Pair.of(Cached).agree(by_parts)


class CopiesAtRandom(Attends):
    def __deepcopy__(self, memo: dict) -> nn.Module:
        torch.rand(1), random.random(), numpy.random.rand()
        made = memo[id(self)] = CopiesAtRandom()
        made.load_state_dict(self.state_dict())
        return made


def test_a_copy_moves_no_random_state() -> None:
    model = seeded(CopiesAtRandom)
    states = torch.get_rng_state(), random.getstate(), str(numpy.random.get_state())
    te_transform.convert(model, X)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), str(numpy.random.get_state()))


SCALE: ContextVar[float] = ContextVar("SCALE")


class Reads(Attends):
    """Its answer depends on all that it has kept since its first call."""

    def __init__(self):
        super().__init__()
        self.deep = SimpleNamespace(a={"b": [SimpleNamespace(c={"n": torch.zeros(1)})]})
        self.steps = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        SCALE.set(SCALE.get(0.0) + 1.0)
        self.deep.a["b"][0].c["n"].add_(1)
        return super().forward(x) * self.deep.a["b"][0].c["n"] * (SCALE.get() + next(self.steps))


@pytest.mark.parametrize("inplace", [True, False])
def test_a_converted_model_answers_as_if_it_had_never_been_called(inplace: bool) -> None:
    model = seeded(Reads)
    converted = te_transform.convert(copy.deepcopy(model), X, inplace=inplace)
    assert SCALE.get(None) is None
    for _ in range(2):
        expected, found = (copy_context().run(each, X) for each in (model, converted))
        torch.testing.assert_close(found, expected)


class CountsInItsClass(Tiny):
    """A forward that counts its calls in the class that it asks for; other code reads the user's class."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return super().forward(x) * CountsInItsClass.calls


@pytest.mark.parametrize("verify", [True, False])
def test_a_forward_sets_attributes_of_the_users_class(monkeypatch: pytest.MonkeyPatch, verify: bool) -> None:
    monkeypatch.setattr(CountsInItsClass, "calls", 0)
    model = seeded(CountsInItsClass)
    converted = te_transform.convert(copy.deepcopy(model), X, verify=verify)
    assert CountsInItsClass.calls == 0
    for calls in (1, 2, 3):
        found = converted(X)
        assert CountsInItsClass.calls == calls
        CountsInItsClass.calls -= 1
        torch.testing.assert_close(found, model(X))
    type(converted).calls = 7
    assert CountsInItsClass.calls == 7


def test_a_conversion_that_fails_leaves_state_as_it_was() -> None:
    def fails(self: Any, x: Tensor) -> Tensor:
        self.deep.a.b.c.d.e.f[0] += 1
        return self.mlp(x) + torch.ones(WIDTH + 1)

    deep: Any = [0]
    for name in "fedcba":
        deep = SimpleNamespace(**{name: deep})
    model = odd(fails, deep=deep)
    with pytest.raises(te_transform.TraceError):
        te_transform.convert(model, X, inplace=True)
    assert model.odd.deep.a.b.c.d.e.f == [0]


def test_state_that_cannot_be_saved_is_reported() -> None:
    def draws(self: Any, x: Tensor) -> Tensor:
        return self.mlp(x) * next(self.source["a"])

    model = odd(draws)
    model.odd.source = {"a": (float(number) for number in range(9))}
    notes = te_transform.report(te_transform.convert(model, X, inplace=True)).notes
    (note,) = (note for note in notes if "generator" in note)
    assert note.startswith("odd.source['a'] is a generator, which cannot be copied: if the forward")
    with pytest.raises(te_transform.ModelError, match=r"odd\.source\['a'\] is a generator"):
        te_transform.convert(te_transform.revert(model), X)
