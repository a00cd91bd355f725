"""The executor of fused graphs: it refuses calls with too few tokens to gain, and runs all others."""

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
from te_transform.backends import limits
from te_transform.execution.attach import runner_of
from te_transform.execution.executors.captured import Captured
from te_transform.execution.executors.fused import Fused
from tests.models.tiny import MLP, WIDTH, Tiny
from tests.zoo import seeded

ENOUGH = 12  # rows
CAPTURED, FUSED = Captured.name, Fused.name
SIZES = ((1, 3), (2, 5), (3, 4), (2, 9))


class GatedMLP(MLP):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.silu(self.gate(x)) * self.fc1(x))


class Gated(Tiny):
    """A model with a gated MLP, which fused products speed up without FP8."""

    def __init__(self):
        super().__init__()
        self.blocks[0].mlp = GatedMLP()


@pytest.fixture(autouse=True)
def _by_rows(te: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run gated MLPs fused from `ENOUGH` rows on, in FP8 all products from twice as many rows on."""
    monkeypatch.setattr(limits, "MIN_GEMM_WORK", ENOUGH * WIDTH**2)
    monkeypatch.setattr(limits, "MIN_GEMM_WORK_IN_FP8", 2 * ENOUGH * WIDTH**2)


def rows(batch: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(length)).to(dtype)


def converted(model: nn.Module, sample: Tensor, **options: Any) -> nn.Module:
    return te_transform.convert(copy.deepcopy(model), sample, verify=False, **options)


@pytest.mark.parametrize("backend", [pytest.param("torch", marks=pytest.mark.integration), "te"])
def test_the_number_of_tokens_decides_at_any_sizes(backend: str, ran: list[str]) -> None:
    dtype = torch.bfloat16 if backend == "te" else torch.float32
    original = seeded(Gated).to(dtype)
    model = converted(original, rows(1, 7, dtype), backend=backend)
    for size in SIZES:
        x = rows(*size, dtype)
        ran.clear()
        out, wanted = model(x), original(x)
        is_small = x.shape[:-1].numel() < ENOUGH
        assert ran == [CAPTURED if is_small else FUSED]
        if is_small:
            assert torch.equal(out, wanted)  # the same operations
        torch.testing.assert_close(out, wanted, atol=0.02 if backend == "te" else 1e-5, rtol=0.02)
    assert len(runner_of(model).graphs) <= 3


def test_small_calls_are_reported_with_a_reason() -> None:
    model = converted(seeded(Gated).bfloat16(), rows(1, 3, torch.bfloat16), backend="te")
    for _ in range(2):
        model(rows(1, 3, torch.bfloat16))
    products = len([site for site in runner_of(model).graphs[0].plan.sites if site.weights])
    why = "a call too small to be faster in fused products"
    assert te_transform.report(model).plain_calls[why] == 2 * products


def test_graphs_without_gated_mlps_run_fused_in_a_recipe_only(ran: list[str]) -> None:
    x, way = rows(3, 9, torch.bfloat16), {"backend": "te", "recipe": "fp8-current"}
    original = seeded(Tiny).bfloat16()
    model, in_fp8 = converted(original, x, backend="te"), converted(original, x, **way)
    ran.clear()
    assert torch.equal(model(x), original(x))
    assert ran == [CAPTURED]
    products = len([site for site in runner_of(model).graphs[0].plan.sites if site.weights])
    why = "a graph without gated MLPs, which is as fast as captured"
    assert te_transform.report(model).plain_calls[why] == products
    in_fp8(x)
    assert ran == [CAPTURED, FUSED]


def test_parameters_move_only_if_a_call_reads_them_joined() -> None:
    def moved(model: nn.Module, **options: Any) -> bool:
        before = [parameter.data_ptr() for parameter in model.parameters()]
        te_transform.convert(model, rows(1, 3, torch.bfloat16), backend="te", inplace=True, **options)
        return before != [parameter.data_ptr() for parameter in model.parameters()]

    assert not moved(seeded(Tiny).bfloat16())
    assert moved(seeded(Gated).bfloat16())
    assert moved(seeded(Tiny).bfloat16(), recipe="fp8-current")


def gradients(model: nn.Module, x: Tensor, call: Callable[..., Tensor]) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    call(model, x).float().square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(
    "recipe",
    [*(pytest.param(each, marks=pytest.mark.integration) for each in (None, "fp8-current")), "fp8-delayed"],
)
def test_a_checkpoint_repeats_with_the_executor_of_the_forward(recipe: str | None, ran: list[str]) -> None:
    model = converted(seeded(Gated).bfloat16(), rows(1, 7, torch.bfloat16), backend="te", recipe=recipe)
    for size in SIZES:
        x = rows(*size, torch.bfloat16).requires_grad_()
        ran.clear()
        for _ in range(2):  # the second time with scales
            direct = gradients(model, x, lambda model, x: model(x))
        repeated = gradients(model, x, lambda model, x: checkpoint(model, x, use_reentrant=False))
        few = x.shape[:-1].numel() < (ENOUGH if recipe is None else 2 * ENOUGH)
        assert {*ran} == {CAPTURED if few else FUSED}
        for one, other in zip(direct, repeated, strict=True):
            torch.testing.assert_close(one, other, atol=0.1, rtol=0.1)


@pytest.mark.integration
def test_checkpoints_of_two_lengths_may_precede_a_backward() -> None:
    model = converted(seeded(Gated), rows(1, 7))
    few, many = rows(1, 3).requires_grad_(), rows(3, 9).requires_grad_()

    def both(call: Callable[..., Tensor]) -> list[Tensor]:
        return gradients(model, many, lambda model, x: call(model, few).sum() + call(model, x).sum())

    direct, repeated = both(lambda model, x: model(x)), both(partial(checkpoint, use_reentrant=False))
    for one, other in zip(direct, repeated, strict=True):
        torch.testing.assert_close(one, other)


def test_accumulate_runs_small_calls_fused(ran: list[str]) -> None:
    original = seeded(Gated).bfloat16()
    model, x = converted(original, rows(1, 3, torch.bfloat16), backend="te"), rows(1, 3, torch.bfloat16)
    ran.clear()
    with te_transform.accumulate(model, steps=2) as running:
        for _ in range(2):
            model(x).float().square().sum().backward()
        assert "blocks.0.mlp.fc1.weight" in running.fused
    assert ran == [FUSED, FUSED]
    model(x)
    assert ran[-1] == CAPTURED
    for _ in range(2):
        original(x).float().square().sum().backward()
    for one, other in zip(model.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=0.1, rtol=0.1)


def test_fp8_only_weights_run_small_calls_fused(ran: list[str]) -> None:
    original = seeded(Gated).bfloat16().eval().requires_grad_(False)
    model = converted(original, rows(2, 16, torch.bfloat16), backend="te", recipe="fp8-current")
    with torch.no_grad():
        model(rows(2, 16, torch.bfloat16))
        assert te_transform.quantize_weights(model).names
        ran.clear()
        model(rows(1, 3, torch.bfloat16))
    assert ran == [FUSED]
