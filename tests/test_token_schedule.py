"""Schedulers that count tokens, warm-up in steps, and the norms of Adam's second moments."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from te_transform.training import CurriculumError, SequenceCurriculum, TokenSchedule, variance_norms

Make = Callable[[torch.optim.Optimizer], LRScheduler]
SCHEDULERS: dict[str, Make] = {
    "cosine": lambda o: CosineAnnealingLR(o, 10),
    "restarts": lambda o: CosineAnnealingWarmRestarts(o, 4),
    "exponential": lambda o: ExponentialLR(o, 0.9),
    "a function": lambda o: LambdaLR(o, [lambda step: 1 / (1 + step)] * 2),
    "milestones": lambda o: MultiStepLR(o, [3, 5]),
    "one cycle": lambda o: OneCycleLR(o, 1.0, total_steps=12),
    "a polynomial": lambda o: PolynomialLR(o, 10, power=2),
    "in sequence": lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=4), ExponentialLR(o, 0.9)], [4]),
}  # fmt: skip


def optimizer(lr: Any = 0.1) -> torch.optim.Optimizer:
    """Two groups with other rates."""
    one, two = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    return AdamW([{"params": [one]}, {"params": [two], "lr": lr / 2}], lr=lr)


def rates(of: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in of.param_groups]


def by_steps(make: Make, steps: int) -> list[list[float]]:
    """The rates before each step of an ordinary training."""
    plain = optimizer()
    scheduler, found = make(plain), []
    for _ in range(steps):
        found.append(rates(plain))
        plain.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("name", SCHEDULERS)
def test_any_scheduler_counts_tokens(name: str) -> None:
    """100 tokens are a step: steps of 50, of 100, and one of 250 tokens."""
    expected, ours = by_steps(SCHEDULERS[name], 9), optimizer()
    schedule, tokens = TokenSchedule(SCHEDULERS[name](ours), 100), 0
    for new in (50, 50, 50, 50, 100, 250, 50, 100):
        assert rates(ours) == schedule.get_last_lr() == expected[tokens // 100]
        ours.step()
        schedule.step(new)
        tokens += new


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_warm_up_counts_steps(name: str) -> None:
    """The rate is the scheduler's, times the part of the warm-up; it never enters the scheduler's own."""
    expected, ours = by_steps(SCHEDULERS[name], 9), optimizer()
    schedule = TokenSchedule(SCHEDULERS[name](ours), 100, warmup_steps=4)
    for step in range(9):
        part = min(1.0, (step + 1) / 4)
        assert rates(ours) == pytest.approx([rate * part for rate in expected[step // 2]], rel=1e-12)
        ours.step()
        schedule.step(50)


@pytest.mark.parametrize("at", [1, 3, 6])
def test_goes_on_from_a_checkpoint(at: int) -> None:
    def made() -> tuple[torch.optim.Optimizer, TokenSchedule]:
        ours = optimizer()
        return ours, TokenSchedule(OneCycleLR(ours, 1.0, total_steps=12), 100, warmup_steps=3)

    (whole, schedule), found = made(), []
    for step in range(9):
        if step == at:
            saved = whole.state_dict(), schedule.state_dict()
        whole.step()
        schedule.step(70)
        found.append(rates(whole))
    resumed, again = made()
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    for expected in found[at:]:
        resumed.step()
        again.step(70)
        assert rates(resumed) == expected


def test_reads_the_tokens_of_a_curriculum() -> None:
    """More calls without new tokens change nothing: accelerate calls once for each process."""
    ours, loader = optimizer(), [torch.zeros(2, 32)] * 6
    curriculum = SequenceCurriculum(loader, max_length=32, bucket=8, total_steps=4)
    schedule = TokenSchedule(ExponentialLR(ours, 0.5), 64, source=curriculum, warmup_steps=2)
    found = []
    for _ in curriculum:
        found.append(rates(ours)[0])
        ours.step()
        schedule.step()
        schedule.step()
    # tokens before each step: 0, 64, 80, 112, 160, 224
    assert found == pytest.approx([0.05, 0.05, 0.05, 0.05, 0.025, 0.0125])
    assert (schedule.steps, schedule.ticks) == (6, 4)


def test_a_rate_in_a_tensor_stays_the_same_tensor() -> None:
    rate = torch.tensor(0.1)
    ours = Adam([nn.Parameter(torch.ones(2))], lr=rate)
    held = ours.param_groups[0]["lr"]
    schedule = TokenSchedule(ExponentialLR(ours, 0.5), 100, warmup_steps=2)
    for _ in range(3):
        ours.step()
        schedule.step(100)
    assert ours.param_groups[0]["lr"] is held
    assert float(held) == pytest.approx(0.0125)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheduler": None}, "expected a torch scheduler that counts steps, got a NoneType"),
        ({"scheduler": ReduceLROnPlateau}, "got a ReduceLROnPlateau; step that beside the optimizer"),
        ({"tokens_per_step": 0}, "expected tokens_per_step of at least 1, got 0"),
        ({"warmup_steps": -1}, "expected warmup_steps of at least 1, got -1"),
        ({"scheduler": lambda o: TokenSchedule(ExponentialLR(o, 0.5), 9)}, "got a TokenSchedule; step that"),
        ({"source": 5}, "expected a source with the number of tokens, got a int"),
    ],
)
def test_bad_arguments_leave_the_rates(options: dict[str, Any], message: str) -> None:
    ours = optimizer()
    given = {"scheduler": lambda o: ExponentialLR(o, 0.5), "tokens_per_step": 9, "warmup_steps": 3} | options
    given["scheduler"] = given["scheduler"] and given["scheduler"](ours)
    with pytest.raises(CurriculumError, match=message):
        TokenSchedule(**given)
    assert rates(ours) == [0.1, 0.05]


def test_a_step_needs_a_number_of_tokens() -> None:
    schedule = TokenSchedule(ExponentialLR(optimizer(), 0.5), 100)
    with pytest.raises(CurriculumError, match=r"expected a number of tokens, got none; call step\(tokens\)"):
        schedule.step()
    with pytest.raises(CurriculumError, match="expected tokens of at least 1, got 0"):
        schedule.step(0)
    assert schedule.steps == 0


def test_a_source_that_counts_again_from_zero_goes_on() -> None:
    """Trainer's second train() starts the curriculum again; the rate decays by the new tokens."""
    ours, source = optimizer(), SimpleNamespace(tokens=0)
    schedule, found = TokenSchedule(ExponentialLR(ours, 0.5), 100, source=source), []
    for total in (60, 120, 60, 120, 180):
        source.tokens = total
        ours.step()
        schedule.step()
        found.append(rates(ours)[0])
    assert found == [0.1, 0.05, 0.05, 0.025, 0.0125]


