"""What the tables of the rules' tests are made of, and checked with.

A table of what fuses maps names to models, one of what is refused maps them to a model and the sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import te_transform
from te_transform.report.report import Report
from tests.attacks import assert_same, observed, with_input_gradient
from tests.zoo import seeded

H, FFN, HEADS = 16, 32, 2
X = torch.randn(2, 5, H, generator=torch.Generator().manual_seed(0))

Make = Callable[[], nn.Module]


class Written(nn.Module):
    """A model of these parts, whose forward is `function(model, x)`."""

    def __init__(self, function: Callable[..., Any], **parts: Any):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def written(function: Callable[..., Any], **parts: Callable[[], Any]) -> Make:
    """Makes such a model; each part is made by a function of its own."""
    return lambda: Written(function, **{name: make() for name, make in parts.items()})


def linear(width: int = H, outs: int = H, bias: bool = True) -> Make:
    return lambda: nn.Linear(width, outs, bias=bias)


def sequential(*makes: Make) -> Make:
    return lambda: nn.Sequential(*(make() for make in makes))


def fused(make: Make, x: Tensor = X, **options: Any) -> Report:
    """The report of a conversion that changes no output, no gradient and no state."""
    model = seeded(make)
    converted = te_transform.convert(model, x, **options)
    expected, actual = (observed(m, with_input_gradient, x) for m in (model, converted))
    assert "error" not in expected
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_same(name, actual[name], value)
    return te_transform.report(converted)


def sites(make: Make, x: Tensor = X, **options: Any) -> Report:
    """Return the fused and the refused sites of an inspection."""
    return te_transform.inspect(seeded(make), x, **options)


def assert_refused(report: Report, rule: str, sentence: str) -> None:
    """The rule has taken nothing anywhere, and says so in this sentence."""
    report.expect(**{rule: 0})
    assert sentence in reasons(report, rule)


def reasons(report: Report, rule: str) -> set[str]:
    """All reasons that the rule was refused for, anywhere."""
    return {reason for site in report.refused if site.rule == rule for reason in site.reasons}
