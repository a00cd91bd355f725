"""Head and loss a part of the vocabulary at a time: the loss and the gradients of whole logits, which are
withheld."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_transform
from te_transform.backends import chunked_loss
from tests.conversions import ALL
from tests.rules.tables import H, Make, X, linear, reasons, sites, written
from tests.zoo import seeded, zero_dropout

WORDS = 37
TARGETS = torch.randint(WORDS, (2, 5), generator=torch.Generator().manual_seed(1))
TARGETS[0, :2] = 3


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "NUMBERS", 80)  # eight words of ten tokens


def of(function: Any, bias: bool = True) -> Make:
    head = linear(H, WORDS, bias=bias)
    return written(function, norm=lambda: nn.LayerNorm(H), head=head, targets=lambda: nn.Buffer(TARGETS))


def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    return model.head(model.norm(x))


def with_logits(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits_of(model, x)
    return logits, F.cross_entropy(logits.view(-1, WORDS), model.targets.view(-1))


def targets_later(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits_of(model, x)
    labels = F.pad(model.targets, (0, 1), value=-100)[:, 1:].contiguous()
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.view(-1, WORDS), labels.view(-1)), logits


def alone(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(logits_of(model, x).flatten(0, 1), model.targets.flatten(), ignore_index=3)


def summed(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(logits_of(model, x).transpose(1, 2), model.targets, reduction="sum") / 7


def each(model: nn.Module, x: Tensor) -> Tensor:
    losses = F.cross_entropy(
        logits_of(model, x).flatten(0, 1), model.targets.flatten(), reduction="none", ignore_index=3
    )
    return (losses * torch.arange(10)).mean()


def nothing_counted(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(logits_of(model, x).flatten(0, 1), torch.full((10,), -100))


FUSES = {
    "with logits": of(with_logits),
    "targets later": of(targets_later),
    "alone, some ignored": of(alone),
    "without a bias": of(alone, bias=False),
    "summed": of(summed),
    "each": of(each),
    "nothing counted": of(nothing_counted),
}


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The loss, and the gradients of the input and all parameters."""
    x = x.clone().requires_grad_()
    out = model(x)
    (loss,) = (each for each in (out if isinstance(out, tuple) else (out,)) if each.dim() == 0)
    return [loss.detach(), *torch.autograd.grad(loss, [x, *model.parameters()])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", FUSES)
def test_computes_the_same(name: str, dtype: torch.dtype) -> None:
    model = seeded(FUSES[name]).to(dtype)
    converted = te_transform.convert(model, X.to(dtype), chunked_loss=True)
    te_transform.report(converted).expect(chunked_loss=1, cross_entropy=0)
    exact = step(copy.deepcopy(model).double(), X.double())
    for one, own, wide in zip(step(converted, X.to(dtype)), step(model, X.to(dtype)), exact, strict=True):
        assert one.dtype is own.dtype
        assert torch.equal(one.isnan(), own.isnan())
        if not own.isnan().any():
            allowed = 1.2 * (own - wide).norm() + torch.finfo(dtype).eps * wide.norm() + 1e-12
            assert (one - wide).norm() <= allowed


@pytest.mark.parametrize("gain", [0.5, 1.0])
def test_words_that_are_nearly_certain(gain: float) -> None:
    """Their losses are small numbers, differences of large logits."""
    model = seeded(FUSES["summed"])
    with torch.no_grad():
        seen = model.norm(X).flatten(0, 1)
        model.head.weight.zero_().index_add_(0, TARGETS.flatten(), gain * seen)
        converted = te_transform.convert(model, X, chunked_loss=True, verify=False)
    exact = step(copy.deepcopy(model).double(), X.double())
    for one, own, wide in zip(step(converted, X), step(model, X), exact, strict=True):
        assert (one - wide).norm() <= 1.5 * (own - wide).norm() + 1e-7 * wide.norm()


def test_withheld_logits_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, logits_of_part = [], chunked_loss.LossPart.logits

    def counted(part: Any, rows: Tensor) -> Tensor:
        parts.append((len(rows), part.stop - part.start))
        return logits_of_part(part, rows)

    monkeypatch.setattr(chunked_loss.LossPart, "logits", counted)
    converted = te_transform.convert(seeded(of(with_logits)), X, chunked_loss=True, verify=False)
    parts.clear()
    logits, loss = converted(X)
    loss.backward()
    assert parts == 2 * [*4 * [(10, 8)], (10, 5)]  # forward and backward
    assert logits.shape == (2, 5, WORDS)
    assert logits.isnan().all()
    assert not logits.requires_grad
    assert logits.untyped_storage().nbytes() == logits.itemsize


def test_logits_are_there_where_nothing_is_differentiated() -> None:
    model = seeded(of(with_logits))
    converted = te_transform.convert(model, X, chunked_loss=True)
    with torch.no_grad():
        for one, other in zip(converted(X), model(X), strict=True):
            torch.testing.assert_close(one, other)


# of one layer, where a config says so: the loss is behind the last
SIZES: dict[str, dict[str, int]] = {
    "llama": {"num_hidden_layers": 1},
    "gpt2": {"n_layer": 1},
    "nanogpt_manual": {},
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.integration) for name in ("gpt2", "llama", "nanogpt_manual")],
)
@pytest.mark.usefixtures("as_given")
def test_models_with_a_loss_are_verified(name: str) -> None:
    model, sample = zero_dropout(ALL[name].build(**SIZES[name])), ALL[name].sample()
    if "input_ids" in sample:
        sample["labels"] = sample["input_ids"]
    converted = te_transform.convert(model, sample, chunked_loss=True)
    te_transform.report(converted).expect(chunked_loss=1)
    assert te_transform.verify(model, converted, sample)


