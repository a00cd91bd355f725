"""Progressive layer dropping with CUDA graphs: each layer is a recording of its own, see recordings.py."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import te_transform
from te_transform.execution.attach import runner_of
from te_transform.training.layer_calls import decide_on_layers
from tests import ranks
from tests.conversions import ALL
from tests.dropped import LAYERS, Fixed, Net, X, are_equal, by_hand, dropping, gradients, net
from tests.recordings import Recorder
from tests.zoo import seeded, zero_dropout

pytestmark = pytest.mark.usefixtures("at_any_size")

KEPT = {f"blocks.{number}": 1.0 for number in range(LAYERS)}
PIECES = LAYERS + 1  # and the head


class Counts(Net):
    """A model that cuda_graphs its calls between its layers and its head."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def recorded(factors: dict[str, float | None], **options: bool) -> nn.Module:
    """Return a model whose layers were recorded one by one, and that now runs with these factors."""
    model = net(graphs=True, **options)
    policy = Fixed(KEPT)
    decide_on_layers(model, runner_of(model), policy)
    for _ in range(3):
        gradients(model)
    policy.factors = factors
    return model


@pytest.mark.usefixtures("compilations")
@pytest.mark.parametrize("compile", [False, True])
def test_every_step_is_that_of_the_uncompiled_model(compile: bool, cuda_graphs: Recorder) -> None:
    plain, model = net(), net(graphs=True, compile=compile)
    schedules = dropping(plain), dropping(model)
    ran: Counter = Counter()
    for _ in range(20):
        wanted, left_out = gradients(plain), schedules[1].dropped()
        ran.update(set(schedules[1].layers) - {*left_out})
        for name, grad in gradients(model).items():
            torch.testing.assert_close(grad, wanted[name])
        for name, parameter in model.named_parameters():
            assert (parameter.grad is None) == name.startswith(tuple(f"{path}." for path in left_out))
        for schedule in schedules:
            schedule.step()
    # two warm-ups of each piece; a check of each recording is one replay more
    assert cuda_graphs["recorded"] == PIECES
    assert cuda_graphs["forward"] == cuda_graphs["backward"] == ran.total() + 20 - PIECES
    assert not runner_of(model).material.notes


def test_a_factor_is_an_argument_of_a_replay(cuda_graphs: Recorder) -> None:
    model = recorded(KEPT)
    policy = runner_of(model).extension.policy
    before = Counter(cuda_graphs)
    for factor in (None, 2.0, 1.25, None, 1.0):
        policy.factors = KEPT | {"blocks.1": factor}
        torch.testing.assert_close(model(X), by_hand(model, policy.factors))
    assert cuda_graphs - before == {"forward": 5 * PIECES - 2}


def test_a_factor_of_1_is_bitwise_the_recorded_model(cuda_graphs: Recorder) -> None:
    whole, model = net(graphs=True), recorded(KEPT)
    for _ in range(3):
        wanted = gradients(whole)
    assert cuda_graphs["recorded"] == 1 + PIECES
    assert are_equal(gradients(model), wanted)
    assert torch.equal(model(X), whole(X))


def test_the_whole_model_is_replayed_while_theta_is_1(cuda_graphs: Recorder) -> None:
    whole, model = net(graphs=True), net(graphs=True)
    dropping(model, theta=1)
    for _ in range(4):
        assert are_equal(gradients(model), gradients(whole))
    assert cuda_graphs["recorded"] == 2


def test_a_dropped_layer_replays_nothing(cuda_graphs: Recorder) -> None:
    model = recorded(dict.fromkeys(KEPT))
    before = Counter(cuda_graphs)
    gradients(model)
    assert cuda_graphs - before == {"forward": 1, "backward": 1}  # of the head
    assert [name for name, p in model.named_parameters() if p.grad is not None] == [
        "head.weight",
        "head.bias",
    ]


def test_gradients_of_a_dropped_layer_are_those_that_were_accumulated(cuda_graphs: Recorder) -> None:
    model = recorded(KEPT)
    alone = gradients(model)
    before = cuda_graphs["recorded"]
    runner_of(model).extension.policy.factors = KEPT | {"blocks.2": None}
    model(X).square().mean().backward()
    weight = model.blocks[2].q.weight
    assert torch.equal(weight.grad, alone["blocks.2.q.weight"])
    model.zero_grad(set_to_none=False)
    model(X).square().mean().backward()
    assert not weight.grad.any()
    assert (
        cuda_graphs["recorded"] == before
    )  # what `.grad` still holds is copied, also that of joined weights


def test_evaluation_replays_the_whole(cuda_graphs: Recorder) -> None:
    whole, model = net(graphs=True), recorded(dict.fromkeys(KEPT))
    whole.eval(), model.eval()
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(model(X), whole(X))
    assert cuda_graphs["recorded"] == PIECES + 2


def test_recordings_of_the_whole_are_let_go_of(cuda_graphs: Recorder) -> None:
    model = net(graphs=True)
    for _ in range(3):
        gradients(model)
    assert len(cuda_graphs.alive) == 1
    dropping(model)
    gradients(model)
    gc.collect()
    assert cuda_graphs["recorded"] == 1
    assert not cuda_graphs.alive


