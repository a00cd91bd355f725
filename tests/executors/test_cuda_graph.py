"""The executor of CUDA graphs: calls are replayed from the third on, and compute what the function computes.

tests/recordings.py emulates the recordings. tests/gpu runs the same calls as CUDA graphs.
"""

import copy
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import te_transform
from te_transform.execution.executors.cuda_graph import MAX_SIGNATURES
from tests.attacks import OTHER, WIDTH, Block, Pair, X, observed
from tests.compilers import Compiler
from tests.conversions import ALL, EVERYWHERE, error, gradients, run
from tests.executors.helpers import Deep, loss, notes, replayed
from tests.recordings import Recorder
from tests.zoo import seeded, zero_dropout

pytestmark = pytest.mark.usefixtures("cuda_graphs")


@pytest.mark.parametrize("name", ["torch_encoder_pre", pytest.param("gpt2", marks=pytest.mark.integration)])
def test_models_compute_the_same_in_training_and_evaluation_by_turns(
    name: str, cuda_graphs: Recorder
) -> None:
    case = ALL[name]
    layers = {"n_layer": 1} if name == "gpt2" else {}
    model, inputs = zero_dropout(case.build(**layers)), case.sample()
    converted = te_transform.convert(model, inputs, verify=False, graphs=True)
    for _ in range(4):
        assert error(run(converted, inputs), run(model, inputs)) < EVERYWHERE
        expected, actual = (gradients(m, inputs) for m in (model, converted))
        assert expected.keys() == actual.keys()
        pairs = [(actual[key], grad) for key, grad in expected.items() if grad is not None]
        assert error(*zip(*pairs, strict=True)) < EVERYWHERE
    # in training once more: what was returned before is still there
    assert cuda_graphs == {"recorded": 3, "forward": 7, "backward": 4}
    assert notes(converted) == []


def test_calls_are_replayed_from_the_third_on(cuda_graphs: Recorder) -> None:
    pair = Pair.of(Deep, graphs=True)
    for call in range(1, 6):
        pair.agree()
        # one replay more is the check of what was recorded
        assert cuda_graphs["forward"] == cuda_graphs["backward"] == max(0, call - 1 if call > 2 else 0)
    assert any("CUDA graphs, from the third" in note for note in te_transform.report(pair.converted).notes)


@pytest.mark.parametrize("in_training", [True, False])
def test_a_replay_passes_few_files(in_training: bool, cuda_graphs: Recorder) -> None:
    """Between the model's forward and the replay."""
    converted = te_transform.convert(seeded(Block), X, graphs=True, verify=False)
    library, passed = Path(te_transform.__file__).parent, set()

    def note_files(_: Any) -> None:
        files = (Path(frame.filename) for frame in traceback.extract_stack())
        passed.update(file.name for file in files if file.is_relative_to(library))

    for call in range(5):
        cuda_graphs.after_forward = note_files if call == 4 else cuda_graphs.after_forward
        with torch.set_grad_enabled(in_training):
            out = converted(X)
        if in_training:
            out.sum().backward()
    assert passed == {"classes.py", "runner.py", "captured_graph.py", "cuda_graph.py"}


def test_each_size_is_recorded(cuda_graphs: Recorder) -> None:
    pair = replayed(Deep)
    for x in (X, X[:, :3], X[:1], X):
        pair.x, before = x, cuda_graphs["forward"]
        for _ in range(4):
            pair.agree()
        assert cuda_graphs["forward"] > before
    assert notes(pair.converted) == []


def test_gradients_of_replays_accumulate(cuda_graphs: Recorder) -> None:
    pair, batches = replayed(Deep), torch.randn(4, 2, 5, WIDTH)
    before = cuda_graphs["backward"]
    found = []
    for model in pair.models:
        model.zero_grad()
        kept = []
        for batch in batches:
            loss(model, batch).backward()
            kept.append(model.blocks[0].mlp.fc1.weight.grad.clone())
        found.append(kept)
    assert cuda_graphs["backward"] == before + 4
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_keep_their_memory_until_one_is_held(cuda_graphs: Recorder) -> None:
    pair, weight = replayed(Deep), "blocks.0.mlp.fc1.weight"
    parameter = pair.converted.get_parameter(weight)

    def places(steps: int) -> set[int]:
        found = set()
        for _ in range(steps):
            pair.agree()
            found.add(parameter.grad.data_ptr())
        return found

    assert len(places(3)) == 1
    before, kept = cuda_graphs["forward"], parameter.grad.detach()
    was = kept.clone()
    pair.x = OTHER
    assert kept.data_ptr() not in places(3)
    assert torch.equal(kept, was)
    assert cuda_graphs["recorded"] == 2
    assert cuda_graphs["forward"] == before + 4  # with the check of what was recorded


