"""Calls as CUDA graphs, on a GPU: what tests/executors/test_cuda_graph.py says of an emulation."""

import copy
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_transform
from te_transform.execution import recording_check
from te_transform.execution.executors import cuda_graph
from tests.conversions import run
from tests.executors.helpers import Deep
from tests.gpu.zoo import error, gradients, hold_in_fp8, model_of, overwrite_free_memory, sample
from tests.models.tiny import WIDTH
from tests.zoo import seeded


@pytest.fixture(autouse=True)
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return the numbers of recordings and replays."""
    found: Counter[str] = Counter()

    def counted(name: str, graph: torch.cuda.CUDAGraph) -> SimpleNamespace:
        def replay() -> None:
            found[name] += 1
            graph.replay()

        return SimpleNamespace(replay=replay, reset=graph.reset)

    class Counted(cuda_graph.CudaGraphPair):
        def __init__(self, *arguments: Any):
            super().__init__(*arguments)
            found["recorded"] += 1
            self.first, self.second = counted("forward", self.first), counted("backward", self.second)

    monkeypatch.setattr(cuda_graph, "CudaGraphPair", Counted)
    return found


def notes(model: nn.Module) -> list[str]:
    return [note for note in te_transform.report(model).notes if "a graph runs" in note]


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", ["llama", "bert", "nanogpt_manual", "t5"])
def test_is_as_exact_as_the_original(name: str, compile: bool, counts: Counter) -> None:
    model, inputs = model_of(name), sample(name)
    converted = te_transform.convert(model, inputs, backend="te", verify=False, compile=compile, graphs=True)
    wide, wide_inputs = (
        copy.deepcopy(model).double(),
        {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()},
    )
    for each in range(5):
        found = [*run(converted, inputs), *gradients(converted, inputs)]
        overwrite_free_memory()
        own = [*run(model, inputs), *gradients(model, inputs)]
        exact = [*run(wide, wide_inputs), *gradients(wide, wide_inputs)]
        assert error(found, exact) <= 1.1 * error(own, exact), each
    assert notes(converted) == []
    assert counts["recorded"] >= 2
    assert counts["backward"] >= 4


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current"])
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_is_as_exact_as_without_in_fp8(name: str, compile: bool, recipe: str, counts: Counter) -> None:
    hold_in_fp8(name, recipe, compile=compile, graphs=True)
    assert counts["recorded"] >= 2
    assert counts["backward"] >= 4


@pytest.mark.parametrize("compile", [False, True])
def test_training_with_accumulation_and_dropout_off(compile: bool, counts: Counter) -> None:
    model = seeded(Deep).to("cuda")
    converted = te_transform.convert(model, inputs(0), graphs=True, compile=compile)
    losses = []
    for each in (model, converted):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        losses.append([])
        for step in range(5):
            optimizer.zero_grad()
            for batch in range(4):
                out, means = each(inputs(4 * step + batch))
                loss = out.square().mean() + means.square().mean()
                loss.backward()
                losses[-1].append(loss.item())
            optimizer.step()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    assert notes(converted) == []
    assert counts["backward"] == 19


def inputs(seed: int) -> Tensor:
    return torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(seed)).cuda()


@pytest.mark.parametrize("compile", [False, True])
def test_dropout_draws_other_numbers_in_each_replay(compile: bool, counts: Counter) -> None:
    model = seeded(Deep).to("cuda")
    model.p = 0.5
    converted = te_transform.convert(model, inputs(0), graphs=True, compile=compile, verify=False)
    for _ in range(3):
        converted(inputs(0))[0].sum().backward()
    one, other = (converted(inputs(0))[0].detach() for _ in range(2))
    assert not torch.equal(one, other)
    assert counts["forward"] == 4
    torch.manual_seed(1)
    again = converted(inputs(0))[0]
    torch.manual_seed(1)
    assert torch.equal(again, converted(inputs(0))[0])
    assert notes(converted) == []


def test_a_second_backward_repeats_the_call_with_its_random_numbers(counts: Counter) -> None:
    model = seeded(Deep).to("cuda")
    model.p = 0.5
    converted = te_transform.convert(model, inputs(0), graphs=True, verify=False)
    for _ in range(5):
        converted.zero_grad()
        out = converted(inputs(0))[0].square().sum()
        out.backward(retain_graph=True)
        once = converted.blocks[0].mlp.fc1.weight.grad.clone()
        torch.rand(3, device="cuda")  # it does not begin where the call began
        out.backward()
        torch.testing.assert_close(converted.blocks[0].mlp.fc1.weight.grad, 2 * once)
    assert counts["backward"] == 4


class Copies(nn.Module):
    """A block that brings numbers from the CPU in each call."""

    def __init__(self):
        super().__init__()
        self.inner = Deep()

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.inner(x)[0] * torch.tensor([2.0] * WIDTH).to(x.device), 0.5)


def test_a_call_that_waits_for_the_gpu_runs_without(counts: Counter) -> None:
    model = seeded(Copies).to("cuda")
    converted = te_transform.convert(model, inputs(0), graphs=True, verify=False)
    for _ in range(4):
        found = []
        for each in (model, converted):
            torch.manual_seed(0)
            found.append(each(inputs(0)))
            found[-1].sum().backward()
        torch.testing.assert_close(*found)
    (note,) = notes(converted)
    assert "without CUDA graphs" in note
    assert counts["forward"] == 0


def test_a_recording_that_fails_leaves_random_numbers_and_memory_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA itself notices, where nothing was noticed before."""
    monkeypatch.setattr(recording_check, "noting_waits", lambda: NOTHING)
    test_a_call_that_waits_for_the_gpu_runs_without(Counter())
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    torch.empty(2**28, device="cuda")
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before
    torch.manual_seed(2)
    one = torch.rand(4, device="cuda")
    torch.manual_seed(2)
    assert torch.equal(one, torch.rand(4, device="cuda"))


class _Nothing:
    def __enter__(self) -> list[str]:
        return []

    def __exit__(self, *_: object) -> None:
        pass


NOTHING = _Nothing()


def test_autocast_casts_weights_in_the_recording(counts: Counter) -> None:
    model = seeded(Deep).to("cuda")
    converted = te_transform.convert(model, inputs(0), graphs=True, verify=False)
    losses = []
    for each in (model, converted):
        optimizer = torch.optim.SGD(each.parameters(), lr=1e-2)
        losses.append([])
        with torch.autocast("cuda", torch.bfloat16):
            for step in range(6):
                torch.clear_autocast_cache()
                loss = each(inputs(step))[0].square().mean()
                loss.backward()
                losses[-1].append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-2, atol=1e-3)
    assert counts["backward"] == 5
