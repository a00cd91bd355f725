"""The loss of Hugging Face's causal models: TE's cross entropy in its door, and the original where that
cannot be."""

import copy
import pickle
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from te_transform import backends, loss
from te_transform.emit import enter_loss, leave
from te_transform.loss import CausalLoss, fusable
from tests.zoo import CASES

WORDS, LENGTH = 17, 9


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """What TE's function of this name computes."""
    flat = logits.float().flatten(0, 1)
    return F.cross_entropy(flat, targets.flatten(), ignore_index=ignore_index, reduction="none").view_as(
        targets
    )


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """TE's cross entropy on the CPU: the shapes that it was called with."""
    calls: list[tuple[int, ...]] = []

    def counted(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        calls.append(tuple(logits.shape))
        return cross_entropy(logits, targets, ignore_index)

    fake = SimpleNamespace(cross_entropy=counted)
    monkeypatch.setitem(sys.modules, "te_transform.backends.te", fake)
    monkeypatch.setattr(backends, "te", fake, raising=False)
    monkeypatch.setattr(loss, "without_cross_entropy", lambda logits, targets: None)
    return calls


def both(labels: Tensor, **more: object) -> tuple[Tensor, Tensor]:
    """The original's loss and the fused one's."""
    logits = torch.randn(2, LENGTH, WORDS, generator=torch.Generator().manual_seed(0))
    functions = (ForCausalLMLoss, CausalLoss(ForCausalLMLoss))
    one, other = (function(logits, labels, WORDS, **more) for function in functions)
    return one, other


LABELS = torch.randint(WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(1))
IGNORING = LABELS.masked_fill(torch.arange(LENGTH) % 3 == 0, -100)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_items_in_batch": 7},
        {"num_items_in_batch": torch.tensor(7)},
        {"ignore_index": 3},
        {"shift_labels": LABELS.flip(1)},
        {"some_argument_of_a_trainer": 1},
    ],
)
@pytest.mark.parametrize("labels", [LABELS, IGNORING])
def test_gives_the_originals_numbers(labels: Tensor, more: dict, kernel: list) -> None:
    if "ignore_index" in more:
        labels = labels.masked_fill(labels < 0, 3)
    expected, actual = both(labels, **more)
    assert len(kernel) == 1
    assert expected.dtype == actual.dtype
    assert torch.allclose(actual, expected, rtol=1e-6)


def test_where_all_labels_are_ignored_it_is_nan_too(kernel: list) -> None:
    assert all(map(torch.isnan, both(torch.full((2, LENGTH), -100))))
    assert kernel


@pytest.mark.parametrize("label", [WORDS, -1])
def test_a_label_that_is_none_raises(label: int, kernel: list) -> None:
    labels = LABELS.clone()
    labels[0, 3] = label
    with pytest.raises(RuntimeError):
        CausalLoss(ForCausalLMLoss)(torch.randn(2, LENGTH, WORDS), labels, WORDS)


def test_on_a_cpu_the_original_runs_and_that_is_counted() -> None:
    function = CausalLoss(ForCausalLMLoss)
    logits = torch.randn(2, LENGTH, WORDS)
    assert torch.equal(function(logits, LABELS, WORDS), ForCausalLMLoss(logits, LABELS, WORDS))
    assert function.plain_calls == {"the loss, not all on one GPU": 1}


def test_another_vocabulary_than_the_logits_is_the_originals_matter(kernel: list) -> None:
    logits = torch.randn(2, LENGTH, WORDS)
    with pytest.raises(ValueError, match="batch_size"):
        CausalLoss(ForCausalLMLoss)(logits, LABELS, WORDS * 2 * LENGTH)
    assert not kernel


def test_a_model_gets_it_and_gives_it_back(kernel: list) -> None:
    model = CASES["llama"].build()
    inputs = {**CASES["llama"].sample(), "labels": CASES["llama"].sample()["input_ids"]}
    expected = model(**inputs).loss
    enter_loss(model)
    assert isinstance(model.loss_function, CausalLoss)
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.allclose(one(**inputs).loss, expected, rtol=1e-6)
    assert len(kernel) == 3
    leave(model)
    assert model.loss_function is ForCausalLMLoss
    assert "_loss_function" not in vars(model)


def test_a_loss_of_the_users_stays() -> None:
    model = CASES["llama"].build()
    model.loss_function = own = lambda logits, labels, vocab_size, **_: logits.sum()
    enter_loss(model)
    assert model.loss_function is own
    leave(model)
    assert model.loss_function is own


@pytest.mark.parametrize(
    ("name", "expected"), [("llama", True), ("gpt2", True), ("bert", False), ("vit", False)]
)
def test_only_causal_models_have_the_door(name: str, expected: bool) -> None:
    assert fusable(CASES[name].build()) == expected


def test_a_model_that_is_no_hugging_face_model_has_none() -> None:
    assert not fusable(nn.Linear(2, 2))
    assert not fusable(CASES["nanogpt_flash"].build())
