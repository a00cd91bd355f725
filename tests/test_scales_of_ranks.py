"""Delayed scaling in several processes, and in a run that is resumed, on the stand-in for TE."""

import math
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import te_transform
from te_transform.backends import limits
from te_transform.backends.fp8 import precision, scale_table
from tests import ranks

pytestmark = pytest.mark.usefixtures("at_any_size")

KERNELS = 6  # a joined product, one by itself and an MLP in each block; the head is not in FP8
PRODUCTS = KERNELS + 2  # an MLP has two


def check_scales(one: dict[str, Any], other: dict[str, Any], names: tuple[str, ...]) -> None:
    """Each step of two processes quantized by the same scales."""
    for name in names:
        (steps, saved, _), (its_steps, its_saved, _) = one[name], other[name]
        assert [len(step) for step in steps] == [0, KERNELS, 2 * KERNELS, 2 * KERNELS], name
        assert steps == its_steps
        torch.testing.assert_close(saved, its_saved, rtol=0, atol=0)


@pytest.mark.xdist_group("distributed")
def test_two_processes_agree_on_scales(tmp_path: Path) -> None:
    one, other = ranks.spawn(ranks.scales_of, 2, tmp_path, (ranks.ddp, ranks.sharded))
    check_scales(one, other, ("ddp", "sharded"))


@pytest.mark.integration
@pytest.mark.xdist_group("distributed")
@pytest.mark.parametrize("compiles", [False, True])
def test_four_processes_agree_on_scales(compiles: bool, tmp_path: Path) -> None:
    wraps = ranks.ddp, ranks.sharded, ranks.sharded_whole, ranks.hybrid
    first, *others = ranks.spawn(ranks.scales_of, 4, tmp_path, (*wraps, ranks.alone), compiles)
    for other in others:
        check_scales(first, other, tuple(wrap.__name__ for wrap in wraps))
        # a model in no wrapper is nobody else's, and its scales are those of what it saw itself
        assert first["alone"][0] == other["alone"][0] == []
        scales = [rank["alone"][1]["blocks.0.q.weight"]["scale"] for rank in (first, other)]
        assert not torch.equal(*scales)
    assert [notes for _, _, notes in first.values()] == [[]] * (len(wraps) + 1)


def scales_after_uneven_steps() -> list[dict[str, list[float]]]:
    """Return the scales of three steps. Earlier calls of rank 1 were too small for FP8."""
    ranks.install_stand_in()
    model = ranks.ddp(ranks.in_fp8())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ignore_size_limits = limits.ignore_size_limits.entered
    limits.ignore_size_limits.entered = 0 if dist.get_rank() == 1 else ignore_size_limits
    ranks.train(model, range(3), optimizer)
    limits.ignore_size_limits.entered = ignore_size_limits
    with pytest.MonkeyPatch.context() as patch:
        return ranks.scales_before(lambda: ranks.train(model, range(3, 7), optimizer), patch)


@pytest.mark.integration
@pytest.mark.xdist_group("distributed")
def test_processes_agree_that_have_run_other_products(tmp_path: Path) -> None:
    """None waits for numbers that another does not have; what both have is the same."""
    one, other = ranks.spawn(scales_after_uneven_steps, 2, tmp_path)
    assert [len(step) for step in one] == [2 * KERNELS] * 4
    assert [len(step) for step in other] == [0, KERNELS, 2 * KERNELS, 2 * KERNELS]
    assert one[2:] == other[2:]