STATES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "got one without tokens, start, steps, ticks, rates, scheduler": lambda state: None,
    "got one without rates; pass": lambda state: {name: state[name] for name in state if name != "rates"},
    "got one without tokens; pass": lambda state: state | {"tokens": "many"},
    "got one without tokens, steps; pass": lambda state: state | {"tokens": -1, "steps": True},
    "got one without rates;": lambda state: state | {"rates": ["0.1", "0.2"]},
    "expected the 1 parameter groups of the schedule, got an optimizer of 2": lambda state: (
        state | {"rates": [0.1]}
    ),
}


@pytest.mark.parametrize("message", STATES)
def test_a_wrong_state_changes_nothing(message: str) -> None:
    ours = optimizer()
    schedule = TokenSchedule(ExponentialLR(ours, 0.5), 100)
    ours.step()
    schedule.step(150)
    before = schedule.state_dict(), rates(ours)
    with pytest.raises(CurriculumError, match=message):
        schedule.load_state_dict(STATES[message](schedule.state_dict()))
    assert (schedule.state_dict(), rates(ours)) == before


def test_a_group_that_is_added_later_is_an_error() -> None:
    ours = optimizer()
    schedule = TokenSchedule(ExponentialLR(ours, 0.5), 100)
    ours.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(
        CurriculumError, match="expected the 2 parameter groups of the schedule, got an optim"
    ):
        schedule.step(100)
    assert schedule.steps == schedule.ticks == 0


def test_norms_of_the_second_moments() -> None:
    ours = optimizer()
    with pytest.raises(CurriculumError, match="got a AdamW without; pass an optimizer"):
        variance_norms(ours)
    for group, gradient in zip(ours.param_groups, ([3.0, -4.0], [1.0, 2.0]), strict=True):
        group["params"][0].grad = torch.tensor(gradient)
    ours.step()
    found = variance_norms(ours)
    root = 0.001**0.5  # of 1 - beta2
    assert found == pytest.approx((10 * root, 4 * root))
    assert found.max == pytest.approx(4 * root)
    with pytest.raises(CurriculumError, match="got a SGD without"):
        variance_norms(SGD([nn.Parameter(torch.ones(1))]))
    with pytest.raises(CurriculumError, match="got a NoneType without"):
        variance_norms(None)
    empty = AdamW([nn.Parameter(torch.ones(0))])
    empty.param_groups[0]["params"][0].grad = torch.ones(0)
    empty.step()
    assert variance_norms(empty) == (0.0, 0.0)
