"""Families of transformers, and models of other packages, on Transformer Engine, in bf16 and in each FP8
recipe: the originals' numbers."""

import pytest
import torch
import transformers
from torch import nn

import te_transform
from tests.conversions import cast
from tests.families import FAMILIES
from tests.others import OTHERS
from tests.zoo import Inputs, zero_dropout

MODELS = FAMILIES | OTHERS
# Its decoder looks ahead where it is not traced: a conversion that verifies notices, ../test_families.py.
del MODELS["umt5"]
del MODELS["lucid_local"]  # its own rotary embedding makes float32 of bf16 queries: it does not run in bf16


def built(name: str) -> nn.Module:
    try:
        model = MODELS[name].build()
    except ModuleNotFoundError as missing:  # `make integrations` installs the packages
        pytest.skip(f"{missing.name} is not installed")
    return zero_dropout(model).to("cuda", torch.bfloat16)


def sample(name: str) -> Inputs:
    inputs = cast(MODELS[name].sample(2, 16), torch.bfloat16)
    moved = {id(tensor): tensor.cuda() for tensor in inputs.values()}
    return {key: moved[id(tensor)] for key, tensor in inputs.items()}


@pytest.mark.parametrize("recipe", [None, "fp8-delayed", "fp8-current", "fp8-block"])
@pytest.mark.parametrize("name", MODELS)
def test_is_as_exact_as_the_original(name: str, recipe: str | None) -> None:
    model, given = built(name), sample(name)
    converted = te_transform.convert(model, given, backend="te", recipe=recipe, verify=False)
    result = te_transform.verify(model, converted, given)
    assert result, str(result)
    assert not [note for note in te_transform.report(converted).notes if "rolled back" in note]


def test_a_scan_trains_with_long_rows() -> None:
    """Memory for each pair of tokens would be 64 GiB."""
    config = transformers.MambaConfig(vocab_size=99, hidden_size=256, num_hidden_layers=2, state_size=16)
    torch.manual_seed(0)
    model = transformers.MambaForCausalLM(config).to("cuda", torch.bfloat16)
    ids = torch.randint(99, (2, 1024), device="cuda")
    given = {"input_ids": ids, "labels": ids, "use_cache": False}
    converted = te_transform.convert(model, given, verify=False)
    peaks = []
    for each in (model, converted):
        torch.cuda.reset_peak_memory_stats()
        each(**given).loss.backward()
        peaks.append(torch.cuda.max_memory_allocated())
    original, own = (
        torch.cat([p.grad.float().flatten() for p in each.parameters()]) for each in (model, converted)
    )
    assert (own - original).norm() < 0.02 * original.norm()
    assert peaks[1] < 3 * peaks[0]
