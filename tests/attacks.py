"""A model and its conversion, to be attacked alike: whatever is done to both, both answer the same."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import te_transform
from tests.models.tiny import MLP, WIDTH, Attention
from tests.zoo import seeded

X, OTHER = (torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))

Act = Callable[[nn.Module, Tensor], Any]


def call(model: nn.Module, x: Tensor) -> Any:
    return model(x)


def with_input_gradient(model: nn.Module, x: Tensor) -> Any:
    return model(x.requires_grad_())


class Block(nn.Module):
    """A norm and an MLP behind it, with a residual: what subclasses do around it is the attack."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x: Tensor) -> Any:
        return x + self.mlp(self.norm(x))


class Attends(nn.Module):
    """A norm, q, k and v behind it, and a residual."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()

    def forward(self, x: Tensor) -> Any:
        return x + self.attention(self.norm(x))


class Beside(nn.Module):
    """A block that does something odd, and one that does not: whatever the first prevents, one is fused."""

    def __init__(self, odd: nn.Module):
        super().__init__()
        self.odd, self.plain = odd, seeded(Block)

    def forward(self, x: Tensor, *args: Any) -> Any:
        return self.odd(x, *args), self.plain(x)


def odd(forward: Callable[..., Any], base: type[nn.Module] = Block, **attributes: Any) -> nn.Module:
    """A model with a block of a class of its own, with this forward."""

    def build() -> nn.Module:
        model = type(base.__name__, (base,), {"forward": forward})()
        for name, value in attributes.items():
            setattr(model, name, copy.deepcopy(value))
        return Beside(model)

    return seeded(build)


@dataclass
class Pair:
    """A model and what te_transform.convert() made of it; `x` is what both are called with."""

    original: nn.Module
    converted: nn.Module
    x: Tensor

    @classmethod
    def of(cls, model: type[nn.Module] | nn.Module, x: Any = X, rules: str = "", **options: Any) -> Pair:
        """Convert; something has to be fused, by each of `rules` as often as it is named there.

        Captures of other tests count toward dynamo's limits for a forward: each pair begins with none.
        """
        torch._dynamo.reset()
        model = seeded(model) if isinstance(model, type) else model
        converted = te_transform.convert(model, x, **{"verify": False} | options)
        report = te_transform.report(converted)
        assert report.fused, str(report)
        expected = Counter(rules.split())
        assert all(report.counts.get(rule, 0) >= times for rule, times in expected.items()), str(report)
        return cls(model, converted, x if isinstance(x, Tensor) else X)

    @classmethod
    def shared(cls, model: type[nn.Module], rules: str = "") -> Pair:
        """One pair for all tests that leave it as it is: they call it in different ways."""
        torch._dynamo.reset()
        return _shared(model, rules)

    @property
    def models(self) -> tuple[nn.Module, nn.Module]:
        return self.original, self.converted

    def agree(self, act: Act = call, atol: float = 1e-5) -> dict[str, Any]:
        """Acting on both gives the same: outputs, gradients, buffers, or the same kind of error.

        What the original gave is returned.
        """
        expected, actual = (observed(model, act, self.x) for model in self.models)
        assert "error" not in actual or "error" in expected, actual["error"]
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            assert_same(name, actual[name], value, atol)
        return expected

    def attack(self, change: Callable[[nn.Module], Any], act: Act = call, atol: float = 1e-5) -> None:
        """Change both alike, after both were called: the original answers otherwise than before, and both
        agree, as before."""
        before = self.agree(act, atol)  # captured in the mode of this call, which the change comes after
        for model in self.models:
            change(model)
        assert differ(before, self.agree(act, atol))

    def attack_call(self, act: Act, atol: float = 1e-5) -> None:
        """Call both in another way: the original answers otherwise than to model(x), and both agree."""
        before = observed(self.original, call, self.x)
        assert differ(before, self.agree(act, atol))


@cache
def _shared(model: type[nn.Module], rules: str) -> Pair:
    return Pair.of(model, rules=rules)


def each(names: Iterable[str], *later: str) -> pytest.MarkDecorator:
    """A test's `name` is each of these; `make integrations` has those of `later` too."""
    marks = {name: pytest.mark.integration if name in later else () for name in names}
    assert marks.keys() >= {*later}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=each) for name, each in marks.items()])


@contextmanager
def named(name: str) -> Iterator[None]:
    """Say which of several attacks in one test it was that failed."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the attack {name!r}")
        raise


def differ(before: dict[str, Any], after: dict[str, Any]) -> bool:
    if before.keys() != after.keys():
        return True
    return any(not _equal(value, after[name]) for name, value in before.items())


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one is other or one == other


def observed(model: nn.Module, act: Act, x: Tensor) -> dict[str, Any]:
    """Return the result of `act`, gradients of a loss on it, and buffers; or the error that it raises."""
    torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
    model.zero_grad()
    x = x.detach().clone()
    try:
        found = {f"output {place}": leaf for place, leaf in enumerate(leaves(act(model, x)))}
        backward(list(found.values()))
    except Exception as error:
        return {"error": error}
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    buffers = {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    flags = {f"{name} requires_grad": v.requires_grad for name, v in found.items() if isinstance(v, Tensor)}
    found |= flags | gradients | buffers | ({"input": x.grad} if x.grad is not None else {})
    return {name: v.detach().clone() if isinstance(v, Tensor) else v for name, v in found.items()}


def backward(outputs: list[Any]) -> None:
    """Differentiate a sum in which every element of every output has a weight of its own."""
    used = [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]
    if used:
        sum((out.double() * torch.linspace(1, 2, out.numel()).view_as(out)).sum() for out in used).backward()


def leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def assert_same(name: str, actual: Any, expected: Any, atol: float = 1e-5) -> None:
    """Close for tensors, relative to the largest value; errors of one class; equal for all else."""
    if isinstance(expected, Exception):
        assert type(actual) is type(expected), f"{actual!r} where the original raises {expected!r}"
    elif not isinstance(expected, Tensor):
        assert actual == expected, name
    else:
        finite = expected.double()[expected.isfinite()]
        atol *= max(1.0, finite.abs().max().item() if finite.numel() else 0.0)
        torch.testing.assert_close(
            actual, expected, atol=atol, rtol=0.0, equal_nan=True, msg=lambda text: f"{name}: {text}"
        )


class Loops(nn.Module):
    """Looks at values in a loop: dynamo leaves that forward alone, and takes those inside."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            if x.sum() < 1e6:
                x = part(x)
        return x
