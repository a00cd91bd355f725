"""Heads, and the losses that read them, beside CUDA graphs: when they are, and that nothing else changes."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_transform
from te_transform.execution import lm_head, specializations
from tests import stand_in, test_compiled, test_replayed
from tests.attacks import WIDTH, Block, Pair, X
from tests.test_compiled import Compilations
from tests.test_replayed import Emulated
from tests.zoo import seeded

te, compilations, counts = stand_in.te, test_compiled.compilations, test_replayed.counts  # fixtures
pytestmark = pytest.mark.usefixtures("counts", "te")

COLUMNS = 4100
LABELS = torch.randint(COLUMNS, X.shape[:2], generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def beside_at_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of tests are few."""
    monkeypatch.setattr(lm_head, "COPIED", 0)


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


def in_graphs() -> set[int]:
    """How many columns there are in what the recorded graphs return."""
    return {output.shape[-1] for graphs in Emulated.all for output in graphs.outputs if output.dim()}


def agree_in_evaluation(pair: Pair) -> None:
    with torch.no_grad():
        for scale in range(1, 6):
            found, expected = (model(X * scale) for model in (pair.converted, pair.original))
            torch.testing.assert_close(found, expected)
        kept = [tensor.clone() for tensor in found]
        pair.converted(X * 100)
        assert all(map(torch.equal, found, kept))


def loss_of(model: nn.Module, x: Tensor) -> Any:
    """What is returned, of which the first alone has a gradient, if it is a loss."""
    first, *others = model(x)
    return [1e3 * first, *(other.detach() for other in others)] if model.loss else [first, *others]


def agree_in_training(pair: Pair) -> None:
    for scale in range(1, 6):
        pair.x = X * scale
        pair.agree(loss_of)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("loss", [False, True])
def test_runs_beside_the_graph(compile: bool, loss: bool) -> None:
    pair = Pair.of(words(loss=loss), graphs=True, compile=compile, backend="te")
    agree_in_evaluation(pair)
    # uncompiled, a loss would be launched operation by operation
    assert (COLUMNS in in_graphs()) == (loss and not compile)
    agree_in_training(pair)
    assert (COLUMNS in in_graphs()) == (not compile)  # in training
    agree_in_evaluation(pair)
    assert not any("a graph" in note for note in te_transform.report(pair.converted).notes)


def loss_and_logits(model: nn.Module, x: Tensor) -> Any:
    """All that is returned, each with a gradient."""
    loss, logits, hidden = model(x)
    return [1e3 * loss, logits, hidden.detach()]


def logits_alone(model: nn.Module, x: Tensor) -> Any:
    return model(x)[1]


@pytest.mark.parametrize("of", [loss_and_logits, logits_alone])
def test_a_gradient_of_the_logits_beside_the_loss(of: Any, compilations: Compilations) -> None:
    pair = Pair.of(words(), graphs=True, compile=True, backend="te")
    agree_in_training(pair)
    compiled = len(compilations)
    for scale in range(1, 4):
        pair.x = X * scale
        pair.agree(of)
    assert len(compilations) == compiled + 1  # the head, with a gradient of all that it returns
    agree_in_training(pair)
    assert len(compilations) == compiled + 1
    assert COLUMNS not in in_graphs()


def test_runs_beside_pieces(compilations: Compilations, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under DDP: the gradient of the head is there before that of all else is computed."""
    monkeypatch.setattr(specializations, "bucket_size", lambda: 1)
    pair = Pair.of(words(), compile=True, backend="te")
    for of in (loss_of, loss_and_logits, logits_alone, loss_of):
        pair.agree(of)
    # what is before it, then the head without a gradient of its logits, and with one
    linears = [[node.target for node in graph.graph.nodes].count(F.linear) for graph, _ in compilations]
    assert linears[1:] == [1, 1]
    assert linears[0] > 1
    assert not any("a graph" in note for note in te_transform.report(pair.converted).notes)


def write_to_logits(model: nn.Module, x: Tensor) -> Any:
    """Before the loss is differentiated, of which the compiler may have saved the logits."""
    loss, logits, _ = model(x)
    assert logits.requires_grad
    assert not logits.is_leaf
    logits.mul_(2)
    return 1e3 * loss


def test_a_write_to_the_logits() -> None:
    pair = Pair.of(words(), graphs=True, compile=True, backend="te")
    agree_in_training(pair)
    pair.agree(write_to_logits)


@pytest.mark.parametrize("paced", [0, pytest.param(2**30, marks=pytest.mark.integration)])
def test_few_logits_are_copied(paced: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_head, "COPIED", 2**20)
    monkeypatch.setattr(lm_head, "PACED", paced)
    pair = Pair.of(words(), graphs=True, compile=True, backend="te")
    agree_in_evaluation(pair)
    assert (COLUMNS in in_graphs()) == bool(paced)  # where the CPU sets the pace
    agree_in_training(pair)
    assert COLUMNS in in_graphs()


@pytest.mark.integration  # as what is changed between other recordings
def test_another_head_and_another_size() -> None:
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
    assert COLUMNS not in in_graphs()


class Twice(Words):
    """Returns its logits twice."""

    def forward(self, x: Tensor) -> Any:
        found = super().forward(x)
        return *found, found[1]


@pytest.mark.parametrize("compile", [False, True])
def test_logits_that_are_returned_twice(compile: bool) -> None:
    pair = Pair.of(words(Twice, loss=False), graphs=True, compile=compile, backend="te")
    agree_in_evaluation(pair)
    assert COLUMNS not in in_graphs()
    agree_in_training(pair)


class Dropped(Words):
    def logits(self, hidden: Tensor) -> Tensor:
        return F.dropout(super().logits(hidden), 0.0, self.training)


class Counted(Words):
    """Writes after its head."""

    def __init__(self, loss: bool):
        super().__init__(loss)
        self.register_buffer("calls", torch.zeros(()))

    def logits(self, hidden: Tensor) -> Tensor:
        found = super().logits(hidden)
        self.calls += 1
        return found + self.calls


class Scaled(Words):
    """Another parameter reads the logits."""

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) * self.bonus


class Unrecorded(Words):
    """Changes the mode after its head."""

    def logits(self, hidden: Tensor) -> Tensor:
        found = super().logits(hidden)
        with torch.no_grad():
            largest = found.amax()
        return found - largest


class Shared(Words):
    """What its loss reads is read by the layers too."""

    def logits(self, hidden: Tensor) -> Tensor:
        shift = LABELS[..., None] / COLUMNS
        return super().logits(hidden * shift) + shift


LATER = (pytest.param(kind, marks=pytest.mark.integration) for kind in (Dropped, Scaled, Unrecorded))


@pytest.mark.parametrize("kind", [Counted, Shared, *LATER])
def test_stays_in_the_graph(kind: type[Words], counts: Counter) -> None:
    pair = Pair.of(words(kind), graphs=True, compile=True, backend="te")
    agree_in_training(pair)
    assert COLUMNS in in_graphs()
    agree_in_evaluation(pair)
