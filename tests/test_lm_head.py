"""The LM head, and a loss that reads it, run beside a recording or a piece, with the same numbers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_transform
from te_transform.execution import lm_head
from tests.attacks import WIDTH, Block, Pair, X
from tests.compilers import Compiler
from tests.recordings import Recorder
from tests.zoo import seeded

pytestmark = pytest.mark.usefixtures("at_any_size", "compilations", "cuda_graphs", "te")

COLUMNS = 4100
LABELS = torch.randint(COLUMNS, X.shape[:2], generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def set_limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Run the head beside at any number of logits. Return a function that sets a limit of lm_head.py."""
    set_limit = partial(monkeypatch.setattr, lm_head)
    set_limit("COPIED", 0)
    return set_limit


class Words(nn.Module):
    """A head that has more columns than all that is before it, tied to an embedding, and a loss of it."""

    def __init__(self, loss: bool):
        super().__init__()
        self.loss, self.embedding, self.block = loss, nn.Embedding(COLUMNS, WIDTH), Block()
        self.head = nn.Linear(WIDTH, COLUMNS)
        self.head.weight = self.embedding.weight
        self.bonus = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Any:
        hidden = self.block(x + self.embedding(LABELS[: len(x)]))
        logits = self.logits(hidden)
        if not self.loss:
            return hidden.mean(-1), logits
        labels = F.pad(LABELS[: len(x)], (0, 1), value=-100)[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()), logits, hidden

    def logits(self, hidden: Tensor) -> Tensor:
        output = self.head(hidden)  # a name that the graph has for what it returns
        return output


def words(kind: type[Words] = Words, loss: bool = True) -> nn.Module:
    return seeded(kind, loss)


def are_recorded(recorder: Recorder) -> bool:
    """Return True if a recording returns the logits."""
    outputs = (output for recording in recorder.alive for output in recording.outputs)
    return any(output.shape[-1:] == (COLUMNS,) for output in outputs)


def agree_in_evaluation(pair: Pair) -> None:
    with torch.no_grad():
        for scale in range(1, 6):
            found, expected = (model(X * scale) for model in (pair.converted, pair.original))
            torch.testing.assert_close(found, expected)
        kept = [tensor.clone() for tensor in found]
        pair.converted(X * 100)
        assert all(map(torch.equal, found, kept))


def loss_of(model: nn.Module, x: Tensor) -> Any:
    """Return the outputs; beside a loss, the others have no gradient."""
    first, *others = model(x)
    return [1e3 * first, *(other.detach() for other in others)] if model.loss else [first, *others]


def agree_in_training(pair: Pair) -> None:
    for scale in range(1, 6):
        pair.x = X * scale
        pair.agree(loss_of)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("loss", [False, True])
def test_the_head_runs_beside_the_recording(compile: bool, loss: bool, cuda_graphs: Recorder) -> None:
    pair = Pair.of(words(loss=loss), graphs=True, compile=compile, backend="te")
    agree_in_evaluation(pair)
    # uncompiled, a loss would be launched operation by operation
    assert are_recorded(cuda_graphs) == (loss and not compile)
    agree_in_training(pair)
    assert are_recorded(cuda_graphs) == (not compile)  # in training
    agree_in_evaluation(pair)
    assert not any("a graph" in note for note in te_transform.report(pair.converted).notes)


def loss_and_logits(model: nn.Module, x: Tensor) -> Any:
    """Return all outputs, each with a gradient."""
    loss, logits, hidden = model(x)
    return [1e3 * loss, logits, hidden.detach()]


def logits_alone(model: nn.Module, x: Tensor) -> Any:
    return model(x)[1]


@pytest.mark.parametrize("of", [loss_and_logits, logits_alone])
def test_logits_beside_a_loss_may_have_a_gradient(
    of: Any, compilations: Compiler, cuda_graphs: Recorder
) -> None:
    pair = Pair.of(words(), graphs=True, compile=True, backend="te")
    agree_in_training(pair)
    compiled = len(compilations)
    for scale in range(1, 4):
        pair.x = X * scale
        pair.agree(of)
    assert len(compilations) == compiled + 1  # the head, with a gradient of all that it returns
    agree_in_training(pair)
    assert len(compilations) == compiled + 1
    assert not are_recorded(cuda_graphs)


def test_the_head_runs_beside_pieces_under_ddp(
    compilations: Compiler, buckets: Callable[[int], None]
) -> None:
    """The gradient of the head is ready before all other gradients."""
    buckets(1)
    pair = Pair.of(words(), compile=True, backend="te")
    for of in (loss_of, loss_and_logits, logits_alone, loss_of):
        pair.agree(of)
    # what is before it, then the head without a gradient of its logits, and with one
    linears = [[node.target for node in graph.graph.nodes].count(F.linear) for graph, _ in compilations]
    assert linears[1:] == [1, 1]
    assert linears[0] > 1
    assert not any("a graph" in note for note in te_transform.report(pair.converted).notes)