def begun_on_meta() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model without numbers, which was converted on meta."""
    model = ranks.net().to("meta")
    options = {"backend": "te", "recipe": "fp8-delayed", "inplace": True}
    model = ranks.sharded(te_transform.convert(model, ranks.inputs(0).to("meta"), **options))
    model.to_empty(device="cpu")
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "scales": te_transform.scaling_state(model)}


def loaded(folder: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = begun_on_meta()
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    te_transform.load_scaling_state(model, state["scales"])
    return model, optimizer


def saved_in_the_middle(folder: Path) -> tuple[list[float], list[float], dict[str, Any]]:
    """The losses after a checkpoint, those of a model that began with it, and its scales."""
    ranks.install_stand_in()
    model = ranks.sharded(ranks.in_fp8())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ranks.train(model, range(3), optimizer)
    state = state_of(model, optimizer)
    dcp.save(state, checkpoint_id=folder)
    expected = ranks.train(model, range(3, 7), optimizer)
    model, optimizer = loaded(folder)
    return expected, ranks.train(model, range(3, 7), optimizer), state["scales"]


def loaded_scales(folder: Path) -> tuple[dict[str, Any], list[float]]:
    ranks.install_stand_in()
    model, optimizer = loaded(folder)
    return te_transform.scaling_state(model), ranks.train(model, range(3, 5), optimizer)


@pytest.mark.integration
@pytest.mark.xdist_group("distributed")
def test_a_checkpoint_of_shards_has_the_scales(tmp_path: Path) -> None:
    """Bitwise, into a model that begins on meta; and in any number of processes."""
    for folder in ("checkpoint", "two", "four"):
        (tmp_path / folder).mkdir()
    found = ranks.spawn(saved_in_the_middle, 2, tmp_path / "two", tmp_path / "checkpoint")
    for expected, actual, scales in found:
        assert actual == expected
        for name in ("blocks.0.q.weight", "blocks.1.o.weight", "blocks.1.mlp.2.weight"):
            assert scales[name]["scale"][[0, 1, 3]].isfinite().all()
    for scales, losses in ranks.spawn(loaded_scales, 4, tmp_path / "four", tmp_path / "checkpoint"):
        torch.testing.assert_close(scales, found[0][2], rtol=0, atol=0)
        assert all(map(math.isfinite, losses))


def train_on_one_batch(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Train on batches of eight rows, which the ranks divide, and return the losses of whole batches."""
    losses = []
    for step in steps:
        rows = torch.cat([ranks.inputs(step, rank) for rank in range(4)])
        loss = model(rows.chunk(dist.get_world_size())[dist.get_rank()])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach().clone(), dist.ReduceOp.SUM)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def saved_on_four(folder: Path) -> list[float]:
    ranks.install_stand_in()
    model = ranks.sharded(ranks.in_fp8())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train_on_one_batch(model, optimizer, range(4))
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    return train_on_one_batch(model, optimizer, range(4, 10))


def resumed_on_eight(folder: Path) -> list[float]:
    ranks.install_stand_in()
    return train_on_one_batch(*loaded(folder), range(4, 10))


