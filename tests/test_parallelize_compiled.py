"""Compiled graphs on shards: the numbers of the uncompiled ones, with each exchange between ranks in them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import te_transform
from tests import compilers
from tests.divided import FP8_CASES, Dropped, gradients, original_for_fp8, sample_of
from tests.ranks import install_stand_in, mesh, spawn

pytestmark = [
    pytest.mark.integration,
    pytest.mark.xdist_group("distributed"),
    pytest.mark.usefixtures("at_any_size"),
]


def compared(by_inductor: bool, recipe: str | None = None) -> dict[str, Any]:
    """Return the distances of loss and gradients of a second call from an uncompiled model."""
    install_stand_in()
    if not by_inductor:
        compilers.install()
    sample, found, notes = sample_of(FP8_CASES["llama"]), [], []
    options = {"backend": "te", "recipe": recipe} if recipe else {"backend": "torch"}
    for compiles in (False, True):
        model = original_for_fp8("llama").to(torch.bfloat16 if recipe else torch.float32)
        model = te_transform.convert(model, sample, verify=False, compile=compiles, **options)
        te_transform.parallelize(model, mesh(), sample, sequence_parallel=True)
        for _ in range(2):
            model.zero_grad()
            last = gradients(model, sample)
        found.append(last)
        notes += [note for note in te_transform.report(model).notes if "uncompiled" in note]
    own, other = found
    off = {name: ((other[name] - own[name]).norm() / own[name].norm()).item() for name in own}
    return {"loss": off.pop("the loss"), "gradients": max(off.values()), "notes": notes}


@pytest.mark.parametrize("by_inductor", [False, True])
def test_compiled_shards_give_the_uncompiled_numbers(by_inductor: bool, tmp_path: Path) -> None:
    for found in spawn(partial(compared, by_inductor), 2, tmp_path):
        assert found["loss"] < 1e-6
        assert found["gradients"] < 1e-5
        assert not found["notes"]


def test_compiled_shards_give_the_uncompiled_numbers_in_fp8(tmp_path: Path) -> None:
    """Operands round differently: E4M3 has four significant bits."""
    for found in spawn(partial(compared, by_inductor=False, recipe="fp8-delayed"), 2, tmp_path):
        assert found["loss"] < 0.005
        assert found["gradients"] < 0.125
        assert not found["notes"]


def dropouts_apart() -> list[str]:
    x = torch.randn(2, 8, 16)
    model = te_transform.convert(Dropped().train(), x, verify=False, compile=True)
    te_transform.parallelize(model, mesh(), x)
    torch.manual_seed(1)
    model(x)[0].sum().backward()
    return [note for note in te_transform.report(model).notes if "uncompiled" in note]


def test_dropouts_of_shards_run_uncompiled(tmp_path: Path) -> None:
    for notes in spawn(dropouts_apart, 2, tmp_path):
        assert notes == ["a graph runs uncompiled: it contains dropouts that differ per rank"]
