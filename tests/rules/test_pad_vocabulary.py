"""The head of a language model: rows of zeros in its product alone, where it is asked for and would help."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_transform
from te_transform.backends import limits, plain
from te_transform.report.report import Report
from tests.rules.tables import H, Make, X, fused, linear, reasons, sequential, sites, written
from tests.zoo import seeded

WORDS = 4099
TARGETS = torch.randint(WORDS, (2, 5), generator=torch.Generator().manual_seed(1))


class LanguageModel(nn.Module):
    """Word embeddings that are the head's weight too; the answer's layout is asked for."""

    def __init__(self, bias: bool = True):
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(WORDS, H), nn.LayerNorm(H), nn.Linear(H, WORDS, bias)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.norm(self.words(ids)))
        return logits, F.cross_entropy(logits.view(-1, WORDS), ids.view(-1))


def step(model: nn.Module) -> list[Tensor]:
    logits, loss = model(TARGETS)
    return [logits, loss, *torch.autograd.grad(loss + logits.float().square().mean(), [*model.parameters()])]


@pytest.fixture
def as_on_a_gpu(kernels_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Run kernels on the CPU. Return the numbers of rows of the weights of fused products."""
    rows, product = [], plain.product

    def counting(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows.append(len(weight))
        assert bias is None or len(bias) == len(weight)
        return product(x, weight, bias)

    monkeypatch.setattr(plain.products, "product", counting)
    return rows


@pytest.mark.parametrize("bias", [False, True])
def test_computes_the_same_of_more_rows(as_on_a_gpu: list[int], bias: bool) -> None:
    model = seeded(lambda: LanguageModel(bias).bfloat16())
    converted = te_transform.convert(model, TARGETS, pad_vocabulary=True)
    te_transform.report(converted).expect(pad_vocabulary=1)
    as_on_a_gpu.clear()
    for found, expected in zip(step(converted), step(model), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=0.01)
        assert found.stride() == expected.stride()
    assert as_on_a_gpu == [4160]
    assert not te_transform.report(converted).plain_calls
    assert {name: p.shape for name, p in converted.state_dict().items()} == {
        name: p.shape for name, p in model.state_dict().items()
    }


def test_pads_what_autocast_computes(as_on_a_gpu: list[int]) -> None:
    model = seeded(LanguageModel)
    converted = te_transform.convert(model, TARGETS, pad_vocabulary=True)
    with torch.autocast("cpu", torch.bfloat16):
        as_on_a_gpu.clear()
        found, expected = step(converted), step(model)
    assert {*as_on_a_gpu} == {4160}
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=0.01)


def plain_calls(model: nn.Module, x: Tensor = TARGETS) -> dict[str, int]:
    converted = te_transform.convert(model, x, pad_vocabulary=True, verify=False)
    converted(x)
    return te_transform.report(converted).plain_calls


def test_calls_that_gain_nothing_are_reported(by_size: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "the head without padding, a tensor on cpu" in plain_calls(LanguageModel())
    monkeypatch.setattr(limits, "DEVICE", "cpu")
    assert "the head without padding, a matrix product in float32" in plain_calls(LanguageModel())
    assert "the head without padding, fewer than 256 tokens" in plain_calls(LanguageModel().bfloat16())


def heads(**options: bool | str) -> Report:
    return te_transform.inspect(seeded(LanguageModel), TARGETS, backend="torch", **options)


def test_the_rule_is_off_by_default() -> None:
    why = (
        "a product with 4,099 rows, not a multiple of 8, takes three times as long on a GPU as a product "
        "padded with zeros: set pad_vocabulary=True"
    )
    assert reasons(heads(), "pad_vocabulary") == {why}
    assert reasons(heads(pad_vocabulary=True), "pad_vocabulary") == set()
    assert reasons(heads(compile=True), "pad_vocabulary") == set(), "inductor pads by itself"


QUIET: dict[str, Make] = {
    "aligned": sequential(linear(H, 4096), nn.Tanh),
    "few rows": sequential(linear(H, 33), nn.Tanh),
}


@pytest.mark.parametrize("name", QUIET)
def test_leaves_others_alone(name: str) -> None:
    report = sites(QUIET[name], pad_vocabulary=True)
    assert not any(site.rule == "pad_vocabulary" for site in report.sites)
    (note,) = (note for note in report.notes if note.startswith("pad_vocabulary=True has no effect"))
    assert "an uncompiled linear with at least" in note


def test_changes_nothing_where_it_does_not_pad() -> None:
    # in fp32 on the CPU: bitwise
    report = fused(written(lambda m, x: m.head(x), head=linear(H, WORDS)), pad_vocabulary=True)
    assert report.counts == {"pad_vocabulary": 1}
    assert X.dtype is torch.float32


def test_leaves_alone_a_weight_that_calls_bring() -> None:
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(H, H)

        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return F.linear(self.first(x), weight)

    def weight(rows: int) -> Tensor:
        return torch.randn(rows, H, generator=torch.Generator().manual_seed(rows))

    model = seeded(Given)
    converted = te_transform.convert(model, (X, weight(WORDS)))
    for rows in (WORDS + 2, WORDS + 6):  # of varying numbers from the second call on
        assert torch.equal(converted(X, weight(rows)), model(X, weight(rows)))
    report = te_transform.report(converted)
    assert not [note for note in report.notes if "Error" in note]
    sentence = (
        "the linear's weight is an input or a constant, but kernels need a parameter: store it as an "
        "nn.Parameter, with requires_grad=False if it is not trained"
    )
    assert reasons(report, "linear") == {sentence}
