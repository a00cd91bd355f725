"""Optimizer state goes along, both ways: training goes on as if nothing had happened."""

import copy

import pytest
import torch
from torch import nn

import te_transform
from te_transform.optimizer import OptimizerError
from tests.zoo import CASES, tensors, zero_dropout

OPTIMIZERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-3),
    "Adam amsgrad": lambda groups: torch.optim.Adam(groups, lr=1e-3, amsgrad=True),
    "SGD momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-4),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-3),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=1e-3),
}


def groups_of(model: nn.Module) -> list[dict]:
    """Weight decay for matrices only, as everybody does."""
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict, steps: int = 3) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = next(iter(tensors(model(**inputs)))).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def started(name: str, make) -> tuple[nn.Module, torch.optim.Optimizer, dict]:
    model, inputs = zero_dropout(CASES[name].build()).train(), CASES[name].sample(2, 12, 0, False)
    optimizer = make(groups_of(model))
    train(model, optimizer, inputs)
    return model, optimizer, inputs


def assert_agree(one: list[float], other: list[float]) -> None:
    assert all(abs(a - b) <= 1e-5 * abs(a) for a, b in zip(one, other, strict=True)), (one, other)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_training_goes_on_converted_and_reverted(name: str, make) -> None:
    model, optimizer, inputs = started(name, make)
    converted = te_transform.convert(model, inputs, verify=False)
    moved = te_transform.move_optimizer(optimizer, converted, model)
    assert type(moved) is type(optimizer)
    assert [g["weight_decay"] for g in moved.param_groups] == [0.1, 0.0]
    assert_agree(train(model, optimizer, inputs), train(converted, moved, inputs))
    reverted = te_transform.revert(copy.deepcopy(converted))
    back = te_transform.move_optimizer(moved, reverted, converted)
    assert_agree(train(converted, moved, inputs), train(reverted, back, inputs))


def test_there_and_back_is_bitwise() -> None:
    model, optimizer, inputs = started("llama", OPTIMIZERS["AdamW"])
    converted = te_transform.convert(model, inputs, verify=False)
    back = te_transform.move_optimizer(
        te_transform.move_optimizer(optimizer, converted, model), model, converted
    )
    for before, after in zip(optimizer.param_groups, back.param_groups, strict=True):
        assert {id(p) for p in before["params"]} == {id(p) for p in after["params"]}
    for parameter in model.parameters():
        before, after = optimizer.state[parameter], back.state[parameter]
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
        assert all(before[key].data_ptr() != after[key].data_ptr() for key in before)


def test_in_place_the_optimizer_follows_and_its_scheduler_goes_on() -> None:
    reference, expected, inputs = started("llama", OPTIMIZERS["AdamW"])
    model, optimizer, _ = started("llama", OPTIMIZERS["AdamW"])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    te_transform.convert(model, inputs, inplace=True, verify=False)
    assert te_transform.move_optimizer(optimizer, model, inplace=True) is optimizer
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    assert_agree(train(reference, expected, inputs), train(model, optimizer, inputs))
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(5e-4)


def test_the_original_optimizer_is_left_untouched() -> None:
    model, optimizer, inputs = started("gpt2", OPTIMIZERS["AdamW"])
    before = copy.deepcopy(optimizer.state_dict())
    converted = te_transform.convert(model, inputs, verify=False)
    moved = te_transform.move_optimizer(optimizer, converted, model)
    train(converted, moved, inputs)
    after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for key, state in before["state"].items():
        assert all(torch.equal(value, after["state"][key][name]) for name, value in state.items())


def test_parameters_without_state_and_frozen_ones() -> None:
    model, inputs = zero_dropout(CASES["llama"].build()), CASES["llama"].sample(2, 12, 0, False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0" not in name)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    converted = te_transform.convert(model, inputs, verify=False)
    moved = te_transform.move_optimizer(optimizer, converted, model)
    assert {id(p) for p in moved.param_groups[0]["params"]} == {
        id(p) for p in converted.parameters() if p.requires_grad
    }
    assert_agree(train(model, optimizer, inputs), train(converted, moved, inputs))


def test_joined_parameters_in_two_groups_are_refused() -> None:
    model, inputs = CASES["llama"].build(), CASES["llama"].sample(2, 12, 0, False)
    queries = [p for name, p in model.named_parameters() if "q_proj" in name]
    others = [p for name, p in model.named_parameters() if "q_proj" not in name]
    optimizer = torch.optim.SGD([{"params": queries, "lr": 0.1}, {"params": others, "lr": 0.2}])
    converted = te_transform.convert(model, inputs, verify=False)
    with pytest.raises(
        OptimizerError, match=r"q_proj.weight in 0, model.layers.0.self_attn.k_proj.weight in 1"
    ):
        te_transform.move_optimizer(optimizer, converted, model)
    apart = te_transform.convert(model, inputs, verify=False, skip="*.self_attn")
    assert len(te_transform.move_optimizer(optimizer, apart, model).param_groups) == 2


def test_a_joined_parameter_of_which_the_optimizer_has_a_part_is_refused() -> None:
    model, inputs = CASES["llama"].build(), CASES["llama"].sample(2, 12, 0, False)
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if "k_proj" not in name], lr=0.1)
    converted = te_transform.convert(model, inputs, verify=False)
    with pytest.raises(OptimizerError, match=r"k_proj.weight in none"):
        te_transform.move_optimizer(optimizer, converted, model)


def test_state_of_another_shape_is_refused_and_nothing_is_changed() -> None:
    model, inputs = CASES["llama"].build(), CASES["llama"].sample(2, 12, 0, False)
    optimizer = torch.optim.Adafactor(model.parameters())
    train(model, optimizer, inputs, steps=1)
    before = [list(group["params"]) for group in optimizer.param_groups]
    converted = te_transform.convert(model, inputs, verify=False)
    with pytest.raises(OptimizerError, match=r"the state 'row_var' of .* to be joined it needs"):
        te_transform.move_optimizer(optimizer, converted, model, inplace=True)
    assert [list(group["params"]) for group in optimizer.param_groups] == before


def test_another_models_optimizer_is_refused() -> None:
    model, inputs = CASES["llama"].build(), CASES["llama"].sample(2, 12, 0, False)
    converted = te_transform.convert(model, inputs, verify=False)
    stranger = torch.optim.SGD(CASES["gpt2"].build().parameters(), lr=0.1)
    with pytest.raises(
        OptimizerError, match="is none of the source model's: pass the model that the optimizer was made for"
    ):
        te_transform.move_optimizer(stranger, converted, model)
