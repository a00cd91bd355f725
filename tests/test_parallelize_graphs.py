"""Divided models as CUDA graphs: ranks record together, and what they exchange is replayed.

recordings.py emulates CUDA graphs; tests/gpu runs them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import te_transform
from te_transform.execution.executors import cuda_graph
from tests import compilers, recordings
from tests.divided import ALL, loss_of, sample_of
from tests.ranks import install_stand_in, mesh, spawn
from tests.recordings import Recording
from tests.zoo import zero_dropout

pytestmark = [
    pytest.mark.integration,
    pytest.mark.xdist_group("distributed"),
    pytest.mark.usefixtures("at_any_size"),
]

CALLS = 5


def divided(
    name: str, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[nn.Module, dict[str, Tensor]]:
    sample = sample_of(ALL[name], dtype)
    torch.manual_seed(0)
    model = zero_dropout(ALL[name].build()).to(dtype)
    model = te_transform.convert(model, sample, verify=False, **options)
    return te_transform.parallelize(model, mesh(), sample, sequence_parallel=True), sample


def gradients(model: nn.Module, sample: dict[str, Tensor]) -> dict[str, Tensor]:
    """The loss, and this rank's part of each gradient. Gathered from the ranks, a gradient would be held by
    gloo's threads for a while after that, and the next call not be replayed."""
    loss = loss_of(model(**sample))
    loss.backward()
    parts = {name: p.grad.to_local().clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"the loss": loss.detach().clone(), **parts}


