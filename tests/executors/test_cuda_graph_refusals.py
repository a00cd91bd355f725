"""The executor of CUDA graphs refuses what a replay would compute wrongly, and the report says why."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_transform
from te_transform import OptionError
from te_transform.execution.call_signature import Function
from te_transform.execution.executors.cuda_graph import Replayed
from tests import recordings
from tests.attacks import WIDTH, Block, X
from tests.executors.helpers import Deep, notes, replayed
from tests.recordings import Recorder
from tests.zoo import seeded


class Odd(nn.Module):
    """A block, and what its subclasses do."""

    def __init__(self):
        super().__init__()
        self.block = Block()
        self.register_buffer("seen", torch.zeros(WIDTH))


class ReturnsAPart(Odd):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.block(x), self.seen[1:]


class ReturnsAView(Odd):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.block(x)
        return out, out[0]


class ReturnsAnInput(Odd):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.block(x), x.view(-1)


REFUSED = {
    ReturnsAPart: "it returns memory of an argument",
    ReturnsAView: "it returns two tensors that share memory",
    ReturnsAnInput: "it returns memory of an argument",
}


@pytest.mark.parametrize("build", REFUSED)
def test_outputs_that_cannot_be_copied_run_without_cuda_graphs(
    build: type[nn.Module], cuda_graphs: Recorder
) -> None:
    pair = replayed(build)
    for _ in range(3):
        pair.agree()
    assert cuda_graphs["forward"] == 0
    assert notes(pair.converted) == [f"a graph runs without CUDA graphs: {REFUSED[build]}"]


def test_a_recording_with_wrong_numbers_is_not_replayed(cuda_graphs: Recorder) -> None:
    """This finds kernels that read memory of their own plan, as cuDNN's attention did."""
    cuda_graphs.after_forward = lambda recording: recording.outputs[0][0, 0, 0].fill_(torch.nan)
    pair = replayed(Deep)
    pair.agree()
    (note,) = notes(pair.converted)
    assert "computes other numbers" in note


CALLS = (
    5  # of the function until reruns measure its rounding: two warm-ups, the third call, and the recording
)


@pytest.mark.parametrize(("reruns", "accepted"), [((0.01,) * 16, False), ((0.01,) * 9 + (0.04,), True)])
def test_a_replay_may_differ_as_much_as_reruns_of_the_function(
    reruns: tuple[float, ...], accepted: bool, cuda_graphs: Recorder
) -> None:
    """The distance between two calls of kernels that add in any order varies."""
    off = iter((0.0,) * CALLS + reruns)
    cuda_graphs.after_forward = lambda recording: recording.outputs[0].mul_(1.06)
    said: list[str] = []
    call = Replayed(Function(lambda x: [x * (1 + next(off, 0.0))], [False], [], [], said.append))
    with torch.no_grad():
        for _ in range(3):
            call(X)
    assert next(off, None) is None
    why = "a graph runs without CUDA graphs: the recording computes other numbers, off by 0.06 where "
    assert said == ([] if accepted else [why + "rounding is 0.02"])


OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2 GiB"


def out_of_memory(*_: Any) -> Any:
    raise torch.OutOfMemoryError(f"{OUT_OF_MEMORY}\nmore")


def test_a_failed_recording_is_reported(cuda_graphs: Recorder) -> None:
    cuda_graphs.record = out_of_memory
    pair = replayed(Deep)
    pair.agree()
    assert notes(pair.converted) == [f"a graph runs without CUDA graphs: OutOfMemoryError: {OUT_OF_MEMORY}"]


def test_a_function_that_fails_before_its_recording_is_reported(cuda_graphs: Recorder) -> None:
    """The third call runs the function once more than a user does, which needs memory."""
    said: list[str] = []
    runs = iter([doubled, doubled, out_of_memory])
    call = Replayed(Function(lambda x: next(runs, doubled)(x), [False], [], [], said.append))
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(call(X)[0], X * 2)
    assert said == [f"a graph runs without CUDA graphs: OutOfMemoryError: {OUT_OF_MEMORY}"]


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_graphs_and_a_mode_with_cuda_graphs_are_an_error(mode: str) -> None:
    with pytest.raises(OptionError, match="makes CUDA graphs by itself, got graphs=True; pass compile=True"):
        te_transform.convert(seeded(Block), X, graphs=True, compile=mode)


def test_graphs_without_a_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OptionError, match="got a machine without one; leave graphs=False"):
        te_transform.convert(seeded(Block), X, graphs=True)
    assert te_transform.inspect(seeded(Block), X, graphs=True).fused


class Marked(Tensor):
    """A subclass of tensors."""


def doubled(x: Tensor, other: Any = None) -> list[Any]:
    return [x * 2]


def writing(x: Tensor, other: Tensor) -> list[Any]:
    other.mul_(2)
    return [x * other]


UNFIT: dict[str, tuple[Callable[..., list[Any]], Any]] = {
    "it has a random generator as an argument": (doubled, torch.Generator()),
    "it reads a Marked": (doubled, X.as_subclass(Marked)),
    "it reads a tensor on meta": (doubled, X.to("meta")),
    "it writes to tensors that its operations do not name": (writing, X.clone()),
    "it returns no tensor on the GPU, or also tensors on another device": (
        lambda x, other: [x.sum().item()],
        X,
    ),
}


@pytest.mark.parametrize("why", UNFIT)
def test_the_reason_not_to_record_is_told_once(why: str, cuda_graphs: Recorder) -> None:
    run, other = UNFIT[why]
    said: list[str] = []
    call = Replayed(Function(run, [False, True], [], [], said.append))
    with torch.no_grad():
        for _ in range(5):
            call(X, other)
    assert said == [f"a graph runs without CUDA graphs: {why}"]
    assert cuda_graphs["forward"] == 0


def test_expanded_arguments_are_recorded(cuda_graphs: Recorder) -> None:
    said: list[str] = []
    call = Replayed(Function(doubled, [False], [], [], said.append))
    with torch.no_grad():
        for number in range(5):
            x = (X[:, :1] + number).expand_as(X)
            assert torch.equal(call(x)[0], x * 2)
    assert cuda_graphs["forward"]
    assert not said


def test_a_model_on_another_device_runs_without_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    recordings.install(monkeypatch, device="cuda")
    pair = replayed(Deep)
    pair.agree()
    assert notes(pair.converted) == ["a graph runs without CUDA graphs: it reads a tensor on cpu"]