def test_a_second_derivative_and_a_second_backward() -> None:
    model = seeded(of(summed))
    converted = te_transform.convert(model, X, chunked_loss=True)

    def twice(model: nn.Module) -> list[Tensor]:
        x = X.clone().requires_grad_()
        loss = model(x)
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, retain_graph=True)
        return [first.detach(), second, *torch.autograd.grad(loss, list(model.parameters()))]

    for one, other in zip(twice(converted), twice(model), strict=True):
        torch.testing.assert_close(one, other)


def test_frozen_parts_and_autocast() -> None:
    model = seeded(of(summed))
    converted = te_transform.convert(model, X, chunked_loss=True)
    for each in (model, converted):
        each.head.weight.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (m(X) for m in (converted, model))
    assert found.dtype is expected.dtype
    for loss in (found, expected):
        loss.backward()
    assert converted.head.weight.grad is None
    torch.testing.assert_close(converted.head.bias.grad, model.head.bias.grad, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("target", [WORDS, -1])
def test_a_target_that_is_no_word_raises(target: int) -> None:
    model = seeded(of(alone))
    converted = te_transform.convert(model, X, chunked_loss=True)
    converted.targets[0, 0] = target
    expected = "expected targets >= 0 and < 37, or ignore_index, got another number; correct the targets"
    with pytest.raises(IndexError, match=expected):
        converted(X)


def test_the_rule_is_off_by_default_and_names_readers_of_the_logits() -> None:
    def read(model: nn.Module, x: Tensor) -> Any:
        logits = logits_of(model, x)
        return F.cross_entropy(logits.flatten(0, 1), model.targets.flatten()) + logits.logsumexp(-1).mean()

    assert reasons(sites(of(read)), "chunked_loss") == set()
    assert sites(of(with_logits)).counts["chunked_loss"] == 0
    assert reasons(sites(of(read), chunked_loss=True), "chunked_loss") == {
        "the output of the linear is also read by logsumexp, but the fused module does not return it: let "
        "nothing else read it, if the math allows"
    }


def loss_of(logits: Tensor, targets: Tensor, **how: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **how)


OTHERS: dict[str, Any] = {
    "capped logits": lambda m, x: loss_of(15 * torch.tanh(logits_of(m, x) / 15), m.targets),
    "later logits": lambda m, x: loss_of(logits_of(m, x)[:, :-1], m.targets[:, 1:]),
    "label smoothing": lambda m, x: loss_of(logits_of(m, x), m.targets, label_smoothing=0.1),
    "no loss": logits_of,
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_note_says_that_the_option_has_no_effect(name: str) -> None:
    (note,) = (note for note in sites(of(OTHERS[name]), chunked_loss=True).notes if "=True" in note)
    assert note.startswith(
        "chunked_loss=True has no effect on these calls: the rule needs a cross entropy of"
    )
    assert note not in sites(of(OTHERS[name])).notes


def test_a_slice_of_the_head_s_input_is_fused_as_the_note_says() -> None:
    def later(model: nn.Module, x: Tensor) -> Tensor:
        return loss_of(model.head(model.norm(x)[:, :-1]), model.targets[:, 1:])

    report = sites(of(later), chunked_loss=True)
    report.expect(chunked_loss=1)
    assert not [note for note in report.notes if "has no effect" in note]


@pytest.mark.parametrize("how", [{"compile": True}, {"compile": "auto"}])
def test_not_next_to_a_compiler(how: dict[str, Any]) -> None:
    with pytest.raises(te_transform.OptionError, match="with chunked_loss=True, which runs uncompiled"):
        te_transform.inspect(seeded(of(summed)), X, chunked_loss=True, **how)