class HeadAlone(Words):
    """A model whose first operation is the head, as the graph around blocks that FSDP2 shards."""

    def forward(self, x: Tensor) -> Any:
        logits = self.logits(x)
        return F.cross_entropy(logits.flatten(0, 1), LABELS[: len(x)].flatten()), logits, x


@pytest.mark.parametrize("kind", [Words, HeadAlone])
def test_compiled_logits_beside_a_loss_have_no_gradient_of_zeros(
    kind: type[Words], compilations: Compiler
) -> None:
    pair = Pair.of(words(kind), compile=True, backend="te")
    for _ in range(2):
        pair.agree(loss_of)
    *_, (head, _) = compilations
    assert torch.detach in [node.target for node in head.graph.nodes]
    assert len(compilations) == (1 if kind is HeadAlone else 2)
    for of in (loss_and_logits, logits_alone, loss_of):
        pair.agree(of)
    assert len(compilations) == (2 if kind is HeadAlone else 3)  # the head, with a gradient of its logits


@pytest.mark.parametrize("graphs", [False, True])
def test_a_write_to_logits_that_the_backward_reads_raises(graphs: bool) -> None:
    """The compiler saves the logits for the gradient of the loss, beside which it returns them."""
    pair = Pair.of(words(), graphs=graphs, compile=True, backend="te")
    agree_in_training(pair)
    loss, logits, _ = pair.converted(X)
    logits.mul_(2)
    with pytest.raises(RuntimeError, match=r"write in place to a tensor of shape \(2, \d+, 4100\)"):
        loss.backward()
    agree_in_training(pair)


@pytest.mark.parametrize("paced", [0, pytest.param(2**30, marks=pytest.mark.integration)])
def test_few_logits_are_copied(
    paced: int, cuda_graphs: Recorder, set_limit: Callable[[str, int], None]
) -> None:
    set_limit("COPIED", 2**20)
    set_limit("PACED", paced)
    pair = Pair.of(words(), graphs=True, compile=True, backend="te")
    agree_in_evaluation(pair)
    assert are_recorded(cuda_graphs) == bool(paced)  # where the CPU sets the pace
    agree_in_training(pair)
    assert are_recorded(cuda_graphs)


@pytest.mark.integration  # as what is changed between other recordings
def test_the_head_and_the_size_may_change(cuda_graphs: Recorder) -> None:
    pair = Pair.of(words(), graphs=True, compile=True, backend="te")
    agree_in_training(pair)
    for model in pair.models:
        model.head.weight.requires_grad_(False)
    agree_in_training(pair)
    for model in pair.models:
        torch.manual_seed(0)
        model.head = nn.Linear(WIDTH, COLUMNS)
    agree_in_training(pair)
    for model in pair.models:
        model.head.register_forward_hook(lambda module, args, out: out * 2)
    agree_in_training(pair)
    for rows in (1, 2):
        pair.x = X[:rows]
        for _ in range(4):
            pair.agree(loss_of)
    assert not are_recorded(cuda_graphs)


class Twice(Words):
    """A model that returns its logits twice."""

    def forward(self, x: Tensor) -> Any:
        found = super().forward(x)
        return *found, found[1]


@pytest.mark.parametrize("compile", [False, True])
def test_logits_may_be_returned_twice(compile: bool, cuda_graphs: Recorder) -> None:
    pair = Pair.of(words(Twice, loss=False), graphs=True, compile=compile, backend="te")
    agree_in_evaluation(pair)
    assert not are_recorded(cuda_graphs)
    agree_in_training(pair)


class Dropped(Words):
    def logits(self, hidden: Tensor) -> Tensor:
        return F.dropout(super().logits(hidden), 0.0, self.training)


class Counted(Words):
    """A model that writes after its head."""

    def __init__(self, loss: bool):
        super().__init__(loss)
        self.register_buffer("calls", torch.zeros(()))

    def logits(self, hidden: Tensor) -> Tensor:
        found = super().logits(hidden)
        self.calls += 1
        return found + self.calls


class Scaled(Words):
    """A model whose logits are multiplied by another parameter."""

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) * self.bonus


class Unrecorded(Words):
    """A model that changes the grad mode after its head."""

    def logits(self, hidden: Tensor) -> Tensor:
        found = super().logits(hidden)
        with torch.no_grad():
            largest = found.amax()
        return found - largest


class Shared(Words):
    """A model whose layers read a tensor that the loss reads too."""

    def logits(self, hidden: Tensor) -> Tensor:
        shift = LABELS[..., None] / COLUMNS
        return super().logits(hidden * shift) + shift


LATER = (pytest.param(kind, marks=pytest.mark.integration) for kind in (Dropped, Scaled, Unrecorded))


@pytest.mark.parametrize("kind", [Counted, Shared, *LATER])
def test_a_head_with_other_readers_stays_in_the_recording(kind: type[Words], cuda_graphs: Recorder) -> None:
    pair = Pair.of(words(kind), graphs=True, compile=True, backend="te")
    agree_in_training(pair)
    assert are_recorded(cuda_graphs)
    agree_in_evaluation(pair)
