"""Families of transformers on Transformer Engine, in bf16 and in each FP8 recipe: the originals' numbers."""

import pytest
import torch

import te_transform
from tests.conversions import cast
from tests.families import FAMILIES
from tests.zoo import Inputs, zero_dropout


def sample(name: str) -> Inputs:
    inputs = cast(FAMILIES[name].sample(2, 16), torch.bfloat16)
    moved = {id(tensor): tensor.cuda() for tensor in inputs.values()}
    return {key: moved[id(tensor)] for key, tensor in inputs.items()}


@pytest.mark.parametrize("recipe", [None, "fp8-delayed", "fp8-current", "fp8-block"])
@pytest.mark.parametrize("name", FAMILIES)
def test_is_as_exact_as_the_original(name: str, recipe: str | None) -> None:
    model, given = zero_dropout(FAMILIES[name].build()).to("cuda", torch.bfloat16), sample(name)
    converted = te_transform.convert(model, given, backend="te", recipe=recipe, verify=False)
    result = te_transform.verify(model, converted, given)
    assert result, str(result)
    assert not [note for note in te_transform.report(converted).notes if "taken back" in note]