def test_two_forwards_before_a_backward(cuda_graphs: Recorder) -> None:
    plain, model = net(), recorded(KEPT)
    factors = KEPT | {"blocks.0": None, "blocks.3": 2.0}
    runner_of(model).extension.policy.factors = factors

    def loss(one: Tensor, other: Tensor) -> Tensor:
        return (one * other).mean()

    model.zero_grad()
    loss(model(X), model(-X)).backward()
    loss(by_hand(plain, factors), by_hand(plain, factors, -X)).backward()
    for name, parameter in model.named_parameters():
        wanted = plain.get_parameter(name).grad
        assert (parameter.grad is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(parameter.grad, wanted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_repeat_the_draw(reentrant: bool, cuda_graphs: Recorder) -> None:
    plain, model = net(), net(graphs=True, reentrant=reentrant)
    schedules, x = (dropping(plain), dropping(model)), X.clone().requires_grad_()
    for _ in range(5):
        wanted = gradients(plain, x)
        for name, grad in gradients(model, x).items():
            torch.testing.assert_close(grad, wanted[name])
        for schedule in schedules:
            schedule.step()


def test_parameters_of_dropped_layers_get_zeros_under_ddp(cuda_graphs: Recorder, process_group: None) -> None:
    """DDP waits for all gradients.

    Outputs without a gradient, such as logits beside a loss, stay without. Otherwise steps that drop layers
    and steps that drop none would be recorded in turns.
    """
    case = ALL["nanogpt_flash"]
    inputs = case.sample() | {"targets": case.sample()["idx"]}
    model = te_transform.convert(zero_dropout(case.build()).train(), inputs, verify=False, graphs=True)
    schedule, ddp = dropping(model), DistributedDataParallel(model)
    for _ in range(10):
        model.zero_grad()
        ddp(**inputs)[1].backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        schedule.step()
    # the logits' own gradient, which the loss has, shows only in the first replay
    assert cuda_graphs["recorded"] == len(schedule.layers) + 3
    assert not runner_of(model).material.notes


def test_a_piece_that_cannot_be_recorded_runs_without_cuda_graphs(cuda_graphs: Recorder) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    cuda_graphs.record = fail
    model = net(graphs=True)
    schedule = dropping(model)
    runner_of(model).extension.policy = Fixed(KEPT)
    wanted = gradients(net())
    for _ in range(4):
        for name, grad in gradients(model).items():
            torch.testing.assert_close(grad, wanted[name])
    assert cuda_graphs["recorded"] == 0
    assert runner_of(model).material.notes == ["a graph runs without CUDA graphs: RuntimeError: no memory"]
    schedule.remove()


def test_layers_that_write_run_without_cuda_graphs(cuda_graphs: Recorder) -> None:
    model = te_transform.convert(seeded(Counts), X, verify=False, graphs=True, inplace=True).train()
    decide_on_layers(model, runner_of(model), Fixed(KEPT))
    for call in range(1, 5):
        gradients(model)
        assert model.calls == call
    assert cuda_graphs["recorded"] == 0
    assert runner_of(model).material.notes == [
        "a graph whose layers are dropped runs without CUDA graphs, because it cannot be cut into layers"
    ]


@pytest.mark.usefixtures("te")
def test_scales_of_a_dropped_layer_stay(cuda_graphs: Recorder) -> None:
    """With factors of 1, all else is as if the whole graph was recorded."""
    kept, found = {"blocks.0": 1.0, "blocks.1": 1.0}, []
    for policy in (None, Fixed(kept)):  # one by one: TE's steps are of all models
        model = ranks.in_fp8(graphs=True).train()
        decide_on_layers(model, runner_of(model), policy)
        for step in range(6):
            model(ranks.inputs(step)).sum().backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        found.append((te_transform.scaling_state(model), grads))
    assert cuda_graphs["recorded"] == 1 + 3  # two layers and the head
    policy.factors, replays = kept | {"blocks.0": None}, cuda_graphs["forward"]
    states = []
    for step in range(6, 12):
        model(ranks.inputs(step) * step).sum().backward()
        states.append(te_transform.scaling_state(model))
    assert cuda_graphs["forward"] == replays + 6 * 2
    assert are_equal(found[0][1], found[1][1])
    assert all(torch.equal(found[1][0][name]["scale"], state["scale"]) for name, state in found[0][0].items())
    # the first step that drops a layer still takes in the step before
    stayed = {name: torch.equal(states[0][name]["scale"], states[-1][name]["scale"]) for name in states[0]}
    assert all(same for name, same in stayed.items() if name.startswith("blocks.0."))
    assert not stayed["blocks.1.q.weight"]


@pytest.mark.usefixtures("compilations", "cuda_graphs", "te")
@pytest.mark.parametrize("options", [{"compile": True}, {"graphs": True}], ids=str)
def test_layers_that_the_first_steps_drop_run_in_fp8_later(
    options: dict[str, bool],
) -> None:
    """A resumed run begins in the middle of its schedule."""
    model = ranks.in_fp8(**options).train()
    policy = Fixed({"blocks.0": None, "blocks.1": 1.0})
    decide_on_layers(model, runner_of(model), policy)
    for step in range(8):
        model(ranks.inputs(step)).sum().backward()
        policy.factors = {"blocks.0": 1.0, "blocks.1": 1.0 if step % 2 else None}
    (graph,) = runner_of(model).graphs
    layered = runner_of(model).extension.executor(graph).layered[0]
    compiled = layered.run.executors[0].specializations
    # all but the head, whose sizes FP8 does not take
    assert [len(sites) for sites in compiled.in_recipe.values()] == [len(compiled.products) - 1]
    assert not runner_of(model).material.notes
