"""1-bit optimizers in transformers' Trainer and accelerate, in one and two processes."""

from typing import Any

import pytest

from tests import onebit_packages
from tests.ranks import spawn

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("distributed")]


@pytest.fixture(scope="module", params=[1, 2])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each rank found."""
    folders = (tmp_path_factory.mktemp(name) for name in ("ranks", "runs"))
    return spawn(onebit_packages.everything, request.param, next(folders), next(folders))


def test_trainer(found: list[dict[str, Any]]) -> None:
    for rank in (each["trainer"] for each in found):
        for name in onebit_packages.OPTIMIZERS:
            run = rank[name]
            assert run["is_ddp"], name
            assert run["frozen"], name
            assert run["steps"] == 10, name
            assert run["decays"] == [0.1, 0.0], name
            assert run["are_equal"], name
            assert run["losses"][-1] < run["losses"][0], name
            assert run["is_resumed"], name


def test_trainer_with_dropped_layers(found: list[dict[str, Any]]) -> None:
    for rank in (each["trainer"]["dropped"] for each in found):
        assert rank["are_equal"]
        assert rank["losses"][-1] < rank["losses"][0]
        assert rank["is_resumed"]


def test_trainer_ends_with_the_best_model(found: list[dict[str, Any]]) -> None:
    assert all(rank["best"] == {"True": True, "False": True} for rank in found)


def test_accelerate(found: list[dict[str, Any]]) -> None:
    for rank in (each["accelerate"] for each in found):
        assert rank["is_ddp"]
        assert rank["are_equal"]
        assert rank["frozen"]
        assert rank["steps"] == 8
        assert sum(rank["losses"][-4:]) < sum(rank["losses"][:4])
