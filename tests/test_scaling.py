"""docs/scaling.py: sizes that are known, and what the table is computed from, by hand."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="module")
def scaling() -> ModuleType:
    spec = spec_from_file_location("scaling", Path(__file__).parent.parent / "docs/scaling.py")
    sys.modules["scaling"] = module = module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_parameters_are_those_of_the_model(scaling: ModuleType):
    assert [round(model.parameters / 1e9, 1) for model in scaling.MODELS] == [8.0, 70.6, 405.9]
    small = scaling.Model("", 2, 64, 96, 8, groups=4, vocabulary=100)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_attention_heads=8, num_key_value_heads=4,
        num_hidden_layers=2, vocab_size=100,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert small.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_traffic_by_hand(scaling: ModuleType):
    model, gigabyte = scaling.MODELS[0], 1e9
    whole = 2 * model.parameters
    nvlink, network = scaling.traffic(model, scaling.Mesh(1, 8))
    assert nvlink == 3 * whole * 7 / 8
    assert network == 0
    # two hosts, a shard in each GPU: half of all comes from the other one, by eight adapters
    nvlink, network = scaling.traffic(model, scaling.Mesh(1, 16))
    assert network == pytest.approx(3 * whole / 2 / 8)
    # two replicas: a shard of the gradients goes to the other one, and comes back as a sum
    assert scaling.traffic(model, scaling.Mesh(2, 8))[1] == pytest.approx(whole / 8)
    nvlink, network = scaling.traffic(model, scaling.Mesh(1, 2, 8))
    assert nvlink / gigabyte == pytest.approx(32 * 12 * 8192 * 4096 * 2 * 7 / 8 / gigabyte)
    assert network == pytest.approx(3 * whole / 8 / 2)


def test_meshes_have_all_the_gpus(scaling: ModuleType):
    for gpus in scaling.GPUS:
        found = [*scaling.meshes(gpus)]
        assert {mesh.replicas * mesh.shards * mesh.tensor for mesh in found} == {gpus}
        assert len(set(found)) == len(found)
        assert scaling.Mesh(1, gpus) in found


@pytest.mark.integration
def test_the_page_is_what_is_computed(scaling: ModuleType):
    assert scaling.page() == scaling.PAGE.read_text(encoding="utf-8"), "run docs/scaling.py"
