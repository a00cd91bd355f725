"""Tensor parallelism in FP8, on the stand-in for Transformer Engine: ranks quantize what they have in common by
the same scales, and train as one does."""

from __future__ import annotations

import copy
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import te_transform
from tests.ranks import install_stand_in, mesh, scales_before, spawn
from tests.stand_in import Base
from tests.test_parallelize import equal, errors, gradients, sample_of
from tests.zoo import GPT2, LLAMA, Case, hf_case, zero_dropout

distributed = [pytest.mark.integration, pytest.mark.xdist_group("distributed")]

# sizes of which each of four ranks has a multiple of 16; q, k and v apart, and as one weight that is stored
# transposed
_LLAMA = LLAMA | {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128}
CASES = {
    "llama": hf_case("llama", "LlamaForCausalLM", "LlamaConfig", _LLAMA | {"num_key_value_heads": 4}),
    "gpt2": hf_case("gpt2", "GPT2LMHeadModel", "GPT2Config", GPT2 | {"n_layer": 1, "n_embd": 64}),
}
PRODUCTS = {"llama": 5, "gpt2": 4}  # with gates and ups as one; the head is not in FP8


def original(name: str) -> nn.Module:
    return zero_dropout(CASES[name].build()).to(torch.bfloat16).train()


def converted(name: str, **options: Any) -> nn.Module:
    options = {"backend": "te", "recipe": "fp8-delayed", "verify": False, **options}
    return te_transform.convert(original(name), sample_of(CASES[name]), **options)


def divided(name: str, **options: Any) -> nn.Module:
    return te_transform.parallelize(converted(name), mesh(), sample_of(CASES[name]), **options)


def batch(case: Case, step: int) -> dict[str, Any]:
    ids = case.sample(batch=2, seq=12, seed=step)["input_ids"]
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def train(model: nn.Module, case: Case, steps: range = range(4)) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in steps:
        loss = model(**batch(case, step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def first_step(model: nn.Module, case: Case) -> nn.Module:
    """Of which delayed scaling takes its first scales."""
    gradients(model, sample_of(case))
    model.zero_grad()
    return model


def compared(name: str, recipe: str, sequence_parallel: bool) -> dict[str, Any]:
    """A model that is divided after its first step beside the one that is not, and beside the original in
    fp64."""
    install_stand_in()
    case = CASES[name]
    sample = sample_of(case)
    wide = original(name).double()
    whole, model = (first_step(converted(name, recipe=recipe), case) for _ in range(2))
    before = te_transform.scaling_state(model)
    te_transform.parallelize(model, mesh(), sample, sequence_parallel=sequence_parallel)
    found: dict[str, Any] = {"before": before, "kept": te_transform.scaling_state(model)}
    exact = gradients(wide, sample)
    found["whole"], found["divided"] = (errors(gradients(m, sample), exact) for m in (whole, model))
    for trained in (wide, whole, model):
        trained.zero_grad()
    found["losses"] = [train(trained, case) for trained in (wide, whole)]
    with pytest.MonkeyPatch.context() as patch:
        found["steps"] = scales_before(lambda: found["losses"].append(train(model, case)), patch)
    found["after"] = te_transform.scaling_state(model)
    return found


def check(results: list[dict[str, Any]]) -> None:
    """The scales that were found before the model was divided go on; a divided model is no further from the exact
    gradients than twice what the whole one is, its losses no further from the whole one's than three times what
    these are from the exact ones: both models round, each otherwise."""
    first = results[0]
    for found in results:
        equal_rows(found["kept"], first["before"])
        assert max(found["divided"].values()) <= 2 * max(found["whole"].values())
        exact, whole, model = (torch.tensor(losses).double() for losses in found["losses"])
        assert (model - whole).norm() <= 3 * (whole - exact).norm()
        assert found["losses"] == first["losses"]
        assert found["steps"] == first["steps"]
        equal_rows(found["after"], first["after"])


def equal_rows(found: dict[str, dict[str, Tensor]], expected: dict[str, dict[str, Tensor]]) -> None:
    assert found.keys() == expected.keys()
    for name, row in expected.items():
        equal(found[name], row)


def cases(recipe: str) -> dict[str, dict[str, Any]]:
    return {
        "llama": compared("llama", recipe, sequence_parallel=True),
        "gpt2": compared("gpt2", recipe, sequence_parallel=False),
    }


class TestParity:
    pytestmark = distributed

    @pytest.mark.parametrize("ranks", [2, 4])
    @pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current"])
    def test_trains_as_one_rank_does(self, ranks: int, recipe: str, tmp_path: Path) -> None:
        results = spawn(partial(cases, recipe), ranks, tmp_path)
        for name, products in PRODUCTS.items():
            check([found[name] for found in results])
            steps = [len(step) for step in results[0][name]["steps"]]
            assert steps == ([2 * products] * 4 if recipe == "fp8-delayed" else [])
