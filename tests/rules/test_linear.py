"""Whatever linear is left: in plain PyTorch it stays what it was, in a recipe its product runs in FP8."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import remove_parametrizations

import te_transform
from tests.rules.tables import H, X, fused, linear, reasons, sequential, written


class Conv1D(nn.Module):
    """GPT-2's: its weight is stored [in, out]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(H, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, H), self.weight).view(*x.shape[:-1], 8)


FUSES = {
    "a Linear": sequential(linear(), nn.Tanh),
    "without a bias": sequential(linear(bias=False), nn.Tanh),
    "a product": written(lambda m, x: x @ m.inner.weight.T + m.inner.bias, inner=linear()),
    "a Conv1D": Conv1D,
    "a weight that is cast": written(lambda m, x: F.linear(x, m.inner.weight.to(x.dtype)), inner=linear()),
    "a bias that is computed": written(
        lambda m, x: F.linear(x, m.inner.weight, m.inner.bias.exp()), inner=linear()
    ),
    "a function": written(lambda m, x: m.inner(x), inner=lambda: nn.Sequential(linear()())),
}


@pytest.mark.parametrize("name", FUSES)
def test_fuses(name: str) -> None:
    assert fused(FUSES[name]).counts == {"linear": 1}


def test_one_called_twice_is_two_products() -> None:
    assert fused(written(lambda m, x: m.inner(m.inner(x)), inner=linear())).counts == {"linear": 2}


class Int8(nn.Module):
    """A weight of bytes, with a scale for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Buffer(torch.randint(-9, 9, (8, H), dtype=torch.int8))
        self.scale = nn.Parameter(torch.rand(8, 1))

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.scale)


def with_buffer() -> nn.Module:
    model = nn.Sequential(linear()(), linear()())
    weight = model[1].weight.detach()
    del model[1].weight
    model[1].weight = nn.Buffer(weight)
    return model


def complex_numbers() -> nn.Module:
    return written(
        lambda m, x: m.inner(x.to(torch.complex64)).real, inner=lambda: nn.Linear(H, H, dtype=torch.complex64)
    )()


def untrained() -> nn.Module:
    model = sequential(linear(bias=False), nn.Tanh, linear())()
    model[0].weight.requires_grad_(False)
    return model


def wide() -> nn.Module:
    return nn.Linear(H, H, bias=False, dtype=torch.float64)


REFUSES = {
    "computed": (
        written(lambda m, x: F.linear(x, m.inner.weight * 2), inner=linear()),
        "the linear's weight is computed at every call, a parameter is needed: compute it once "
        "and store it, where training allows",
    ),
    "rows of a parameter": (
        written(lambda m, x: F.linear(x, m.inner.weight.chunk(2)[1]), inner=linear()),
        "the linear's weight is a view of the parameter inner.weight, a whole one is needed: store it as a "
        "parameter of its own",
    ),
    "a parameter of another shape": (
        written(lambda m, x: F.linear(x, m.inner.weight.squeeze(-1)), inner=lambda: nn.Conv1d(H, H, 1)),
        "the linear's weight is a view of the parameter inner.weight, a whole one is needed: store it as a "
        "parameter of its own",
    ),
    "int8": (
        Int8,
        "the linear's weight is computed at every call, a parameter is needed: compute it once and store "
        "it, where training allows",
    ),
    "cast": (
        written(lambda m, x: F.linear(x.double(), m.inner.weight.double()), inner=linear(bias=False)),
        "the linear's weight is cast to float64 at every call, a parameter is needed: store it in float64",
    ),
    "a bias for all rows": (
        written(lambda m, x: F.linear(x, m.inner.weight, m.inner.bias[:1]), inner=linear()),
        "the linear's bias is [1], one number for each of 16 rows is needed: add it after the product",
    ),
    "a buffer": (
        with_buffer,
        "the linear's weight is a buffer, a parameter is needed: store it as an "
        "nn.Parameter, with requires_grad=False where it is not trained",
    ),
    "complex numbers": (
        complex_numbers,
        "the linear's weight is complex64, a floating point parameter is needed: no kernel takes others",
    ),
}


FOLLOWED = {  # what the sentences advise
    "compute it once and store it": (lambda: remove_parametrizations(weight_norm(linear()()), "weight"), 1),
    "store it in float64": (written(lambda m, x: F.linear(x.double(), m.inner.weight), inner=wide), 1),
    "add it after the product": (
        written(lambda m, x: F.linear(x, m.inner.weight) + m.inner.bias[:1], inner=linear()),
        1,
    ),
    "store it as an nn.Parameter": (untrained, 2),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_is_advised_is_fused(name: str) -> None:
    make, count = FOLLOWED[name]
    report = fused(make)
    report.expect(linear=count)
    assert not report.refused


@pytest.mark.parametrize("name", REFUSES)
def test_refuses(name: str) -> None:
    make, sentence = REFUSES[name]
    assert sentence in reasons(fused(make), "linear")


def test_refuses_integers() -> None:
    model = linear(bias=False)()
    model.weight = nn.Parameter(torch.randint(-3, 3, (H, H)), requires_grad=False)
    report = te_transform.inspect(nn.Sequential(linear()(), Casting(), model), X)
    assert reasons(report, "linear") == {
        "the linear's weight is int64, a floating point parameter is needed: no kernel takes others"
    }


class Casting(nn.Module):
    def forward(self, x):
        return x.long()
