"""Progressive layer dropping: what is drawn, what a call computes then, and what stays as it is."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import te_transform
from te_transform import ModelError, OptionError
from te_transform.execution.attach import runner_of
from te_transform.training import drop_layers, residual
from te_transform.training.layer_calls import decide_on_layers
from tests import ranks
from tests.compilers import Compiler
from tests.conversions import DISTINCT, PLANNED_LATER, as_built, each, run
from tests.dropped import LAYERS, WIDTH, Fixed, Net, X, are_equal, by_hand, dropping, gradients, net

pytestmark = pytest.mark.usefixtures("at_any_size")

# what is drawn


def test_theta_falls_as_in_the_paper() -> None:
    schedule = drop_layers(net(), 200, theta=0.6)
    for step in range(5):
        assert schedule.theta == pytest.approx(0.4 * math.exp(-step * 100 / 200) + 0.6)
        rates = [1 - number / LAYERS * (1 - schedule.theta) for number in range(1, LAYERS + 1)]
        assert [*schedule.keep_rates().values()] == pytest.approx(rates)
        schedule.step()


def test_gamma_is_how_fast() -> None:
    schedule = drop_layers(net(), 200, gamma=0.01)
    schedule.step()
    assert schedule.theta == pytest.approx(0.5 * math.exp(-0.01) + 0.5)


def test_the_mean_share_of_layers() -> None:
    schedule, kept, steps = dropping(net()), 0, 4000
    for _ in range(steps):
        kept += LAYERS - len(schedule.dropped())
        schedule.step()
    expected = 1 - 0.5 * (LAYERS + 1) / (2 * LAYERS)
    deviation = math.sqrt(sum(p * (1 - p) for p in schedule.keep_rates().values()) / steps) / LAYERS
    assert abs(kept / steps / LAYERS - expected) < 4 * deviation


def test_seeds_draw_otherwise() -> None:
    draws = []
    for seed in (0, 0, 1):
        model = net()
        schedule = dropping(model, seed=seed)
        draws.append([(schedule.dropped(), schedule.step()) for _ in range(20)])
    assert draws[0] == draws[1] != draws[2]


def test_no_global_random_state_is_read_or_changed() -> None:
    model = net()
    schedule, before = dropping(model), (torch.get_rng_state(), random.getstate())
    for _ in range(3):
        gradients(model)
        schedule.step()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


# what a call computes


def test_every_draw_is_what_a_loop_over_the_layers_computes() -> None:
    model = net(layers=2)
    decide_on_layers(model, runner_of(model), policy := Fixed({}))
    for factors in itertools.product((None, 1.25), repeat=2):
        policy.factors = {f"blocks.{number}": factor for number, factor in enumerate(factors)}
        torch.testing.assert_close(model(X), by_hand(model, policy.factors))
        named = dict(model.named_parameters())
        loss = by_hand(model, policy.factors).square().mean()
        wanted = torch.autograd.grad(loss, [*named.values()], allow_unused=True)
        gradients(model)
        assert [p.grad is None for p in named.values()] == [grad is None for grad in wanted]
        for parameter, grad in zip(named.values(), wanted, strict=True):
            assert grad is None or torch.allclose(parameter.grad, grad, atol=1e-6)


class Linear(nn.Module):
    """Layers of a linear branch that adds one number to all of a token: the norms see nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Branch() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(F.layer_norm(x, (WIDTH,)), self.weight.expand(WIDTH, WIDTH))


def test_the_mean_over_all_draws_is_the_model_without_dropping() -> None:
    x = X.double()
    model = te_transform.convert(Linear().double(), x, verify=False, inplace=True).train()
    expected = model(x)
    rates = dropping(model).keep_rates()
    mean = torch.zeros_like(expected)
    for draws in itertools.product((True, False), repeat=2):
        pairs = [*zip(rates.items(), draws, strict=True)]
        factors = {path: 1 / rate if is_kept else None for (path, rate), is_kept in pairs}
        decide_on_layers(model, runner_of(model), Fixed(factors))
        mean += math.prod(rate if is_kept else 1 - rate for (_, rate), is_kept in pairs) * model(x)
    torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("theta", [1, 0.5])
