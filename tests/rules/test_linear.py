"""Whatever linear is left: in plain PyTorch it stays what it was, in a recipe its product runs in FP8."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

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


REFUSES = {
    "computed": (
        written(lambda m, x: F.linear(x, m.inner.weight * 2), inner=linear()),
        "the linear's weight is computed at every call, a parameter is needed",
    ),
    "rows of a parameter": (
        written(lambda m, x: F.linear(x, m.inner.weight.chunk(2)[1]), inner=linear()),
        "the linear's weight is a view of the parameter inner.weight, one of its own is needed",
    ),
    "a parameter of another shape": (
        written(lambda m, x: F.linear(x, m.inner.weight.squeeze(-1)), inner=lambda: nn.Conv1d(H, H, 1)),
        "the linear's weight is a view of the parameter inner.weight, one of its own is needed",
    ),
    "int8": (Int8, "the linear's weight is computed at every call, a parameter is needed"),
    "a bias for all rows": (
        written(lambda m, x: F.linear(x, m.inner.weight, m.inner.bias[:1]), inner=linear()),
        "the linear's bias is [1], one number for each of 16 rows is needed",
    ),
    "a buffer": (
        with_buffer,
        "the linear's weight is a buffer, a constant or an input, a parameter is needed",
    ),
    "complex numbers": (
        complex_numbers,
        "the linear's weight is complex64, a floating point parameter is needed",
    ),
}


@pytest.mark.parametrize("name", REFUSES)
def test_refuses(name: str) -> None:
    make, sentence = REFUSES[name]
    assert sentence in reasons(fused(make), "linear")


def test_refuses_integers() -> None:
    model = linear(bias=False)()
    model.weight = nn.Parameter(torch.randint(-3, 3, (H, H)), requires_grad=False)
    report = te_transform.inspect(nn.Sequential(linear()(), Casting(), model), X)
    assert reasons(report, "linear") == {"the linear's weight is int64, a floating point parameter is needed"}


class Casting(nn.Module):
    def forward(self, x):
        return x.long()
