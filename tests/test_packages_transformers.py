"""transformers: generate(), gradient checkpointing and folders do with a converted model what they did."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import te_transform
from tests.packages import LLAMA_IDS, close, converted_llama, llama

pytestmark = pytest.mark.usefixtures("at_any_size")

PROMPT = {"input_ids": LLAMA_IDS[:2, :6], "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])}
LONGER = {"max_new_tokens": 6, "pad_token_id": 0}
ALMOST = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def models() -> tuple[nn.Module, nn.Module]:
    return llama().eval(), converted_llama(**PROMPT).eval()


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"output_scores": True, "return_dict_in_generate": True},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 2.0},
    "beams": {"num_beams": 2},
    "without a cache": {"use_cache": False, "max_new_tokens": 3},
    "a static cache": {"cache_implementation": "static"},
}


LATER = ("sampling", "beams", "without a cache")  # calls of the kinds that the others make


@pytest.mark.xdist_group("generate")  # `models` once a process
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, id=name, marks=pytest.mark.integration if name in LATER else ())
        for name, way in WAYS.items()
    ],
)
def test_generated_tokens(way: dict[str, Any], models: tuple[nn.Module, nn.Module]):
    found = []
    for model in models:
        torch.manual_seed(0)
        found.append(model.generate(**PROMPT | LONGER | way))
    if isinstance(found[0], Tensor):
        assert torch.equal(*found)
    else:
        assert torch.equal(found[1].sequences, found[0].sequences)
        close(found[1].scores, found[0].scores, **ALMOST)


@pytest.mark.xdist_group("generate")
def test_a_cache_that_goes_on(models: tuple[nn.Module, nn.Module]):
    """A chat: the next turn reads the cache of the last turn."""
    answers = []
    for model in models:
        cache = transformers.DynamicCache(config=model.config)
        first = model.generate(**PROMPT, **LONGER, past_key_values=cache)
        turn = torch.cat([first, LLAMA_IDS[2:4, :3]], dim=-1)
        answers += [first, model.generate(turn, **LONGER, past_key_values=cache)]
    assert torch.equal(answers[2], answers[0])
    assert torch.equal(answers[3], answers[1])


@pytest.mark.parametrize(
    ("order", "reentrant"),
    [("converted, enabled", True), ("converted, enabled", False), ("enabled, converted", False)],
)
@pytest.mark.integration  # test_models_numbers.py and test_attacks_transforms.py have checkpoints
def test_gradient_checkpointing(order: str, reentrant: bool):
    def enabled(model: nn.Module) -> nn.Module:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        return model

    def act(model: nn.Module) -> Any:
        losses = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in LLAMA_IDS.split(4):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, {name: p.grad for name, p in model.named_parameters()}

    expected = act(enabled(llama(layers=2)))
    if order == "converted, enabled":
        model = enabled(converted_llama(layers=2))
    else:
        sample = {"input_ids": LLAMA_IDS[:2], "labels": LLAMA_IDS[:2], "use_cache": False}
        model = te_transform.convert(enabled(llama(layers=2)), sample, inplace=True, verify=False)
        assert te_transform.report(model).counts["layernorm_mlp"] > 0
    close(act(model), expected, **ALMOST)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


def test_a_folder(tmp_path: Path):
    model = converted_llama()
    model.save_pretrained(tmp_path / "converted", max_shard_size="20KB")
    llama().save_pretrained(tmp_path / "original", max_shard_size="20KB")
    files = [sorted(path.name for path in folder.iterdir()) for folder in sorted(tmp_path.iterdir())]
    assert files[0] == files[1]
    for name in files[0]:
        if name.endswith(".json"):
            assert (tmp_path / "converted" / name).read_text() == (tmp_path / "original" / name).read_text()
    expected, logits = llama().state_dict(), llama().eval()(LLAMA_IDS).logits
    for kind in (transformers.LlamaForCausalLM, transformers.AutoModelForCausalLM, type(model)):
        again = kind.from_pretrained(tmp_path / "converted")
        assert [*again.state_dict()] == [*expected]
        assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())
        close(again(LLAMA_IDS).logits, logits, **ALMOST)
