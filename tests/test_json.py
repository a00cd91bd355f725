"""The JSON of reports, verifications and profiles: its fields are pinned by a number, and documented."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import te_transform
from te_transform.command_line.main import main
from te_transform.profile.result import RankTime
from te_transform.report.as_json import SCHEMA, as_json

PAGE = (Path(__file__).parent.parent / "docs/json.md").read_text(encoding="utf-8")
REPORT = "model inputs options fused sites notes precision memory times chosen"
VERIFICATION = "model verified failed guilty skipped dead notes"
SITE, TIMES = "rule path status reasons", "seconds profiled cost"
# By number. Users read these fields: change them under a new number only, and leave the old numbers here.
FIELDS = {
    1: {
        "report": f"schema {REPORT}",
        "report.sites": f"{SITE} weights seconds fused_seconds kept precision deviations inactive",
        "report.sites.deviations": "name converted original allowed",
        "report.memory": "inputs weights gradients kept peak classes",
        "report.times": "name seconds why",
        "verification": f"schema {VERIFICATION}",
        "verify": f"schema {REPORT} verified failed guilty skipped dead",
        "profile": f"schema model device mode inputs {TIMES} parts classes findings sites ranks notes",
        "profile.parts": "path kind count seconds backward classes rule",
        "profile.findings": "what where count evidence advice seconds gain basis",
        "profile.sites": f"{SITE} count seconds",
        "profile.ranks": "rank seconds exposed",
    }
}  # fmt: skip
FIELDS[2] = FIELDS[1] | {"profile.sites": f"{SITE} count seconds inactive"}
X = torch.ones(2, 4, 8)


class Attention(nn.Module):
    """Attention that is written out, so that a profile finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.up = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(self.norm(x))
        return self.up(torch.softmax(q @ q.transpose(-2, -1), -1) @ q)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Attention(), nn.Linear(16, 8))


@pytest.fixture
def outputs(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The JSON of each kind, with at least one element in each list."""
    original = model()
    converted = te_transform.convert(original, X)
    profile = te_transform.profile(original, X)
    profile = replace(profile, ranks=(RankTime(0, 1.0, 0.0),))
    planned = te_transform.inspect(original, X, backend="te", compile="auto")
    report = replace(te_transform.report(converted), memory=planned.memory, timings=planned.timings)
    assert main(["verify", f"{__name__}:model", "--input", "2x4x8", "--json"]) == 0
    told = {
        "report": report.to_json(),
        "verification": te_transform.verify(original, converted, X).to_json(),
        "verify": capsys.readouterr().out,
        "profile": profile.to_json(),
    }
    return {name: json.loads(text) for name, text in told.items()}


def fields(name: str, told: Any) -> Iterator[tuple[str, str]]:
    """Yield the path of each dict that is documented by its fields, with these fields."""
    known = FIELDS[SCHEMA]
    if isinstance(told, list):
        yield from (pair for each in told for pair in fields(name, each))
    elif isinstance(told, dict) and name in known:
        yield name, " ".join(told)
        for field, value in told.items():
            yield from fields(f"{name}.{field}", value)


def test_the_fields_of_the_schema_are_pinned(outputs: dict[str, Any]) -> None:
    found = dict(pair for name, told in outputs.items() for pair in fields(name, told))
    assert {told["schema"] for told in outputs.values()} == {SCHEMA}
    assert {name: sorted(names.split()) for name, names in found.items()} == {
        name: sorted(names.split()) for name, names in FIELDS[SCHEMA].items()
    }


def test_the_fields_are_documented() -> None:
    assert f"`schema` is {SCHEMA} in all" in PAGE
    cells = re.findall(r"^\| (`[^|]*) \|", PAGE, re.M)
    documented = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert {name for names in FIELDS[SCHEMA].values() for name in names.split()} - {"schema"} <= documented


def test_numbers_that_are_not_finite_are_null() -> None:
    told = json.loads(as_json({"errors": [float("nan"), 1.0, {"largest": float("inf")}]}))
    assert told["errors"] == [None, 1.0, {"largest": None}]
