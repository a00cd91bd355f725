"""The loss of a language model: one kernel, where the backend has one. It refuses nothing of its own."""

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_transform
from tests.rules.tables import H, Make, Written, X, linear, reasons, sites, written
from tests.zoo import seeded

WORDS = 11
TARGETS = torch.randint(WORDS, (2, 5), generator=torch.Generator().manual_seed(1))


def flattened(model: Written, x: Tensor) -> Tensor:
    return F.cross_entropy(model.head(x).view(-1, WORDS), model.targets.view(-1))


def in_fp32(model: Written, x: Tensor) -> Tensor:
    return F.cross_entropy(model.head(x).float().flatten(0, 1), model.targets.flatten(), ignore_index=3)


def summed(model: Written, x: Tensor) -> Tensor:
    return F.cross_entropy(model.head(x).transpose(1, 2), model.targets, reduction="sum") / 7


def each(model: Written, x: Tensor) -> Tensor:
    losses = F.cross_entropy(model.head(x).view(-1, WORDS), model.targets.view(-1), reduction="none")
    return (losses * torch.arange(10)).sum() / 45


def of(function) -> Make:
    return written(function, head=linear(H, WORDS), targets=lambda: nn.Buffer(TARGETS))


FUSES = {"flattened": of(flattened), "in fp32": of(in_fp32), "summed": of(summed), "each": of(each)}


@pytest.mark.parametrize("name", FUSES)
def test_fuses(name: str, te: ModuleType) -> None:
    model = seeded(lambda: FUSES[name]().bfloat16())
    converted = te_transform.convert(model, X.bfloat16(), backend="te")
    te_transform.report(converted).expect(cross_entropy=1, linear=1)
    for one, other in zip(step(converted), step(model), strict=True):
        torch.testing.assert_close(one, other, atol=0.01, rtol=0.02)


def step(model: nn.Module) -> tuple[Tensor, ...]:
    loss = model(X.bfloat16())
    return loss, *torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("name", ["flattened", "in fp32", "each"])
def test_calls_without_a_kernel_compute_the_loss_of_the_model(
    name: str, te: ModuleType, by_size: None
) -> None:
    model = seeded(lambda: FUSES[name]().bfloat16())
    converted = te_transform.convert(model, X.bfloat16(), backend="te", verify=False)
    assert all(torch.equal(one, other) for one, other in zip(step(converted), step(model), strict=True))


def written_later(model: Written, x: Tensor) -> tuple[Tensor, Tensor]:
    logits = model.head(x)
    loss = F.cross_entropy(logits.float().flatten(0, 1), model.targets.flatten())
    logits.detach().div_(2)
    return loss, logits


def test_logits_that_are_written_to_later_stay() -> None:
    report = te_transform.inspect(seeded(of(written_later)).bfloat16(), X.bfloat16(), backend="te")
    report.expect(cross_entropy=0, linear=1)
    assert len(reasons(report, "cross_entropy")) == 1


def smoothed(model: Written, x: Tensor) -> Tensor:
    return F.cross_entropy(model.head(x).flatten(0, 1), model.targets.flatten(), label_smoothing=0.1)


def by_hand(model: Written, x: Tensor) -> Tensor:
    return -model.head(x).log_softmax(-1).gather(-1, model.targets[..., None]).mean()


@pytest.mark.parametrize("function", [smoothed, by_hand])
def test_other_losses_stay(function) -> None:
    assert sites(of(function), backend="te").counts == {"linear": 1}


def frozen() -> nn.Module:
    return of(flattened)().requires_grad_(False)


def cut(model: Written, x: Tensor) -> Tensor:
    logits = model.head(x)
    with torch.no_grad():
        return F.cross_entropy(logits.flatten(0, 1), model.targets.flatten())


@pytest.mark.parametrize("make", [frozen, of(cut)], ids=["frozen", "without gradients"])
def test_reads_no_weight_and_so_takes_any_logits(make: Make) -> None:
    report = sites(make, backend="te")
    report.expect(cross_entropy=1)
    assert reasons(report, "cross_entropy") == set()


def test_plain_pytorch_has_no_kernel_for_it() -> None:
    assert not any(site.rule == "cross_entropy" for site in sites(of(flattened), backend="torch").sites)