@pytest.mark.integration
@pytest.mark.xdist_group("distributed")
def test_the_losses_of_four_ranks_continue_on_eight(tmp_path: Path) -> None:
    """Gradients of other ranks are added in another order, in bf16."""
    for folder in ("checkpoint", "four", "eight"):
        (tmp_path / folder).mkdir()
    expected, *_ = ranks.spawn(saved_on_four, 4, tmp_path / "four", tmp_path / "checkpoint")
    for losses in ranks.spawn(resumed_on_eight, 8, tmp_path / "eight", tmp_path / "checkpoint"):
        assert losses == pytest.approx(expected, rel=1e-3)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = model(ranks.inputs(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def begun(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = ranks.in_fp8(**options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("stop", [2, *(pytest.param(n, marks=pytest.mark.integration) for n in (0, 1, 4))])
@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current"])
def test_a_resumed_run_goes_on_with_the_same_losses(recipe: str, stop: int, te: ModuleType) -> None:
    """Bitwise: before there are scales, when there are those of one step, and later."""
    expected = trained(*begun(recipe=recipe), range(8))
    model, optimizer = begun(recipe=recipe)
    losses = trained(model, optimizer, range(stop))
    saved = model.state_dict(), optimizer.state_dict(), te_transform.scaling_state(model)
    model, optimizer = begun(recipe=recipe)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    te_transform.load_scaling_state(model, saved[2])
    assert losses + trained(model, optimizer, range(stop, 8)) == expected


def test_a_run_resumed_without_scales_has_other_scales(te: ModuleType) -> None:
    expected = trained(*begun(), range(8))
    model, optimizer = begun()
    trained(model, optimizer, range(4))
    saved = model.state_dict(), optimizer.state_dict()
    model, optimizer = begun()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert trained(model, optimizer, range(4, 8)) != expected[4:]


def test_scales_are_loaded_into_a_model_that_has_run(te: ModuleType) -> None:
    model, optimizer = begun()
    trained(model, optimizer, range(3))
    saved = te_transform.scaling_state(model)
    trained(model, optimizer, range(3, 5))
    assert not torch.equal(
        *(s["blocks.0.q.weight"]["scale"] for s in (saved, te_transform.scaling_state(model)))
    )
    te_transform.load_scaling_state(model, saved)
    torch.testing.assert_close(te_transform.scaling_state(model), saved, rtol=0, atol=0)
    trained(model, optimizer, range(5, 6))


def test_scaling_state_has_all_names_before_the_first_call(te: ModuleType) -> None:
    """torch.distributed.checkpoint loads into existing tensors."""
    model, optimizer = begun()
    before = {name: sorted(row) for name, row in te_transform.scaling_state(model).items()}
    trained(model, optimizer, range(3))
    assert {name: sorted(row) for name, row in te_transform.scaling_state(model).items()} == before
    assert "blocks.0.mlp.0.weight" in before
    assert "head.weight" not in before


def test_the_layout_of_shared_scales_is_made_once(te: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else runs: the head, which is not in FP8, and a product that is not trained."""
    monkeypatch.setattr(precision, "groups_of", lambda model: (None,))
    monkeypatch.setattr(precision, "maximum", lambda numbers, groups: None)
    made, layout = [], scale_table.RankTable
    monkeypatch.setattr(scale_table, "RankTable", lambda *given: made.append(layout(*given)) or made[-1])
    model, optimizer = begun()
    for part in (model.blocks[0].q, model.blocks[0].k, model.blocks[0].norm):
        part.requires_grad_(False)
    trained(model, optimizer, range(2))
    before = len(made)
    trained(model, optimizer, range(2, 5))
    assert len(made) == before + 1
    assert len(made[-1].scales) == 2 * PRODUCTS - 1
    assert not made[-1].amaxes


def test_parameters_that_are_put_in_later_have_their_scales_saved(te: ModuleType) -> None:
    """The parameters are joined behind others, or they are the second ones of MLPs."""
    model, optimizer = begun()
    trained(model, optimizer, range(3))
    for layer in (model.blocks[0].k, model.blocks[0].mlp[2]):
        layer.weight = nn.Parameter(layer.weight.detach().clone())
    trained(model, optimizer, range(3, 5))
    found = {name for name, row in te_transform.scaling_state(model).items() if row["scale"].isfinite().all()}
    assert {"blocks.0.q.weight", "blocks.0.mlp.2.weight"} <= found


def test_names_are_those_without_wrappers(te: ModuleType) -> None:
    model, optimizer = begun()
    trained(model, optimizer, range(3))
    saved = te_transform.scaling_state(model)
    for name, block in model.blocks.named_children():
        model.blocks.register_module(name, checkpoint_wrapper(block))
    torch.testing.assert_close(te_transform.scaling_state(model), saved, rtol=0, atol=0)
    trained(model, optimizer, range(3, 4))
    te_transform.load_scaling_state(model, saved)
    assert te_transform.scaling_state(model).keys() == saved.keys()


def test_no_scales_without_delayed_scaling(te: ModuleType) -> None:
    model, _ = begun(recipe="fp8-current")
    assert te_transform.scaling_state(nn.Sequential(model)) == {}
    te_transform.load_scaling_state(model, {})


def test_scales_of_another_model_are_refused(te: ModuleType) -> None:
    model, _ = begun()
    saved = te_transform.scaling_state(model)
    wrong = {**saved, "blocks.0.o.weight": {"scale": torch.ones(3)}}
    with pytest.raises(
        te_transform.PrecisionError, match=r"for the scales of blocks.0.o.weight, got {'scale': \[3\]}; "
    ):
        te_transform.load_scaling_state(model, wrong)
    with pytest.raises(
        te_transform.PrecisionError, match=r"expected none for the scales of other.weight, got .*;"
    ):
        te_transform.load_scaling_state(model, {**saved, "other.weight": saved["blocks.0.o.weight"]})
    for none in (None, [saved]):
        wanted = r"expected a dict of dicts of tensors for the scales, got a \w+; "
        with pytest.raises(te_transform.PrecisionError, match=wanted):
            te_transform.load_scaling_state(model, none)
    with pytest.raises(
        te_transform.PrecisionError,
        match=r"expected a dict of tensors for the scales of blocks\.0\.o\.weight, got a float",
    ):
        te_transform.load_scaling_state(model, {**saved, "blocks.0.o.weight": 3.0})
    with pytest.raises(te_transform.PrecisionError, match=r"o\.weight, got {'scale': 'int'}; load"):
        te_transform.load_scaling_state(model, {**saved, "blocks.0.o.weight": {"scale": 3}})
    del saved["blocks.0.o.weight"]
    with pytest.raises(te_transform.PrecisionError, match=r"for the scales of blocks.0.o.weight, got none; "):
        te_transform.load_scaling_state(model, saved)
    with pytest.raises(
        te_transform.ModelError, match=r"expected a converted model for .*, got a Linear without"
    ):
        te_transform.scaling_state(nn.Linear(2, 2))


def test_ranks_are_checked_in_a_process_group(te: ModuleType) -> None:
    model, _ = begun()
    with pytest.raises(te_transform.RanksError, match="expected a process group, got none; call torch"):
        te_transform.check_ranks(model)
    with pytest.raises(te_transform.RanksError, match="expected a DeviceMesh for mesh, got a str"):
        te_transform.check_ranks(model, "tp")
    with pytest.raises(te_transform.ModelError, match="got a Net without report"):
        te_transform.check_ranks(ranks.net())


def test_ranks_with_other_models_are_named(
    te: ModuleType, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = begun()
    module = import_module("te_transform.check_ranks")
    monkeypatch.setattr(module, "gathered", lambda own, group: [own, own, own | {"the recipe": "none"}])
    said = r"rank 2 has the recipe none, rank 0 has fp8-delayed \(\w+\): convert the same model"
    with pytest.raises(te_transform.RanksError, match=said):
        te_transform.check_ranks(model)