def test_the_model_is_bitwise_the_plain_model_while_theta_is_1(theta: float) -> None:
    plain, model = net(), net()
    drop_layers(model, 100, theta=theta)  # whose first step has 1 anyway
    assert torch.equal(model(X), plain(X))
    assert are_equal(gradients(model), gradients(plain))


def test_a_factor_of_1_is_bitwise_the_plain_model() -> None:
    plain, model = net(), net()
    decide_on_layers(model, runner_of(model), Fixed({f"blocks.{n}": 1.0 for n in range(LAYERS)}))
    assert torch.equal(model(X), plain(X))
    assert are_equal(gradients(model), gradients(plain))


def test_dropping_all_layers_leaves_a_backward() -> None:
    model = net()
    model.blocks.requires_grad_(True)
    model.head.requires_grad_(False)
    decide_on_layers(model, runner_of(model), Fixed({f"blocks.{n}": None for n in range(LAYERS)}))
    assert not any(grad.any() for grad in gradients(model).values())


class Broken(Net):
    """Each layer is a graph of its own, in a forward that is not captured."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            torch._dynamo.graph_break()
            x = block(x)
        return self.head(x)


def test_layers_behind_graph_breaks_have_draws_of_their_own() -> None:
    model = te_transform.convert(Broken(), X, verify=False, inplace=True).train()
    drop_layers(model, 100)
    for number in range(LAYERS):
        factors = {f"blocks.{n}": None if n == number else 2.0 for n in range(LAYERS)}
        decide_on_layers(model, runner_of(model), Fixed(factors))
        torch.testing.assert_close(model(X), by_hand(model, factors))


class Flat(ranks.Block):
    """Flattens [batch, length] behind the norm, as mixtures of experts."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.o(self.q(y) * torch.tanh(self.k(y)))
        return x + self.mlp(self.norm2(x).flatten(0, 1)).view_as(x)


def test_a_branch_that_flattens_the_stream_is_dropped_with_its_layer() -> None:
    original = Net()
    original.blocks = nn.ModuleList(Flat() for _ in range(LAYERS))
    model = te_transform.convert(original, X, verify=False, inplace=True).train()
    factors = {f"blocks.{number}": factor for number, factor in enumerate((1.5, None, 2.0, None))}
    drop_layers(model, 100)
    decide_on_layers(model, runner_of(model), Fixed(factors))
    torch.testing.assert_close(model(X), by_hand(model, factors))


class Reading(nn.Module):
    """Layers that project the normalized output of an encoder before they read their stream."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.begin = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.layers = nn.LayerNorm(WIDTH), nn.ModuleList(Reader() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        memory, x = self.norm(self.encoder(x)), self.begin(x)
        for layer in self.layers:
            x = layer(x, memory)
        return x


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        k, v = self.k(memory), self.v(memory)
        return x + self.q(self.norm(x)) * k.tanh() * v


def test_a_dropped_layer_projects_no_output_of_an_encoder() -> None:
    model = te_transform.convert(Reading(), X, verify=False, inplace=True).train()
    drop_layers(model, 100)
    products = []
    for factors in itertools.product((1.0, None), repeat=2):
        policy = Fixed({f"layers.{number}": factor for number, factor in enumerate(factors)})
        decide_on_layers(model, runner_of(model), policy)
        model(X)  # the first call checks the fused operations
        with torch.profiler.profile() as profile:
            model(X)
        products.append(sum(event.name == "aten::addmm" for event in profile.events()))
    of_layer = 2  # of q, and of k and v together
    assert products == [1 + of_layer * kept for kept in (2, 1, 1, 0)]


class Crossed(nn.Module):
    """Decoder layers that read an encoder, and one table that all of them read."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.begin = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(WIDTH))
        self.layers = nn.ModuleList(Crossing() for _ in range(2))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        memory, stream, table = self.encoder(x), self.begin(x), self.table.sin()
        for layer in self.layers:
            stream = layer(stream, memory, table)
        return self.head(stream)


class Crossing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.key = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor, table: Tensor) -> Tensor:
        return x + self.norm(x) * self.key(memory) * table


