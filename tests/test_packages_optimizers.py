"""Optimizers, clipping, scaling and averaging do to a converted model what they do to the original."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.packages import BATCHES, IDS, MODELS, both, close, convert, gradients, original, train, weights

pytestmark = pytest.mark.usefixtures("at_any_size")


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if p.dim() == 2 and "embedding" not in name]


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for everything else, as it is meant to be used."""
    hidden = {id(p) for p in matrices(model)}
    rest = [p for p in model.parameters() if id(p) not in hidden]
    return [torch.optim.Muon(matrices(model), lr=0.02), torch.optim.AdamW(rest, lr=1e-3)]


def decayed_by_name(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with what every training script has: no weight decay for norms and embeddings, known by name."""
    named = dict(model.named_parameters())
    plain = {name for name in named if "norm" in name or "embedding" in name}
    return torch.optim.AdamW(
        [
            {"params": [(name, p) for name, p in named.items() if name not in plain], "weight_decay": 0.1},
            {"params": [(name, named[name]) for name in sorted(plain)], "weight_decay": 0.0},
        ],
        lr=1e-3,
    )


def one_rate_for_each_projection(model: nn.Module) -> torch.optim.Optimizer:
    """q, k and v, which a converted model multiplies as one, in groups of their own."""
    named = dict(model.named_parameters())
    rates = {"q_proj": 1e-3, "k_proj": 2e-3, "v_proj": 4e-3, "gate_proj": 8e-3}
    groups = [{"params": [p for n, p in named.items() if key in n], "lr": r} for key, r in rates.items()]
    return torch.optim.SGD(groups, lr=1e-3, momentum=0.9)


def relative(model: nn.Module) -> torch.optim.Optimizer:
    return transformers.Adafactor(model.parameters(), relative_step=True, warmup_init=True)


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "Muon": muon,
    "torch Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
    "transformers Adafactor": relative,
    "AdamW by name": decayed_by_name,
    "SGD by projection": one_rate_for_each_projection,
    "AdamW fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_updates_are_the_originals(make: Callable[[nn.Module], Any]):
    both(lambda model: (train(model, make(model), steps=4), weights(model)))


@pytest.mark.parametrize(("saved", "loaded"), [("original", "converted"), ("converted", "original")])
def test_training_goes_on_from_an_optimizers_file(saved: str, loaded: str):
    first, second = MODELS[saved](), MODELS[loaded]()
    optimizer, other = decayed_by_name(first), decayed_by_name(second)
    train(first, optimizer, steps=2)
    state = copy.deepcopy(optimizer.state_dict())
    assert [g["param_names"] for g in state["param_groups"]] == [g["param_names"] for g in other.param_groups]
    other.load_state_dict(state)
    second.load_state_dict(first.state_dict())
    close(train(second, other), train(first, optimizer))
    close(weights(second), weights(first))


def test_an_optimizer_made_before_conversion_goes_on():
    def act(change: Callable[[nn.Module], nn.Module]) -> Any:
        model = original()
        optimizer = decayed_by_name(model)
        return train(model, optimizer, steps=2) + train(change(model), optimizer), weights(model)

    close(act(convert), act(lambda model: model))
    model = original()
    optimizer = decayed_by_name(model)
    held = [id(p) for p in model.parameters()]
    assert [id(p) for p in convert(model).parameters()] == held
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == set(held)


def test_an_average_of_weights():
    def act(model: nn.Module) -> Any:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            train(model, optimizer, steps=1)
            average.update_parameters(model)
        return average(IDS), weights(average), model(IDS), weights(model)

    both(act)


def test_clipped_gradients():
    def act(model: nn.Module) -> Any:
        optimizer, norms = torch.optim.SGD(model.parameters(), lr=0.1), []

        def clipped(loss: torch.Tensor) -> None:
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))

        train(model, optimizer, backward=clipped)
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        return norms, gradients(model), weights(model)

    both(act)


def test_accumulated_gradients():
    def act(model: nn.Module) -> Any:
        for batch in BATCHES:
            (model(*batch) / len(BATCHES)).backward()
        return gradients(model)

    both(act)


def test_scaled_gradients():
    def act(model: nn.Module) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in BATCHES:
            optimizer.zero_grad()
            scaler.scale(model(*batch)).backward()
            scaler.step(optimizer)
            scaler.update()
        overflow = next(model.parameters())
        overflow.grad.fill_(torch.inf)
        scaler.step(optimizer)  # skipped
        scaler.update()
        return scaler.get_scale(), weights(model)

    both(act)


def test_a_step_in_backward():
    """Optimizers that live in hooks of single parameters, so that no gradient stays."""

    def act(model: nn.Module) -> Any:
        for parameter in model.parameters():
            step = partial(_step, torch.optim.SGD([parameter], lr=0.1))
            parameter.register_post_accumulate_grad_hook(step)
        losses = train(model, [])
        assert all(parameter.grad is None for parameter in model.parameters())
        return losses, weights(model)

    both(act)


def _step(optimizer: torch.optim.Optimizer, _: nn.Parameter) -> None:
    optimizer.step()
    optimizer.zero_grad()
