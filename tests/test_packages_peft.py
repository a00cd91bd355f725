"""PEFT: adapters that are added before conversion and after it, trained, merged, unmerged and unloaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

import te_transform
from tests.packages import BATCHES, both, close, converted, gradients, original, train, weights

pytestmark = pytest.mark.usefixtures("at_any_size")

SOME = ["q_proj", "v_proj", "up_proj"]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(model: nn.Module, targets: list[str] = SOME, **settings: Any) -> nn.Module:
    """The model with adapters that are not zero."""
    torch.manual_seed(0)
    options = {"target_modules": targets, "r": 4, "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(**options | settings))


def then_converted(targets: list[str] = SOME, **settings: Any) -> nn.Module:
    """Adapters first, conversion after: projections with an adapter read the norm along with it."""
    model = adapted(original(), targets, **settings)
    model = te_transform.convert(model, BATCHES[0], inplace=True, verify=False)
    assert te_transform.report(model).counts["merge_siblings"] > 0
    return model


def trained(model: nn.Module) -> Any:
    """Only the adapters move."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return train(model, optimizer), {name: t for name, t in weights(model).items() if "lora" in name}


@pytest.mark.parametrize(
    "targets",
    [
        *(
            pytest.param(each, marks=pytest.mark.integration)
            for each in (["q_proj", "v_proj"], ["gate_proj", "down_proj"])
        ),
        ALL,
    ],
    ids=str,
)
def test_adapters_train(targets: list[str]):
    expected = trained(adapted(original(), targets))
    for model in (adapted(converted(), targets), then_converted(targets)):
        close(trained(model), expected)
        trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert trainable == {name for name, gradient in gradients(model).items() if gradient is not None}
        assert all("lora" in name for name in trainable)


EITHER: dict[str, Callable[[], nn.Module]] = {
    "converted, adapted": lambda: adapted(converted()),
    "adapted, converted": then_converted,
}


def in_either_order(here: str = "") -> pytest.MarkDecorator:
    """`make` is each of EITHER; the order that `here` is not is left to `make integrations`."""
    marks = {name: () if name == here else pytest.mark.integration for name in EITHER}
    cases = [pytest.param(make, id=name, marks=marks[name]) for name, make in EITHER.items()]
    return pytest.mark.parametrize("make", cases)


@pytest.mark.integration
@pytest.mark.parametrize("safe", [True, False], ids=["safe_merge", "in place"])
@in_either_order()
def test_merged_and_unloaded(make: Callable[[], nn.Module], safe: bool):
    def act(model: nn.Module) -> Any:
        before = model(*BATCHES[0])
        merged = model.merge_and_unload(safe_merge=safe)
        assert [*weights(merged)] == [*weights(original())]
        close(merged(*BATCHES[0]), before, rtol=1e-6)  # PEFT goes through float32
        return weights(merged), trained(merged.requires_grad_()), weights(merged)

    close(act(make()), act(adapted(original())))


@in_either_order(here="converted, adapted")
def test_merged_and_unmerged(make: Callable[[], nn.Module]):
    def act(model: nn.Module) -> Any:
        answers = [model(*BATCHES[0])]
        for safe in (True, False):
            model.merge_adapter(safe_merge=safe)
            answers += [model(*BATCHES[0]), *weights(model).values()]
            model.unmerge_adapter()
            answers += [model(*BATCHES[0]), *weights(model).values()]
        return answers, trained(model)

    close(act(make()), act(adapted(original())))


@in_either_order(here="adapted, converted")
def test_adapters_are_switched(make: Callable[[], nn.Module]):
    def act(model: nn.Module) -> Any:
        torch.manual_seed(1)
        model.add_adapter("second", peft.LoraConfig(target_modules=["k_proj"], init_lora_weights=False))
        answers = [model(*BATCHES[0])]
        model.set_adapter("second")
        answers.append(model(*BATCHES[0]))
        with model.disable_adapter():
            answers.append(model(*BATCHES[0]))
        return *answers, model.unload()(*BATCHES[0])

    with torch.no_grad():
        close(act(make()), act(adapted(original())))


@in_either_order(here="converted, adapted")
def test_an_adapters_file(make: Callable[[], nn.Module], tmp_path: Path):
    make().save_pretrained(tmp_path)
    expected = adapted(original())(*BATCHES[0])
    for base in (original, converted):
        close(peft.PeftModel.from_pretrained(base(), tmp_path)(*BATCHES[0]), expected)


OTHERS = {"a norm too": {"modules_to_save": ["norm2"]}, "biases": {"bias": "all"}}


@pytest.mark.integration
@pytest.mark.parametrize("settings", OTHERS.values(), ids=OTHERS)
def test_other_settings(settings: dict[str, Any]):
    expected = trained(adapted(original(), **settings))
    close(trained(adapted(converted(), **settings)), expected)
    close(trained(then_converted(**settings)), expected)


def test_vectors_that_scale_activations():
    def act(model: nn.Module) -> Any:
        targets = {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
        model = peft.get_peft_model(model, peft.IA3Config(**targets))
        losses = train(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0))
        return losses, weights(model.merge_and_unload())

    both(act)