def test_weights_that_only_dropped_layers_need_get_zeros_under_ddp(process_group: None) -> None:
    model = te_transform.convert(Crossed(), X, verify=False, inplace=True).train()
    drop_layers(model, 100)
    ddp = DistributedDataParallel(model)
    for factors in itertools.product((1.0, None), repeat=2):
        policy = Fixed({f"layers.{number}": factor for number, factor in enumerate(factors)})
        decide_on_layers(model, runner_of(model), policy)
        model.zero_grad()
        ddp(X).sum().backward()
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        unread = {"table", "encoder.weight"} if factors == (None, None) else set()
        unread |= {f"layers.{n}.key.weight" for n, factor in enumerate(factors) if factor is None}
        named = ("table", "encoder.weight", "head.weight", "layers.0.key.weight", "layers.1.key.weight")
        zeros = {name for name in named if not grads[name].any()}
        assert zeros == unread


def test_layers_that_a_reentrant_checkpoint_repeats_get_zeros_under_ddp(process_group: None) -> None:
    model, x = net(reentrant=True), X.clone().requires_grad_()
    dropping(model, seed=1)
    ddp = DistributedDataParallel(model)
    for _ in range(2):
        ddp(x).sum().backward()
    assert not model.blocks[3].q.weight.grad.any()


def test_threads_share_the_first_call() -> None:
    model = net()
    dropping(model)
    with ThreadPoolExecutor() as threads:
        assert all(out.isfinite().all() for out in threads.map(model, [X] * 4))


# what stays as it is


def test_evaluation_verification_and_checkpoints_stay() -> None:
    plain, model = net(), net()
    state = copy.deepcopy(model.state_dict())
    dropping(model)
    with torch.no_grad():
        assert torch.equal(model(X), plain(X))
    assert torch.equal(model.eval()(X), plain.eval()(X))
    assert are_equal(gradients(model), gradients(plain))
    model.train()
    assert list(model.state_dict()) == list(state)
    assert are_equal(model.state_dict(), state)


def test_verification_runs_all_layers() -> None:
    original = Net()
    model = te_transform.convert(original, X)
    dropping(model)
    assert te_transform.verify(original, model, X)


def test_generation_stays() -> None:
    pair = as_built("gpt2")
    ids = pair.case.sample()["input_ids"][:, :4]
    before = pair.converted.eval().generate(ids, max_new_tokens=3, do_sample=False)
    schedule = dropping(pair.converted)
    after = pair.converted.generate(ids, max_new_tokens=3, do_sample=False)
    schedule.remove()
    assert torch.equal(after, before)


def test_a_copy_drops_nothing() -> None:
    model = net()
    dropping(model)
    assert runner_of(copy.deepcopy(model)).extension is None


def test_removing_lets_all_layers_run_again() -> None:
    plain, model = net(), net()
    dropping(model).remove()
    assert are_equal(gradients(model), gradients(plain))
    drop_layers(model, 100)


# in FP8, on the stand-in for Transformer Engine


def trained_in_fp8() -> nn.Module:
    model = ranks.in_fp8().train()
    for step in range(3):
        model(ranks.inputs(step)).sum().backward()
    return model


def test_scales_of_a_dropped_layer_stay(te: ModuleType) -> None:
    model = trained_in_fp8()
    decide_on_layers(model, runner_of(model), Fixed({"blocks.0": None, "blocks.1": 1.0}))
    before = te_transform.scaling_state(model)
    for step in range(3, 9):  # the history has 4
        model(ranks.inputs(step) * step).sum().backward()
    after = te_transform.scaling_state(model)
    stayed = {name: torch.equal(before[name]["scale"], after[name]["scale"]) for name in before}
    assert all(same for name, same in stayed.items() if name.startswith("blocks.0."))
    assert not stayed["blocks.1.q.weight"]


def test_a_factor_of_1_is_bitwise_the_plain_model_in_fp8(te: ModuleType) -> None:
    grads = []
    for policy in (
        None,
        Fixed({"blocks.0": 1.0, "blocks.1": 1.0}),
    ):  # one by one: TE's steps are of all models
        model = trained_in_fp8()
        decide_on_layers(model, runner_of(model), policy)
        for step in range(3, 6):
            model(ranks.inputs(step)).sum().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *grads))


# steps


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_repeat_the_draw(reentrant: bool) -> None:
    model, plain = net(reentrant=reentrant), net()
    schedules, x = [dropping(model), dropping(plain)], X.clone().requires_grad_()
    for _ in range(4):
        for trained in (model, plain):  # both forwards come before a backward, as in a pipeline
            trained.zero_grad()
            losses = [trained(factor * x).square().mean() for factor in (1, 2)]
            sum(losses).backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            torch.testing.assert_close(one.grad, other.grad)
        for schedule in schedules:
            schedule.step()