class SharesAGradient(nn.Module):
    """Two parameters whose gradients autograd computes as one tensor."""

    def __init__(self):
        super().__init__()
        self.block, self.one, self.two = Block(), nn.Parameter(torch.ones(WIDTH)), nn.Parameter(X[0, 0])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.block(x).sum(), self.one + self.two


def test_two_gradients_may_be_one_tensor(cuda_graphs: Recorder) -> None:
    def act(model: nn.Module, x: Tensor) -> None:
        total, out = model(x)
        (total + out.square().sum()).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.grad *= 2  # a clip

    pair = Pair.of(SharesAGradient, graphs=True)
    for _ in range(5):
        pair.agree(act)
    assert cuda_graphs["backward"] == 4


def test_outputs_and_gradients_are_not_overwritten_by_the_next_call(cuda_graphs: Recorder) -> None:
    pair = replayed(Deep)
    parameters = [*pair.converted.parameters()]
    before = cuda_graphs["forward"]
    out, _ = (model(X) for model in (pair.converted, pair.original))
    assert cuda_graphs["forward"] == before + 1
    grads = torch.autograd.grad(out[0].sum() + out[1].sum(), parameters)
    values = [tensor.clone() for tensor in (*out, *grads)]
    pair.x = OTHER
    pair.agree()
    assert cuda_graphs["forward"] > before + 1
    for now, then in zip((*out, *grads), values, strict=True):
        assert torch.equal(now, then)


def test_several_forwards_before_a_backward(cuda_graphs: Recorder) -> None:
    def act(model: nn.Module, x: Tensor) -> Tensor:
        return loss(model, x) + 2 * loss(model, x + 1) - loss(model, x * 2)

    pair = replayed(Deep)
    for _ in range(3):
        pair.agree(act, atol=1e-4)


def test_a_forward_without_a_backward_does_not_stop_replays(cuda_graphs: Recorder) -> None:
    pair = replayed(Deep)
    before = cuda_graphs["forward"]
    for model in pair.models:
        for _ in range(3):
            model(X)
    assert cuda_graphs["forward"] == before + 3  # none waits for a backward that cannot come
    pair.agree()


def again(model: nn.Module, x: Tensor) -> Tensor:
    out = loss(model, x.requires_grad_())
    out.backward(retain_graph=True)
    out.backward()
    return out.detach()


def second_derivative(model: nn.Module, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss(model, x.requires_grad_()), x, create_graph=True)
    return gradient.square().sum()


def of_one_output(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)[1]


def of_neither(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)[1].detach()


def freed(model: nn.Module, x: Tensor) -> None:
    out = loss(model, x)
    out.backward()
    out.backward()


def several_at_once(model: nn.Module, x: Tensor) -> Tensor:
    out = loss(model, x.requires_grad_())
    return torch.autograd.grad(out, x, torch.arange(3.0), is_grads_batched=True)[0]


@pytest.mark.parametrize("act", [again, second_derivative, several_at_once, of_one_output, of_neither, freed])
def test_backwards_that_were_not_recorded_are_right(act: Callable[[nn.Module, Tensor], Any]) -> None:
    pair = replayed(Deep)
    for _ in range(3):
        pair.agree(act, atol=1e-4)
    pair.agree()


def test_a_second_backward_uses_the_autocast_of_the_forward() -> None:
    converted = te_transform.convert(seeded(Deep), X, graphs=True, verify=False)
    weight = converted.blocks[0].mlp.fc1.weight
    for _ in range(4):
        converted.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = loss(converted, X)
        out.backward(retain_graph=True)
        once = weight.grad.clone()
        out.backward()
        torch.testing.assert_close(weight.grad, 2 * once, rtol=1e-6, atol=0.0)


