"""Hooks on tensors that a forward computed run as in the original, whatever they read or write."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import te_transform

SCALES = [1.0]  # a variable of this file that hooks read
X = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(0))


class Hooked(nn.Module):
    """A norm with a linear, and something that acts on the norm's result once the linear has read it."""

    def __init__(self, act: Callable[..., None]):
        super().__init__()
        self.norm, self.linear, self.act = nn.LayerNorm(32), nn.Linear(32, 32), act
        self.scale, self.kept = 1.0, None

    def forward(self, x: Tensor) -> Tensor:
        read = self.norm(x)
        out = self.linear(read)
        self.act(self, read)
        self.scale += 1.0
        SCALES[0] = self.scale
        return out + read

    def scaled(self, grad: Tensor) -> Tensor:
        return grad * self.scale


def by_a_number(model: Hooked, read: Tensor) -> None:
    read.register_hook(lambda grad: 2 * grad)


def by_an_attribute(model: Hooked, read: Tensor) -> None:
    read.register_hook(lambda grad: grad * model.scale)


def by_a_function(model: Hooked, read: Tensor) -> None:
    read.register_hook(torch.sin)


def by_a_default(model: Hooked, read: Tensor) -> None:
    read.register_hook(lambda grad, model=model: grad * model.scale)


def by_a_named_default(model: Hooked, read: Tensor) -> None:
    read.register_hook(lambda grad, *, model=model: grad * model.scale)


def by_a_nested_function(model: Hooked, read: Tensor) -> None:
    read.register_hook(lambda grad: (lambda: grad * SCALES[0])())


def by_an_import(model: Hooked, read: Tensor) -> None:
    def scaled(grad: Tensor) -> Tensor:
        import sys

        return grad * sys.getrecursionlimit()

    read.register_hook(scaled)


def by_a_method(model: Hooked, read: Tensor) -> None:
    read.register_hook(model.scaled)


def keeping(model: Hooked, read: Tensor) -> None:
    def keep(grad: Tensor) -> None:
        model.kept = grad

    read.register_hook(keep)


def retaining(model: Hooked, read: Tensor) -> None:
    read.retain_grad()
    model.kept = read


IN_GRAPH = by_a_number, by_a_function
BY_STATE = (
    by_an_attribute, by_a_default, by_a_named_default, by_a_nested_function, by_an_import, by_a_method,
    keeping,
)  # fmt: skip
ACTS = (*IN_GRAPH, *BY_STATE, retaining)


def gradients(model: Hooked) -> list[Tensor]:
    """Return the gradients of three steps, between whose forward and backward an attribute changes."""
    found = []
    for _ in range(3):
        model.zero_grad()
        out = model(X.to(model.linear.weight.dtype))
        model.scale += 10.0
        SCALES[0] = model.scale
        out.float().square().sum().backward()
        kept = () if model.kept is None else (model.kept if model.kept.grad is None else model.kept.grad,)
        found += [p.grad for p in model.parameters()] + [*kept]
    return found


@pytest.mark.parametrize("options", [{}, {"compile": True}, {"backend": "te"}], ids=str)
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.usefixtures("at_any_size", "compilations")
def test_hooks_see_the_whole_gradient(act: Callable[..., None], options: dict, te: ModuleType) -> None:
    torch.manual_seed(0)
    original = Hooked(act).to(torch.bfloat16 if "backend" in options else torch.float32)
    sample = X.to(original.linear.weight.dtype)
    converted = te_transform.convert(copy.deepcopy(original), sample, verify=False, **options)
    expected, found = gradients(original), gradients(converted)
    assert len(found) == len(expected)
    for own, wanted in zip(found, expected, strict=True):
        bound = 2**-6 if "backend" in options else 1e-5
        assert (own - wanted).norm() <= bound * wanted.norm()
    assert converted.scale == original.scale


WIDE_HOOK = "it registers a hook that reads or writes more than its argument; let it read its argument alone"
RETAINED = "it retains the gradient of a tensor that it computed; leave out retain_grad() if nothing reads it"


@pytest.mark.parametrize("act", [*BY_STATE, retaining])
def test_the_report_says_why_a_forward_with_such_a_hook_is_not_captured(act: Callable[..., None]) -> None:
    why = RETAINED if act is retaining else WIDE_HOOK
    converted = te_transform.convert(Hooked(act), X, verify=False)
    (said,) = (each for each in te_transform.report(converted).breaks if "forward()" in each)
    assert f"({why}): your own code runs there" in said
