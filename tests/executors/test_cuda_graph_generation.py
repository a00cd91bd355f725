"""The executor of CUDA graphs replays steps of a generation."""

import copy
from collections import Counter
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import StaticCache

import te_transform
from te_transform.execution import specialize
from tests.conversions import ALL, EVERYWHERE, error
from tests.executors.helpers import notes
from tests.recordings import Recorder

pytestmark = pytest.mark.usefixtures("cuda_graphs")


@pytest.mark.integration  # as the generations by turns below
def test_steps_with_a_static_cache_are_replayed(cuda_graphs: Recorder) -> None:
    case = ALL["llama"]
    model = case.build(num_hidden_layers=1).eval()
    converted = te_transform.convert(model, case.sample(), verify=False, graphs=True)
    ids = case.sample(seq=5)["input_ids"]

    def logits(each: nn.Module) -> list[Tensor]:
        cache, given, found = StaticCache(config=model.config, max_cache_len=16), ids, []
        with torch.no_grad():
            for _ in range(8):
                found.append(each(given, past_key_values=cache, use_cache=True).logits.clone())
                given = found[-1][:, -1:].argmax(-1)
        return found

    for batch in range(2):  # whose cache is another one, in other memory
        assert error(logits(converted), logits(model)) < EVERYWHERE
        assert cuda_graphs["forward"] == 6 * (batch + 1)  # seven tokens, two warm-ups, one check
    assert notes(converted) == []


@pytest.mark.integration
@pytest.mark.parametrize("compile", [True, False])
def test_steps_with_fp8_only_weights_are_replayed(
    te: ModuleType, products_of_few_rows: list[tuple[int, ...]], cuda_graphs: Recorder, compile: bool
) -> None:
    case = ALL["llama"]
    model = case.build(num_hidden_layers=1).bfloat16().eval().requires_grad_(False)
    recipe = te_transform.PrecisionPlan("fp8-current", small_calls=True)
    converted = te_transform.convert(
        model, case.sample(), verify=False, backend="te", recipe=recipe, graphs=True, compile=compile
    )
    prompt = case.sample(seq=20)["input_ids"]
    with torch.no_grad():
        converted(prompt)
    te_transform.quantize_weights(converted)
    model = copy.deepcopy(converted)
    te_transform.revert(model)

    def logits(each: nn.Module) -> list[Tensor]:
        cache, found = StaticCache(config=model.config, max_cache_len=40), []
        with torch.no_grad():
            converted(prompt, past_key_values=cache, use_cache=True)  # more rows, which are rounded to FP8
            for place in range(8):
                found.append(each(prompt[:, place : place + 1], past_key_values=cache).logits.float())
        return found

    found = logits(converted)
    assert cuda_graphs["forward"] >= 5
    assert {rows for rows, _ in products_of_few_rows} == {len(prompt)}
    assert error(found, logits(model)) < 0.02
    assert notes(converted) == []


def elsewhere(model: nn.Module) -> None:
    weight = model.model.layers[0].self_attn.k_proj.weight
    weight.data = weight.data * 2


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(2)


def swapped(model: nn.Module) -> None:
    mlp = model.model.layers[0].mlp
    mlp.gate_proj.weight, mlp.up_proj.weight = mlp.up_proj.weight, mlp.gate_proj.weight


def another_scale(model: nn.Module) -> None:
    model.model.layers[0].self_attn.scaling *= 2


