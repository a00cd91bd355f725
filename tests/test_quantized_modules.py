"""Quantized weights are named; models with other narrow tensors are not taken for quantized ones."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import te_transform
from te_transform.plan.quantized_modules import quantized_modules

X = torch.randn(2, 16)


class Int8Linear(nn.Module):
    """A handwritten quantized linear: a buffer of integers, and a scale per row."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.ones(16, 16, dtype=torch.int8))
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.codes.to(x.dtype)) * self.scale


class QuantLinear(Int8Linear):
    """A linear packed as by GPTQ: eight 4-bit numbers in each int32."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = torch.ones(16, 16, dtype=torch.int32)


class Linear4bit(nn.Linear):
    """A linear as in bitsandbytes: a subclass of nn.Linear with a packed parameter."""

    def __init__(self) -> None:
        super().__init__(16, 16, bias=False)
        self.weight = nn.Parameter(torch.ones(16, 16, dtype=torch.uint8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.to(x.dtype).t()


class FP8Linear(Linear4bit):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 16).to(torch.float8_e4m3fn), requires_grad=False)


def packed() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.Linear(16, 16))
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)[0]


QUANTIZED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a buffer": (Int8Linear, "int8 of Int8Linear"),
    "packed in int32": (QuantLinear, "int32 of QuantLinear"),
    "a parameter": (Linear4bit, "uint8 of Linear4bit"),
    "float8": (FP8Linear, "float8_e4m3fn of FP8Linear"),
    "of torch.ao": (packed, "packed weights of Linear"),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_weights_are_named(name: str) -> None:
    make, what = QUANTIZED[name]
    model = nn.Sequential(nn.LayerNorm(16), make(), make())
    assert quantized_modules(model) == {what: ["1", "2"]}
    notes = te_transform.inspect(model, X).notes
    told = f"weights are quantized ({what}) in {{1,2}}, so their products are not fused: dequantize the "
    assert told + "weights before convert() to fuse them" in notes


def test_a_model_of_quantized_weights_alone_is_refused() -> None:
    with pytest.raises(te_transform.ModelError, match=r"ones \(packed weights of Linear\); dequantize"):
        te_transform.convert(nn.Sequential(packed()), X)


class Masks(nn.Linear):
    """A mask of integers and positions, which are no weights."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.register_buffer("mask", torch.ones(1, 16, dtype=torch.bool))
        self.register_buffer("positions", torch.arange(16)[None])


class Attention(Masks):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bits", torch.ones(16, dtype=torch.uint8))


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)
        self.register_buffer("bias", torch.ones(16, 16, dtype=torch.uint8).tril())


@pytest.mark.parametrize("make", [Masks, Attention, Causal, lambda: nn.Linear(16, 16).half()])
def test_other_tensors_are_no_quantized_weights(make: Callable[[], nn.Module]) -> None:
    assert quantized_modules(make()) == {}


def test_a_model_that_gains_nothing_is_told_so() -> None:
    told = "no speedup: only single products are fused, and this backend runs them like the model"
    alone = nn.Sequential(nn.Linear(16, 16))
    assert told in te_transform.inspect(alone, X).notes
    assert told in te_transform.report(te_transform.convert(alone, X)).notes
    for gains in ({"backend": "te"}, {"compile": True}):
        assert told not in te_transform.inspect(alone, X, **gains).notes
    assert told not in te_transform.inspect(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)), X).notes


def test_a_model_in_which_nothing_is_fused_is_told_so() -> None:
    unlike = nn.Sequential(nn.Conv1d(16, 16, 3, padding=1), nn.PReLU())
    assert "nothing fused: no operations of the model resemble the pattern of a rule" in (
        te_transform.inspect(unlike, X[..., None]).notes
    )
    refused = te_transform.inspect(nn.Sequential(nn.Linear(16, 16)), X, skip="0")
    assert "nothing fused: every site that resembles the pattern of a rule is refused, see the reasons" in (
        refused.notes
    )