@pytest.mark.parametrize("reentrant", [False, True])
def test_one_backward_repeats_the_draws_of_two_steps(reentrant: bool) -> None:
    found, x = [], X.clone().requires_grad_()
    for model in (net(reentrant=reentrant), net()):
        schedule = dropping(model)
        loss = model(x).square().mean()
        schedule.step()
        (loss + model(2 * x).square().mean()).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("reentrant", [pytest.param(False, marks=pytest.mark.integration), True])
def test_checkpoints_repeat_the_draw_for_a_loss_of_values_that_the_model_does_not_return(
    reentrant: bool,
) -> None:
    found, x = [], X.clone().requires_grad_()
    for model in (net(reentrant=reentrant), net()):
        inputs: list[Tensor] = []
        model.head.register_forward_pre_hook(lambda module, args, inputs=inputs: inputs.append(args[0]))
        schedule = dropping(model)
        for _ in range(4):  # new hooks are captured from the third call on
            model(x)
            schedule.step()
        inputs[-1].square().mean().backward()
        found.append([parameter.grad for parameter in model.blocks.parameters()])
    torch.testing.assert_close(*found)


class Nested(Net):
    """Pairs of layers in a checkpoint, and each layer in a checkpoint of its own."""

    def __init__(self, outer: bool, **settings: Any):
        super().__init__(**settings)
        self.outer = outer

    def forward(self, x: Tensor) -> Tensor:
        for pair in (self.blocks[:2], self.blocks[2:]):
            x = checkpoint(self._run, pair, x, use_reentrant=self.outer)
        return self.head(x)

    def _run(self, pair: nn.ModuleList, x: Tensor) -> Tensor:
        for block in pair:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize(
    ("outer", "inner"),
    [(False, True), pytest.param(True, False, marks=pytest.mark.integration), (True, True)],
)
def test_checkpoints_within_checkpoints_repeat_the_draw(outer: bool, inner: bool) -> None:
    found, x = [], X.clone().requires_grad_()
    for model in (net(partial(Nested, outer), reentrant=inner), net()):
        schedule = dropping(model)
        loss = model(x).square().mean()
        schedule.step()
        (loss + model(2 * x).square().mean()).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*found)


def test_forwards_of_two_steps_in_two_threads_are_not_repeated() -> None:
    model, x = net(reentrant=False), X.clone().requires_grad_()
    schedule = dropping(model)
    first = model(x).square().mean()
    schedule.step()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(model, x).result()
    with pytest.raises(RuntimeError, match=r"in 2 threads; call step\(\) after all backwards"):
        first.backward()


def test_a_reentrant_checkpoint_around_the_model_drops_nothing() -> None:
    model, x = net(), X.clone().requires_grad_()
    dropping(model)
    checkpoint(model, x, use_reentrant=True).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_run_goes_on_from_its_state() -> None:
    schedule = dropping(net(), seed=3)
    for _ in range(7):
        schedule.step()
    other = drop_layers(net(), 50, theta=0.9)
    other.load_state_dict(schedule.state_dict())
    for _ in range(10):
        assert schedule.dropped() == other.dropped()
        assert schedule.keep_rates() == other.keep_rates()
        schedule.step()
        other.step()


# compiled, and on several ranks


@pytest.mark.parametrize("reentrant", [None, False])
def test_compiled_layers_are_left_out(reentrant: bool | None, compilations: Compiler) -> None:
    plain, model = net(), net(compile=True, reentrant=reentrant)
    schedules = dropping(plain), dropping(model)
    for _ in range(6):
        wanted = gradients(plain)
        for name, grad in gradients(model).items():
            torch.testing.assert_close(grad, wanted[name])
        for schedule in schedules:
            schedule.step()
    # equal layers once, but for the first, whose stream is not trained; and the head, but behind checkpoints
    assert len(compilations) == (3 if reentrant is None else 2)
    assert not runner_of(model).material.notes


