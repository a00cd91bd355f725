"""Progressive layer dropping with CUDA graphs by layer, on a GPU."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import te_transform
from te_transform.execution.attach import runner_of
from te_transform.training import LayerDropping, drop_layers
from te_transform.training.layer_calls import decide_on_layers
from tests.dropped import Fixed
from tests.gpu.llama import batch, distance, llama, step
from tests.zoo import seeded

LAYERS, STEPS = 4, 20
Steps = list[tuple[Tensor, dict[str, Tensor]]]
PATHS = [f"model.layers.{number}" for number in range(LAYERS)]


def inputs(seed: int = 0) -> dict[str, Any]:
    return {**batch(seed), "use_cache": False}


def converted(model: nn.Module | None = None, **options: Any) -> nn.Module:
    model = seeded(llama) if model is None else model
    return te_transform.convert(copy.deepcopy(model), inputs(), verify=False, **options).train()


def dropping(model: nn.Module, theta: float = 0.5) -> LayerDropping:
    """A schedule whose theta(t) has come to its limit."""
    schedule = drop_layers(model, 100, theta)
    schedule.load_state_dict({**schedule.state_dict(), "steps": 1000})
    return schedule


def recorded(factors: dict[str, float | None], **options: Any) -> nn.Module:
    """A model each of whose layers was recorded, and that now runs with these factors."""
    model = converted(graphs=True, **options)
    policy = Fixed(dict.fromkeys(PATHS, 1.0))
    decide_on_layers(model, runner_of(model), policy)
    for _ in range(4):
        step(model, inputs())
    policy.factors = policy.factors | factors
    return model


def equal(one: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]]) -> bool:
    (loss, grads), (other_loss, other_grads) = one, other
    same = torch.equal(loss, other_loss) and grads.keys() == other_grads.keys()
    return same and all(torch.equal(grads[name], other_grads[name]) for name in grads)


def steps(model: nn.Module) -> Steps:
    """Losses and gradients of steps that drop layers, each of other inputs."""
    schedule, found = dropping(model), []
    for number in range(STEPS):
        found.append(step(model, inputs(number)))
        schedule.step()
    return found


def apart(found: Steps, exact: Steps) -> float:
    """Return the mean distance of gradients over the steps."""
    return sum(distance(one[1], other[1]) for one, other in zip(found, exact, strict=True)) / len(exact)


def off(found: Steps, exact: Steps) -> float:
    """The root mean square of the errors of the losses."""
    errors = [(one[0] - other[0]).double() for one, other in zip(found, exact, strict=True)]
    return torch.stack(errors).square().mean().sqrt().item()


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("recipe", [None, "fp8-delayed", "fp8-current"])
def test_steps_are_as_exact_as_uncompiled_ones(recipe: str | None, compile: bool) -> None:
    exact = steps(converted(seeded(llama).float(), backend="torch"))
    # one after the other: TE's steps are of all models
    own = steps(converted(backend="te", recipe=recipe))
    model = converted(backend="te", recipe=recipe, compile=compile, graphs=True)
    found = steps(model)
    assert apart(found, exact) <= 1.1 * apart(own, exact)
    assert off(found, exact) <= 1.5 * off(own, exact)
    assert not [note for note in te_transform.report(model).notes if "a graph runs" in note]


def test_the_model_is_bitwise_the_recorded_model_while_theta_is_1() -> None:
    whole, model = converted(graphs=True), converted(graphs=True)
    schedule = dropping(model, theta=1)
    for number in range(6):
        assert equal(step(model, inputs(number)), step(whole, inputs(number)))
        schedule.step()


def test_factors_of_1_are_as_the_recorded_model() -> None:
    whole, model = converted(graphs=True), recorded({})
    exact = step(seeded(llama).double(), inputs())
    for _ in range(4):
        plain = step(whole, inputs())
    found = step(model, inputs())
    assert distance(found[1], exact[1]) <= 1.1 * distance(plain[1], exact[1])
    assert abs(found[0] - plain[0]) <= 2**-8 * plain[0]


def kernels(model: nn.Module) -> int:
    """Return the number of kernels of a step, including those of replays."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        model(**inputs()).loss.backward()
        torch.cuda.synchronize()
    model.zero_grad()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiled.events())


@pytest.mark.parametrize("compile", [False, True])
def test_a_dropped_layer_runs_no_kernel(compile: bool) -> None:
    model = recorded({}, compile=compile)
    policy = runner_of(model).extension.policy
    kernels(model)
    counts = []
    for dropped in range(LAYERS + 1):
        policy.factors = {path: None if number < dropped else 1.0 for number, path in enumerate(PATHS)}
        counts.append(kernels(model))
    of_layers = {before - after for before, after in pairwise(counts)}
    assert len(of_layers) == 1, counts  # all layers are alike: what is left is not theirs
    assert of_layers.pop() > 10


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found = model.eval()(**inputs()).logits
    model.train()
    return found


def test_evaluation_stays() -> None:
    model = converted(graphs=True)
    wanted = [logits(model) for _ in range(4)]
    schedule = dropping(model)
    for _ in range(6):
        step(model, inputs())
        schedule.step()
    assert torch.equal(logits(model), wanted[-1])


def test_training_with_dropping_learns() -> None:
    losses = []
    for options in ({}, {"graphs": True}, {"graphs": True, "compile": True}):
        model = converted(**options)
        schedule = dropping(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for number in range(60):
            loss = model(**inputs(number % 4)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        schedule.remove()
        losses.append(step(model, inputs())[0].item())
    start = step(converted(), inputs())[0].item()
    assert all(start - loss > 0.97 * (start - losses[0]) for loss in losses), losses