def distance(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    return max(((found[name] - grad).norm() / (grad.norm() + 1e-9)).item() for name, grad in exact.items())


def notes(model: nn.Module) -> list[str]:
    return [note for note in te_transform.report(model).notes if "without CUDA graphs" in note]


def trained(name: str, recipe: str | None = None, compiles: bool = False) -> dict[str, Any]:
    """Return the distance of each call from the same model without recordings. Weights change in between."""
    install_stand_in()
    compilers.install()
    recorder = recordings.install()
    options = {"backend": "te", "recipe": recipe} if recipe else {"backend": "torch"}
    dtype = torch.bfloat16 if recipe else torch.float32
    models = [divided(name, dtype, compile=compiles, graphs=True, **options) for _ in range(2)]
    off, counts = [], []
    for _ in range(CALLS):
        found = []
        for warm_ups, (model, sample) in zip((2 * CALLS, 2), models, strict=True):
            cuda_graph.WARM_UPS = warm_ups
            found.append(gradients(model, sample))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad
            model.zero_grad()
        off.append(distance(*found[::-1]))
        counts.append(dict(recorder))
    return {"off": off, "counts": counts, "notes": notes(models[1][0])}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("compiles", [False, True])
def test_trains_as_without(name: str, compiles: bool, tmp_path: Path) -> None:
    for found in spawn(partial(trained, name, compiles=compiles), 2, tmp_path):
        assert found["notes"] == []
        # three calls, and the check of what was recorded: twice where logits that the loss is computed from
        # were taken for another output with a gradient
        assert found["counts"][-1]["backward"] == CALLS - 1
        assert found["counts"][-1]["recorded"] in (1, 2)
        assert max(found["off"]) < 1e-4


@pytest.mark.parametrize("compiles", [False, True])
def test_trains_in_fp8_as_without(compiles: bool, tmp_path: Path) -> None:
    for found in spawn(partial(trained, "llama", "fp8-delayed", compiles), 2, tmp_path):
        assert found["notes"] == []
        assert found["counts"][-1] == {"recorded": 1, "forward": CALLS - 2, "backward": CALLS - 2}
        assert max(found["off"]) < 1e-4


def without_agreement() -> dict[str, Any]:
    """One of the ranks cannot record: the other does not either, and both go on."""
    recorder = recordings.install()
    if dist.get_rank() == 1:
        recorder.record = partial(Failing, recorder)
    model, sample = divided("llama", graphs=True)
    found = [gradients(model, sample) for _ in range(CALLS) if model.zero_grad() is None]
    return {"off": distance(found[-1], found[0]), "counts": dict(recorder), "notes": notes(model)}


class Failing(Recording):
    """Fails when all is recorded: what is emulated exchanges numbers meanwhile, as no recording does."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        raise RuntimeError("out of memory")


def test_ranks_agree_on_what_is_recorded(tmp_path: Path) -> None:
    first, second = spawn(without_agreement, 2, tmp_path)
    assert first["off"] == second["off"] == 0
    assert first["counts"] == {"recorded": 1}
    assert first["notes"] == ["a graph runs without CUDA graphs: another rank cannot"]
    assert second["notes"] == ["a graph runs without CUDA graphs: RuntimeError: out of memory"]


def sharded_too() -> list[str]:
    recorder = recordings.install()
    model, sample = divided("llama", graphs=True)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh())
    for _ in range(CALLS):
        gradients(model, sample)
        model.zero_grad()
    assert not recorder
    return notes(model)


def test_shards_of_shards_run_without(tmp_path: Path) -> None:
    for found in spawn(sharded_too, 1, tmp_path):
        assert len(found) == 1
        assert "fully_shard() gathers" in found[0]


def accumulated() -> dict[str, Any]:
    """How far gradients are that four batches are added to, once calls are replayed, and whether those of an
    evaluation in between are in the way."""
    recorder = recordings.install()
    found = []
    for warm_ups in (100, 2):
        cuda_graph.WARM_UPS = warm_ups
        model, sample = divided("llama", graphs=True)
        for _ in range(4):
            gradients(model, sample)
            model.zero_grad()
        for number in range(4):
            ids = (sample["input_ids"] + number) % 90
            batch = sample | {"input_ids": ids, "labels": ids}
            last = gradients(model, batch)
            with torch.no_grad():
                model.eval()(**batch)
            model.train()
        found.append(last)
    return {"off": distance(*found[::-1]), "counts": dict(recorder), "notes": notes(model)}


def test_gradients_of_shards_are_accumulated(tmp_path: Path) -> None:
    for found in spawn(accumulated, 2, tmp_path):
        assert found["notes"] == []
        assert found["counts"]["recorded"] == 2  # in training and in evaluation
        assert found["counts"]["backward"] == 7  # the check, two of the first four, and all that are added up
        assert found["off"] < 1e-5


def held_on_one_rank() -> dict[str, Any]:
    """One rank's gradients are somebody's, who may not see them change."""
    recorder = recordings.install()
    model, sample = divided("llama", graphs=True)
    parameter, kept = model.model.layers[0].mlp.down_proj.weight, []
    for _ in range(CALLS):
        last = gradients(model, sample)
        if dist.get_rank() == 1:
            kept.append(parameter.grad.to_local().detach())
        model.zero_grad()
    off = max([(grad - last["model.layers.0.mlp.down_proj.weight"]).norm() for grad in kept], default=0)
    return {"off": float(off), "counts": dict(recorder), "notes": notes(model)}


def test_a_rank_whose_gradients_are_kept_keeps_up(tmp_path: Path) -> None:
    first, second = spawn(held_on_one_rank, 2, tmp_path)
    assert first["counts"]["forward"] > second["counts"]["forward"]
    assert first["counts"]["recorded"] == second["counts"]["recorded"] == 1
    assert second["off"] < 1e-5
    assert first["notes"] == second["notes"] == []


def moved_on_one_rank() -> dict[str, Any]:
    """One rank's parameters are laid elsewhere: it calls the function, the other goes on replaying."""
    recorder = recordings.install()
    model, sample = divided("llama", graphs=True)
    found = []
    for number in range(CALLS):
        if number == CALLS - 1 and dist.get_rank() == 1:
            local = model.model.layers[0].mlp.down_proj.weight._local_tensor
            local.data = local.data.clone()
        found.append(gradients(model, sample))
        model.zero_grad()
    return {"off": distance(found[-1], found[0]), "counts": dict(recorder), "notes": notes(model)}


def test_a_rank_whose_parameters_moved_keeps_up(tmp_path: Path) -> None:
    first, second = spawn(moved_on_one_rank, 2, tmp_path)
    assert first["off"] < 1e-5
    assert second["off"] < 1e-5
    assert first["counts"]["forward"] == second["counts"]["forward"] + 1
    assert first["notes"] == []
    assert len(second["notes"]) == 1


def ended() -> dict[str, Any]:
    """Return what is freed when another group ends, and when the group of a divided model ends."""
    recorder = recordings.install()
    group, other = (dist.new_group([0, 1]) for _ in range(2))
    sample = sample_of(ALL["llama"], torch.float32)
    model = te_transform.convert(ALL["llama"].build(), sample, backend="torch", verify=False, graphs=True)
    model = te_transform.parallelize(model, DeviceMesh.from_group(group, "cpu"), sample)
    for _ in range(CALLS):
        kept = loss_of(model(**sample))
        kept.backward()
        model.zero_grad()
    freed = []
    for each in (other, group):
        dist.destroy_process_group(each)
        freed.append(recorder["freed"])
    return {"freed": freed, "recorded": recorder["recorded"], "loss": kept.item()}


def test_recordings_are_freed_before_their_group_ends(tmp_path: Path) -> None:
    for found in spawn(ended, 2, tmp_path):
        assert found["freed"] == [0, found["recorded"]] == [0, 1]