def on_ranks(wrap: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    """Return losses, dropped layers, all-gathers and gradients of a rank in some steps of a wrapped model."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    gathers, gather = [], _fsdp_param_group.foreach_all_gather
    _fsdp_param_group.foreach_all_gather = lambda *given, **named: (
        gathers.append(1) or gather(*given, **named)
    )
    model = wrap(net())
    schedule = dropping(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = {"losses": [], "dropped": [], "gathers": [], "none": []}
    for _ in range(8):
        gathers.clear()
        loss = model(X).square().mean()
        loss.backward()
        seen["losses"].append(loss.item())
        seen["dropped"].append(schedule.dropped())
        seen["gathers"].append(len(gathers))
        seen["none"].append(sum(parameter.grad is None for parameter in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    _fsdp_param_group.foreach_all_gather = gather
    return seen


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "alone": ranks.alone,
    "DDP": ranks.ddp,
    "DDP that looks for unused": partial(DistributedDataParallel, find_unused_parameters=True),
    "FSDP2": ranks.sharded,
}


def is_plain_at_theta_one() -> bool:
    """Return True if four steps with theta = 1 are bitwise those without a schedule, under DDP."""
    weights = []
    for theta in (None, 1.0):
        model = ranks.ddp(net())
        schedule = dropping(model, theta=theta) if theta else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            model(X + step + dist.get_rank()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if schedule:
                schedule.step()
        weights.append([parameter.detach() for parameter in model.parameters()])
    return all(map(torch.equal, *weights))


def on_all_ranks() -> tuple[dict[str, dict[str, Any]], bool]:
    return {name: on_ranks(wrap) for name, wrap in WRAPS.items()}, is_plain_at_theta_one()


@pytest.mark.xdist_group("distributed")
def test_ranks_drop_alike(tmp_path: Path) -> None:
    results = ranks.spawn(on_all_ranks, 2, tmp_path)
    assert all(is_plain for _, is_plain in results)
    found = [by_wrap for by_wrap, _ in results]
    assert all(found[0] == other for other in found)
    alone, *others = found[0].values()
    assert all(other["losses"] == alone["losses"] for other in others)
    assert all(other["dropped"] == alone["dropped"] for other in others)
    weights = len([*ranks.Block().parameters()])
    assert alone["none"] == [weights * len(dropped) for dropped in alone["dropped"]]
    assert not any(found[0]["DDP"]["none"])  # it waits for zeros
    assert found[0]["FSDP2"]["none"] == alone["none"]
    # once for what is around the layers, twice for each layer that is called: a layer that runs, is dropped
    # for the first time, or has an input without gradients
    known, called = set(), []
    for dropped in alone["dropped"]:
        called.append(LAYERS - len(known & {*dropped}))
        known |= {*dropped} - {"layers.0"}
    assert found[0]["FSDP2"]["gathers"] == [1 + 2 * number for number in called]
    assert min(called) < LAYERS


# models


POST_NORM = ("bert", "distilbert", "roberta", "bart", "torch_encoder_post")
WITHOUT_LAYERS = ("torch_mha_bare",)  # and torch_mha is a single branch


@each(DISTINCT, later=(*PLANNED_LATER, "mixtral", "quickstart"))
def test_the_layers_of_each_model(name: str) -> None:
    model = as_built(name).converted
    if name in (*POST_NORM, *WITHOUT_LAYERS):
        with pytest.raises(ModelError, match="expected layers x \\+ f\\(norm\\(x\\)\\), got none"):
            drop_layers(model, 100)
        return
    schedule = drop_layers(model, 100)
    schedule.remove()
    assert schedule.layers
    assert not schedule.refused


# what is refused


def unconverted() -> nn.Module:
    return Net()


def with_options(**changed: bool) -> nn.Module:
    """Return a model with changed options: in CUDA graphs, or with a wrong capture."""
    model = net()
    owner = runner_of(model)
    owner.options = replace(owner.options, **changed)
    return model


def divided() -> nn.Module:
    """Return a model that looks divided by parallelize()."""
    model = net()
    runner_of(model).division = object()
    return model


def uncalled_copy() -> nn.Module:
    return copy.deepcopy(net())


def already() -> nn.Module:
    model = net()
    drop_layers(model, 100)
    return model


BAD_NUMBERS = {
    "expected total_steps of 1 or more, got 0": {"total_steps": 0},
    "expected total_steps of 1 or more, got 1.5": {"total_steps": 1.5},
    "expected theta in \\(0, 1\\], got 0;": {"theta": 0},
    "expected theta in \\(0, 1\\], got 1.5": {"theta": 1.5},
    "expected theta in \\(0, 1\\], got nan": {"theta": math.nan},
    "expected gamma above 0, got -1": {"gamma": -1},
    "expected gamma above 0, got 0": {"gamma": 0},
    "expected an integer seed, got 'a'": {"seed": "a"},
}


@pytest.mark.parametrize("message", BAD_NUMBERS)
def test_bad_numbers(message: str) -> None:
    with pytest.raises(OptionError, match=message):
        drop_layers(Net(), **{"total_steps": 100, **BAD_NUMBERS[message]})


BAD_MODELS: dict[str, Callable[[], nn.Module]] = {
    "expected a converted model, got an unconverted Net; pass what": unconverted,
    "expected a model that drops no layers, got one that does; call remove\\(\\)": already,
    "expected a model on one rank, under DDP or FSDP, got one divided by parallelize": divided,
    "expected captured graphs, got a model that runs its own code": partial(with_options, run_original=True),
    "expected captured graphs, got a model without any, as a copy is": uncalled_copy,
    "got compile='reduce-overhead', whose CUDA graphs": partial(net, compile="reduce-overhead"),
}


@pytest.mark.parametrize("message", BAD_MODELS)
def test_bad_models(message: str) -> None:
    model = BAD_MODELS[message]()
    before = runner_of(model) and runner_of(model).extension
    with pytest.raises((ModelError, OptionError), match=message):
        drop_layers(model, 100)
    assert before is (runner_of(model) and runner_of(model).extension)


def test_a_state_of_something_else() -> None:
    schedule = drop_layers(net(), 100)
    state = schedule.state_dict()
    wrong = {
        "expected the keys steps, total_steps, theta, gamma, seed, got a;": {"a": 1},
        "expected the keys steps, total_steps, theta, gamma, seed, got none;": None,
        "expected steps of 0 or more, got -1; pass the number of past steps": state | {"steps": -1},
        "expected theta in \\(0, 1\\], got 7": state | {"theta": 7},
    }
    for message, given in wrong.items():
        with pytest.raises(OptionError, match=message):
            schedule.load_state_dict(given)
        assert schedule.state_dict() == state


def test_caches_of_keys_and_values_keep_layers_from_being_dropped() -> None:
    pair = as_built("gpt2")
    inputs = pair.case.sample() | {"use_cache": True}
    wanted = run(pair.converted, inputs, training=True)
    schedule = dropping(pair.converted)
    found = run(pair.converted, inputs, training=True)
    schedule.remove()
    assert all(map(torch.equal, found, wanted))
    assert any("pass use_cache=False" in sentence for sentence in runner_of(pair.converted).material.notes)


class Odd(nn.Module):
    """Two layers, each with a norm, a linear branch and a buffer."""

    def __init__(self, layer: Callable[[nn.Module, Tensor], Tensor]):
        super().__init__()
        self.layers, self.layer = nn.ModuleList(OddLayer() for _ in range(2)), layer

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.layer)
        return x


class OddLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.ones(()))

    def branch(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))

    def forward(self, x: Tensor, layer: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        return layer(self, x)


def in_autocast(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        branch = layer.branch(x)
    return x + branch


def counted(layer: nn.Module, x: Tensor) -> Tensor:
    branch = layer.branch(x)
    layer.count.add_(1)
    return x + branch * layer.count


REFUSED: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    residual.CHANGES_MODE: in_autocast,
    residual.WRITES: counted,
    residual.OTHER_FORM: lambda layer, x: x + layer.branch(x.float()).double(),
    residual.NO_SUM.format("whose parts were written otherwise"): lambda layer, x: torch.addcmul(
        x, layer.branch(x), layer.linear.bias
    ),
    residual.NOT_NORMALIZED.format("layers.0"): lambda layer, x: layer.norm(x + layer.linear(x)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_layer_that_cannot_be_left_out(reason: str) -> None:
    model = te_transform.convert(Odd(REFUSED[reason]), X, verify=False, inplace=True).train()
    graph, *_ = runner_of(model).graphs
    assert residual.residual(graph.plan).refused["layers.0"] == reason
