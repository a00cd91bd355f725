"""Calls of few tokens run what was captured, larger ones fused products."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import te_transform
from te_transform.backends import limits, plain
from te_transform.execution.executors import captured as captured_executor
from te_transform.execution.runner import runner_of
from te_transform.execution.small_batch import SmallBatch
from te_transform.graph import ops
from tests import stand_in
from tests.models.tiny import MLP, WIDTH, Tiny
from tests.zoo import CASES, seeded

te = stand_in.te  # a fixture
ENOUGH = 12  # rows
SIZES = ((1, 3), (2, 5), (3, 4), (2, 9))


class GatedMLP(MLP):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.silu(self.gate(x)) * self.fc1(x))


class Gated(Tiny):
    """With what gains from fused products in the weights' own dtype."""

    def __init__(self):
        super().__init__()
        self.blocks[0].mlp = GatedMLP()


@pytest.fixture(autouse=True)
def _by_rows(by_size: None, te: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gated MLPs of `ENOUGH` rows run fused, in FP8 all products of as many again."""
    monkeypatch.setattr(limits, "MIN_GEMM_WORK", ENOUGH * WIDTH**2)
    monkeypatch.setattr(limits, "MIN_GEMM_WORK_IN_FP8", 2 * ENOUGH * WIDTH**2)


@pytest.fixture
def unfused(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call ran what was captured, in their order."""
    found: list[bool] = []
    gains_nothing = SmallBatch.gains_nothing

    def noted(*args: Any) -> str | None:
        why = gains_nothing(*args)
        found.append(why is not None)
        return why

    monkeypatch.setattr(SmallBatch, "gains_nothing", noted)
    return found


def rows(batch: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(length)).to(dtype)


def converted(model: nn.Module, sample: Tensor, **options: Any) -> nn.Module:
    return te_transform.convert(copy.deepcopy(model), sample, verify=False, **options)


@pytest.mark.parametrize("backend", [pytest.param("torch", marks=pytest.mark.integration), "te"])
def test_the_tokens_of_a_call_decide_also_at_sizes_that_vary(backend: str, unfused: list[bool]) -> None:
    dtype = torch.bfloat16 if backend == "te" else torch.float32
    original = seeded(Gated).to(dtype)
    model = converted(original, rows(1, 7, dtype), backend=backend)
    for size in SIZES:
        x = rows(*size, dtype)
        unfused.clear()
        out, wanted = model(x), original(x)
        assert unfused == [x.shape[:-1].numel() < ENOUGH]
        if unfused[0]:
            assert torch.equal(out, wanted)  # the same operations
        torch.testing.assert_close(out, wanted, atol=0.02 if backend == "te" else 1e-5, rtol=0.02)
    assert len(runner_of(model).graphs) <= 3


def test_calls_are_counted_with_the_reason() -> None:
    model = converted(seeded(Gated).bfloat16(), rows(1, 3, torch.bfloat16), backend="te")
    for _ in range(2):
        model(rows(1, 3, torch.bfloat16))
    products = len([site for site in runner_of(model).graphs[0].plan.sites if site.weights])
    why = "a call too small to be faster in fused products"
    assert te_transform.report(model).plain_calls[why] == 2 * products


def test_without_a_gate_what_was_captured_runs_at_any_size_but_for_a_recipe(unfused: list[bool]) -> None:
    x, way = rows(3, 9, torch.bfloat16), {"backend": "te", "recipe": "fp8-current"}
    original = seeded(Tiny).bfloat16()
    model, in_fp8 = converted(original, x, backend="te"), converted(original, x, **way)
    unfused.clear()
    assert torch.equal(model(x), original(x))
    assert unfused == [True]
    products = len([site for site in runner_of(model).graphs[0].plan.sites if site.weights])
    why = "a graph without gated MLPs, which is as fast as captured"
    assert te_transform.report(model).plain_calls[why] == products
    in_fp8(x)
    assert unfused == [True, False]


def test_parameters_stay_where_they_lie_unless_a_call_reads_them_joined() -> None:
    def moved(model: nn.Module, **options: Any) -> bool:
        before = [parameter.data_ptr() for parameter in model.parameters()]
        te_transform.convert(model, rows(1, 3, torch.bfloat16), backend="te", inplace=True, **options)
        return before != [parameter.data_ptr() for parameter in model.parameters()]

    assert not moved(seeded(Tiny).bfloat16())
    assert moved(seeded(Gated).bfloat16())
    assert moved(seeded(Tiny).bfloat16(), recipe="fp8-current")


@pytest.mark.parametrize(
    ("name", "layers", "op", "captured"),
    [
        ("llama", "num_hidden_layers", ops.rms_norm, torch.rsqrt),
        pytest.param("gpt2", "n_layer", ops.gelu_tanh, torch.tanh, marks=pytest.mark.integration),
    ],
)
def test_norms_and_activations_of_many_operations_are_one(
    name: str,
    layers: str,
    op: Callable,
    captured: Callable,
    unfused: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, inputs = CASES[name].build(**{layers: 1}), CASES[name].sample()
    monkeypatch.setattr(limits, "MIN_GEMM_WORK", 1e9)
    fused = te_transform.convert(copy.deepcopy(model), inputs, backend="torch", verify=False)
    unfused.clear()
    for each in (model, fused):
        each.train(False)
    with torch.no_grad():
        out, wanted = fused(**inputs).logits, model(**inputs).logits
    assert unfused == [True]
    torch.testing.assert_close(out, wanted, atol=1e-4, rtol=1e-4)
    graph = runner_of(fused).graphs[-1].as_captured
    called = [node.target for node in graph.graph.__self__.graph.nodes]
    ones = [node for node in graph.plan.before.nodes if node.target is op]
    assert called.count(op) == len(ones) > 0
    assert captured not in called


@pytest.mark.parametrize(
    ("name", "fused"), [("gpt_neox", 2), pytest.param("llama", 0, marks=pytest.mark.integration)]
)
def test_rotations_are_fused_where_calls_of_many_tokens_run_so_too(name: str, fused: int) -> None:
    case = CASES[name]
    model = te_transform.convert(
        case.build(num_hidden_layers=1).bfloat16(), case.sample(), backend="te", verify=False
    )
    graph = runner_of(model).graphs[-1].as_captured.graph.__self__
    assert sum(isinstance(module, plain.Rotary) for module in graph.modules()) == fused


class WithABackwardOfItsOwn(nn.Module):
    class Relu(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.relu()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * (ctx.saved_tensors[0] > 0)

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.Relu.apply(self.up(self.norm(x))))


def test_an_activation_with_a_backward_of_its_own_is_one_operation(unfused: list[bool]) -> None:
    """PyTorch interprets both of its graphs node by node at each call."""
    model, x = seeded(WithABackwardOfItsOwn), rows(1, 3)
    fused = converted(model, x)
    for each in (model, fused):
        each(x).square().sum().backward()
    assert unfused == [True]
    for own, found in zip(model.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(found.grad, own.grad)
    graph = runner_of(fused).graphs[-1].as_captured.graph.__self__.graph
    called = [node.target for node in graph.nodes]
    assert called.count(ops.relu) == 1
    assert torch.ops.higher_order.autograd_function_apply not in called


def test_a_graph_that_cannot_be_made_is_what_was_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    original, x = seeded(Gated), rows(1, 3)
    model = converted(original, x)

    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("no such graph")

    monkeypatch.setattr(captured_executor, "lower_unfused", fail)
    assert torch.equal(model(x), original(x))
    assert any("RuntimeError: no such graph" in note for note in te_transform.report(model).notes)


def gradients(model: nn.Module, x: Tensor, call: Callable[..., Tensor]) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    call(model, x).float().square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(
    "recipe",
    [*(pytest.param(each, marks=pytest.mark.integration) for each in (None, "fp8-current")), "fp8-delayed"],
)
def test_a_checkpoint_repeats_what_the_forward_did(recipe: str | None, unfused: list[bool]) -> None:
    model = converted(seeded(Gated).bfloat16(), rows(1, 7, torch.bfloat16), backend="te", recipe=recipe)
    for size in SIZES:
        x = rows(*size, torch.bfloat16).requires_grad_()
        unfused.clear()
        for _ in range(2):  # the second time with scales
            direct = gradients(model, x, lambda model, x: model(x))
        repeated = gradients(model, x, lambda model, x: checkpoint(model, x, use_reentrant=False))
        few = x.shape[:-1].numel() < (ENOUGH if recipe is None else 2 * ENOUGH)
        assert set(unfused) == {few}
        for one, other in zip(direct, repeated, strict=True):
            torch.testing.assert_close(one, other, atol=0.1, rtol=0.1)


@pytest.mark.integration
def test_checkpoints_of_two_lengths_before_a_backward() -> None:
    model = converted(seeded(Gated), rows(1, 7))
    few, many = rows(1, 3).requires_grad_(), rows(3, 9).requires_grad_()

    def both(call: Callable[..., Tensor]) -> list[Tensor]:
        return gradients(model, many, lambda model, x: call(model, few).sum() + call(model, x).sum())

    direct, repeated = both(lambda model, x: model(x)), both(partial(checkpoint, use_reentrant=False))
    for one, other in zip(direct, repeated, strict=True):
        torch.testing.assert_close(one, other)


def test_kernels_add_the_gradients_of_an_accumulation(unfused: list[bool]) -> None:
    original = seeded(Gated).bfloat16()
    model, x = converted(original, rows(1, 3, torch.bfloat16), backend="te"), rows(1, 3, torch.bfloat16)
    with te_transform.accumulate(model, steps=2) as running:
        for _ in range(2):
            model(x).float().square().sum().backward()
        assert "blocks.0.mlp.fc1.weight" in running.fused
    assert unfused == [False, False]
    model(x)
    assert unfused[-1]
    for _ in range(2):
        original(x).float().square().sum().backward()
    for one, other in zip(model.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=0.1, rtol=0.1)


def test_weights_that_are_held_in_fp8_alone_are_read_by_fused_products(unfused: list[bool]) -> None:
    original = seeded(Gated).bfloat16().eval().requires_grad_(False)
    model = converted(original, rows(2, 16, torch.bfloat16), backend="te", recipe="fp8-current")
    with torch.no_grad():
        model(rows(2, 16, torch.bfloat16))
        assert te_transform.quantize_weights(model).names
        unfused.clear()
        model(rows(1, 3, torch.bfloat16))
    assert unfused == [False]