def a_hook(model: nn.Module) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 2)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Count the calls whose values are read before they run."""
    looks, look = Counter(), specialize.Specialized.look

    def counted(self: specialize.Specialized, arguments: Sequence[Any]) -> Any:
        looks["looks"] += 1
        return look(self, arguments)

    monkeypatch.setattr(specialize.Specialized, "look", counted)
    return looks


@pytest.mark.integration  # each change alone is above
@pytest.mark.parametrize("flat", [False, True], ids=["own memory", "one memory for all"])
def test_changes_between_steps_are_seen(flat: bool, cuda_graphs: Recorder, looks: Counter) -> None:
    case = ALL["llama"]
    model = case.build(num_hidden_layers=1).eval()
    if flat:  # joined weights are copies then, which each call makes anew
        parameters = [*model.parameters()]
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(parameters), parameters)
    models = te_transform.convert(model, case.sample(), verify=False, graphs=True), model
    token, cache_of = case.sample(seq=1)["input_ids"], partial(StaticCache, config=model.config)
    caches = [cache_of(max_cache_len=128) for _ in models]

    @torch.no_grad()
    def agree(steps: int) -> None:
        for _ in range(steps):
            found = [
                each(token, past_key_values=cache).logits for each, cache in zip(models, caches, strict=True)
            ]
            assert error(found[:1], found[1:]) < EVERYWHERE

    agree(9)
    assert flat or looks["looks"] < 9
    for change in (in_place, elsewhere) if flat else (in_place, elsewhere, swapped, another_scale, a_hook):
        before = cuda_graphs["forward"]
        for each in models:
            change(each)
        agree(21)  # copies of joined weights may change their addresses, and each address is recorded
        assert cuda_graphs["forward"] > before, change


@pytest.mark.parametrize(
    "padded",
    [pytest.param(False, marks=pytest.mark.integration), True],
    ids=["a mask of sizes", "a mask of data"],
)
def test_masks_of_data_are_classified_in_each_call(
    padded: bool, cuda_graphs: Recorder, looks: Counter
) -> None:
    case = ALL["llama"]
    model = case.build(num_hidden_layers=1).eval()
    inputs = {"input_ids": case.sample(seq=7)["input_ids"]}
    masks = [torch.ones_like(inputs["input_ids"])] if padded else []
    if padded:
        masks.append(masks[0].clone().index_fill_(1, torch.tensor([0, 1]), 0))
    given = [{**inputs, "attention_mask": mask} for mask in masks] or [inputs]
    converted = te_transform.convert(model, given[0], verify=False, graphs=True)
    with torch.no_grad():
        for call in range(9):
            each = given[call % len(given)]
            # a mask of sizes is the same in all calls, one of data is looked at in each
            assert error(converted(**each).logits, model(**each).logits) < EVERYWHERE
    assert looks["looks"] == 9 if padded else looks["looks"] < 9
    assert cuda_graphs["forward"] > 0, notes(converted)


@pytest.mark.integration
def test_steps_of_two_generations_by_turns_are_right(cuda_graphs: Recorder) -> None:
    case = ALL["llama"]
    model = case.build(num_hidden_layers=1).eval()
    models = te_transform.convert(model, case.sample(), verify=False, graphs=True), model
    ids = case.sample(seq=5)["input_ids"]
    caches = [[StaticCache(config=model.config, max_cache_len=32) for _ in models] for _ in range(2)]
    model.requires_grad_(False)
    models[0].requires_grad_(False)
    for step in range(12):
        with torch.set_grad_enabled(step % 3 == 0):
            found = [
                each(ids[:, step % 5, None], past_key_values=cache).logits
                for each, cache in zip(models, caches[step % 2], strict=True)
            ]
        assert error(found[:1], found[1:]) < EVERYWHERE
    assert cuda_graphs["forward"] > 0, notes(models[0])


@pytest.mark.integration  # as the generations by turns
def test_generate_replays_with_a_static_cache_only(cuda_graphs: Recorder) -> None:
    case = ALL["llama"]
    model = case.build(num_hidden_layers=1).eval()
    converted = te_transform.convert(model, case.sample(), verify=False, graphs=True)
    ids, how = case.sample(seq=5)["input_ids"], {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(converted.generate(ids, **how), model.generate(ids, **how))
    assert cuda_graphs["recorded"] == 0
    how |= {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(converted.generate(ids, **how), model.generate(ids, **how))
    assert cuda_graphs["recorded"] == 1
