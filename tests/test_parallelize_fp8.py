"""Tensor parallelism in FP8, on the stand-in for Transformer Engine: ranks quantize what they have in common
by the same scales, and train as one does."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import te_transform
from tests.divided import FP8_CASES, errors, gradients, original_for_fp8, sample_of
from tests.ranks import install_stand_in, mesh, scales_before, spawn
from tests.stand_in import Base
from tests.zoo import Case

pytestmark = pytest.mark.usefixtures("at_any_size")

distributed = [pytest.mark.integration, pytest.mark.xdist_group("distributed")]

# sizes of which each of four ranks has a multiple of 16; q, k and v apart, and as one weight that is stored
# transposed
PRODUCTS = {"llama": 4, "gpt2": 3}  # norms are fused with them where tokens are not sharded; without the head


TWO = {"llama": {"num_hidden_layers": 2}, "gpt2": {"n_layer": 2}}  # blocks, to be captured one by one


def converted(name: str, *, sizes: dict[str, int] | None = None, **options: Any) -> nn.Module:
    options = {"backend": "te", "recipe": "fp8-delayed", "verify": False, **options}
    return te_transform.convert(
        original_for_fp8(name, **(sizes or {})), sample_of(FP8_CASES[name]), **options
    )


def divided(name: str, *, sizes: dict[str, int] | None = None, **options: Any) -> nn.Module:
    model = converted(name, sizes=sizes)
    return te_transform.parallelize(model, mesh(), sample_of(FP8_CASES[name]), **options)


def batch(case: Case, step: int) -> dict[str, Any]:
    ids = case.sample(batch=2, seq=12, seed=step)["input_ids"]
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def train(model: nn.Module, case: Case, steps: range = range(4)) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in steps:
        loss = model(**batch(case, step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def first_step(model: nn.Module, case: Case) -> nn.Module:
    """Run the step from which delayed scaling takes its first scales."""
    gradients(model, sample_of(case))
    model.zero_grad()
    return model


def compared(name: str, recipe: str, sequence_parallel: bool) -> dict[str, Any]:
    """A model that is divided after its first step beside the one that is not, and beside the original in
    fp64."""
    install_stand_in()
    case = FP8_CASES[name]
    sample = sample_of(case)
    wide = original_for_fp8(name).double()
    whole, model = (first_step(converted(name, recipe=recipe), case) for _ in range(2))
    before = te_transform.scaling_state(model)
    te_transform.parallelize(model, mesh(), sample, sequence_parallel=sequence_parallel)
    found: dict[str, Any] = {"before": before, "kept": te_transform.scaling_state(model)}
    exact = gradients(wide, sample)
    found["whole"], found["divided"] = (errors(gradients(m, sample), exact) for m in (whole, model))
    for trained in (wide, whole, model):
        trained.zero_grad()
    found["losses"] = [train(trained, case) for trained in (wide, whole)]
    with pytest.MonkeyPatch.context() as patch:
        found["steps"] = scales_before(lambda: found["losses"].append(train(model, case)), patch)
    found["after"] = te_transform.scaling_state(model)
    return found


def check(results: list[dict[str, Any]]) -> None:
    """The scales that were found before the model was divided go on. Gradients are no further from the exact
    ones than one and a half times what the whole model's are, losses no further from the whole model's than
    three times what these are from the exact ones: both models round, each otherwise."""
    first = results[0]
    for found in results:
        equal_rows(found["kept"], first["before"])
        assert max(found["divided"].values()) <= 1.5 * max(found["whole"].values())
        exact, whole, model = (torch.tensor(losses).double() for losses in found["losses"])
        assert (model - whole).norm() <= 3 * (whole - exact).norm()
        assert found["losses"] == first["losses"]
        assert found["steps"] == first["steps"]
        equal_rows(found["after"], first["after"])


def equal_rows(found: dict[str, dict[str, Tensor]], expected: dict[str, dict[str, Tensor]]) -> None:
    assert found.keys() == expected.keys()
    for name, row in expected.items():
        assert found[name].keys() == row.keys()
        other = {
            key: (found[name][key], row[key]) for key in row if not torch.equal(found[name][key], row[key])
        }
        assert not other, name


def cases(recipe: str) -> dict[str, dict[str, Any]]:
    return {
        "llama": compared("llama", recipe, sequence_parallel=True),
        "gpt2": compared("gpt2", recipe, sequence_parallel=False),
    }


class TestParity:
    pytestmark = distributed

    @pytest.mark.parametrize("ranks", [2, 4])
    @pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current"])
    def test_trains_as_one_rank_does(self, ranks: int, recipe: str, tmp_path: Path) -> None:
        results = spawn(partial(cases, recipe), ranks, tmp_path)
        for name, products in PRODUCTS.items():
            check([found[name] for found in results])
            steps = [len(step) for step in results[0][name]["steps"]]
            assert steps == ([2 * products] * 4 if recipe == "fp8-delayed" else [])


def saved(folder: Path) -> dict[str, dict[str, Tensor]]:
    install_stand_in()
    model = divided("llama")
    train(model, FP8_CASES["llama"], range(3))
    scales = te_transform.scaling_state(model)
    dcp.save({"model": model.state_dict(), "scales": scales}, checkpoint_id=folder)
    return scales


def loaded(folder: Path, on_ranks: bool) -> tuple[dict[str, dict[str, Tensor]], list[float]]:
    """The scales of a model that goes on from a checkpoint, and its next losses."""
    install_stand_in()
    model = divided("llama") if on_ranks else converted("llama")
    state = {"model": model.state_dict(), "scales": te_transform.scaling_state(model)}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    te_transform.load_scaling_state(model, state["scales"])
    return te_transform.scaling_state(model), train(model, FP8_CASES["llama"], range(3, 5))


class TestCheckpoints:
    pytestmark = distributed

    def test_scales_go_on_on_other_numbers_of_ranks(self, tmp_path: Path) -> None:
        for folder in ("checkpoint", "two", "four", "one"):
            (tmp_path / folder).mkdir()
        scales, _ = spawn(partial(saved, tmp_path / "checkpoint"), 2, tmp_path / "two")
        assert scales["model.layers.0.mlp.down_proj.weight"]["scale"][[0, 1, 3]].isfinite().all()
        found = [
            *spawn(partial(loaded, tmp_path / "checkpoint", on_ranks=True), 4, tmp_path / "four"),
            *spawn(partial(loaded, tmp_path / "checkpoint", on_ranks=False), 1, tmp_path / "one"),
        ]
        for begun_with, losses in found:
            equal_rows(begun_with, scales)
            assert losses == pytest.approx(found[0][1], rel=0.01)  # sums over other shards round otherwise


def in_other_ways() -> dict[str, Any]:
    """Return the results of calls other than training steps."""
    install_stand_in()
    case, found = FP8_CASES["gpt2"], {}
    sample, one = sample_of(case), {"input_ids": batch(case, 7)["input_ids"][:1]}
    model = first_step(divided("gpt2", sizes=TWO["gpt2"], sequence_parallel=True), case)
    with torch.no_grad():
        first = model.eval()(**one).logits
        made = Base.quantized
        again = model(**one).logits
        found["kept"] = Base.quantized == made and torch.equal(first, again)
        model.transformer.h[0].mlp.c_proj.weight.mul_(2)
        other = model(**one).logits
        again = Base.quantized - made  # the weights of the product, or of the MLP
        found["made again"] = again in (1, 2) and not torch.equal(first, other)
        model.transformer.h[0].mlp.c_proj.weight.mul_(0.5)
        found["as before"] = torch.equal(model(**one).logits, first)
    exact = gradients(original_for_fp8("gpt2", **TWO["gpt2"]).double(), sample)
    worst = max(errors(gradients(model.train(), sample), exact).values())

    def off() -> float:
        """Return the largest error of gradients, relative to that of a usual step."""
        return max(errors(gradients(model, sample), exact).values()) / worst

    model.zero_grad()
    frozen = model.transformer.h[0].mlp.c_fc.weight.requires_grad_(False)
    hidden = exact.pop("transformer.h.0.mlp.c_fc.weight")
    found["frozen"] = off() < 1.5 and frozen.grad is None
    frozen.requires_grad_(True)
    exact["transformer.h.0.mlp.c_fc.weight"] = hidden
    model.zero_grad()
    losses = [model(**sample).loss for _ in range(2)]
    for loss in losses:
        (loss / 2).backward()
    grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()} | {"the loss": losses[1]}
    found["two forwards"] = max(errors(grads, exact).values()) / worst < 1.5
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found["checkpointed"] = off() < 1.5
    found["scales"] = te_transform.scaling_state(model)
    return found


class TestOtherCalls:
    pytestmark = distributed

    def test_are_in_fp8_too(self, tmp_path: Path) -> None:
        one, other = spawn(in_other_ways, 2, tmp_path)
        equal_rows(one.pop("scales"), other.pop("scales"))
        assert one == other == dict.fromkeys(one, True)


def sharded_twice() -> tuple[list[Any], list[float]]:
    """The scales of each step and the losses of several ranks of data by two of tensors."""
    install_stand_in()
    case = FP8_CASES["llama"]
    both = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    sample = sample_of(case)
    model = converted("llama", sizes=TWO["llama"])
    te_transform.parallelize(model, both["tp"], sample, sequence_parallel=True)
    for layer in model.model.layers:
        fully_shard(layer, mesh=both["dp"])
    fully_shard(model, mesh=both["dp"])
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []

    def steps() -> None:
        for step in range(4):
            loss = model(**batch(case, both["dp"].size() * step + both["dp"].get_local_rank())).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

    with pytest.MonkeyPatch.context() as patch:
        return scales_before(steps, patch), losses


class TestBesideFSDP2:
    pytestmark = distributed

    @pytest.mark.parametrize("ranks", [4, 8])
    def test_all_ranks_agree(self, ranks: int, tmp_path: Path) -> None:
        found = spawn(sharded_twice, ranks, tmp_path)
        assert [len(step) for step in found[0][0]] == [0, 8, 16, 16]
        assert all(steps == found[0][0] for steps, _ in found)
        losses = [losses for _, losses in found]
        assert losses[::2] == losses[1::2]
        assert len(set(map(tuple, losses))) == ranks // 2