def test_the_oldest_recordings_are_freed(cuda_graphs: Recorder) -> None:
    pair = replayed(Deep)
    weight = pair.converted.blocks[0].mlp.fc1.weight
    own, others = weight.data, [weight.data.clone() for _ in range(MAX_SIGNATURES)]
    for other in others:
        weight.data = other
        pair.agree()
        weight.data = own
        pair.agree()
    assert cuda_graphs["recorded"] == 1


def test_outputs_whose_gradients_keep_changing_run_without_cuda_graphs(cuda_graphs: Recorder) -> None:
    pair = replayed(Deep)
    for _ in range(3):
        pair.agree(of_one_output)
        pair.agree()
    assert notes(pair.converted) == [
        "a graph runs without CUDA graphs: the set of its outputs with gradients keeps changing"
    ]
    before = cuda_graphs["forward"]
    pair.agree()
    assert cuda_graphs["forward"] == before


def test_weights_are_cast_by_autocast_in_each_replay() -> None:
    """Copies that autocast keeps over a context would be those of weights before a step."""

    def act(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            first = model(x)[0].square().sum()
            with torch.no_grad():
                model.blocks[0].mlp.fc1.weight.mul_(1.01)
            torch.clear_autocast_cache()
        return first.float()

    pair = replayed(Deep)
    for _ in range(4):
        for model in pair.models:
            observed(model, act, X)
        found = [loss(model, X).item() for model in pair.models]
        assert found[1] == pytest.approx(found[0], rel=1e-5)


GRADIENTS = ("output 0", "mlp.fc1.weight", "mlp.fc2.weight", "norm.weight")


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current"])
def test_replays_in_fp8_are_as_exact_as_eager_calls(
    te: ModuleType, recipe: str, cuda_graphs: Recorder
) -> None:
    model, batches = seeded(Block), torch.randn(7, 2, 16, WIDTH, generator=torch.Generator().manual_seed(0))
    exact = copy.deepcopy(model).double()
    options = {"backend": "te", "recipe": te_transform.PrecisionPlan(recipe, small_calls=True)}
    model = model.bfloat16()
    eager = te_transform.convert(model, batches[0].bfloat16(), verify=False, **options)
    graphed = te_transform.convert(model, batches[0].bfloat16(), verify=False, graphs=True, **options)
    off = {eager: 0.0, graphed: 0.0}
    for batch in batches:
        right = observed(exact, lambda model, x: model(x), batch.double())
        for each in off:
            found = observed(each, lambda model, x: model(x), batch.bfloat16())
            off[each] += error([found[name] for name in GRADIENTS], [right[name] for name in GRADIENTS])
    assert off[graphed] <= 1.2 * off[eager]
    assert cuda_graphs["forward"] >= 3
    assert notes(graphed) == []


def test_compiled_graphs_are_replayed(cuda_graphs: Recorder, compilations: Compiler) -> None:
    pair = replayed(Deep, compile=True)
    pair.agree()
    assert len(compilations) == 1
    assert cuda_graphs["forward"] > 1
    assert notes(pair.converted) == []


def test_accumulate_runs_without_cuda_graphs(te: ModuleType, cuda_graphs: Recorder) -> None:
    model = seeded(Block).bfloat16()
    x = torch.randn(2, 16, WIDTH).bfloat16()
    converted = te_transform.convert(model, x, backend="te", graphs=True)
    for _ in range(4):
        loss(converted, x).backward()
    before = cuda_graphs["forward"]
    with te_transform.accumulate(converted, steps=2):
        for _ in range(2):
            loss(converted, x).backward()
    assert cuda_graphs["forward"] == before > 0


def test_each_choice_of_attention_kernels_is_recorded(cuda_graphs: Recorder) -> None:
    pair = replayed(Deep)
    for choice in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel([choice, SDPBackend.MATH]):
            for _ in range(4):
                pair.agree()
    assert cuda_graphs["recorded"] == 3
