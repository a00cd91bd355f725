"""Packages that quantize weights, torchao and optimum-quanto, before and after conversion."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import te_transform
from tests.packages import IDS, Make, close, convert, converted, original

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("at_any_size")]

Quantize = Callable[[nn.Module], object]


def by_torchao(model: nn.Module) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())


def by_quanto(model: nn.Module) -> None:
    quanto = pytest.importorskip("optimum.quanto")
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)


PACKAGES = pytest.mark.parametrize("quantize", [by_torchao, by_quanto])
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def answer(make: Make, quantize: Quantize, called_before: bool = False) -> Tensor:
    model = make().eval().float()
    with torch.no_grad():
        if called_before:
            model(IDS)
        quantize(model)
        return model(IDS)


@PACKAGES
@pytest.mark.parametrize("called_before", [False, True])
def test_quantized_after_conversion(quantize: Quantize, called_before: bool) -> None:
    expected = answer(original, quantize)
    close(answer(converted, quantize, called_before), expected, **CLOSE)
    unquantized = answer(original, lambda model: None)
    assert not torch.allclose(expected, unquantized, **CLOSE)  # else the test could not tell the two


@PACKAGES
def test_quantized_before_conversion(quantize: Quantize) -> None:
    def made() -> nn.Module:
        model = original().float()
        quantize(model)
        return te_transform.convert(model.eval(), IDS, inplace=True)  # quanto's weights cannot be copied

    close(made()(IDS).detach(), answer(original, quantize), **CLOSE)


@PACKAGES
def test_a_part_that_is_quantized_leaves_the_others_fused(quantize: Quantize) -> None:
    def partly(make: Make) -> Tensor:
        return answer(make, lambda model: quantize(model.blocks[0]))

    close(partly(lambda: convert(original(2))), partly(lambda: original(2)), **CLOSE)
