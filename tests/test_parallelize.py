"""Tensor and sequence parallelism: one rank, two and four give the same losses and gradients."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import te_transform
from te_transform import ParallelError
from tests.divided import (
    ALL,
    LLAMA_4,
    Dropped,
    check_dropouts,
    dropouts,
    equal,
    errors,
    gradients,
    loss_of,
    sample_of,
    whole,
)
from tests.families import FAMILIES
from tests.packages import BATCHES, convert, original
from tests.ranks import mesh, spawn
from tests.zoo import (
    CASES,
    EXTRA,
    SEQ2SEQ,
    Case,
    hf_case,
    text_to_text,
    zero_dropout,
)

pytestmark = pytest.mark.usefixtures("at_any_size")

distributed = [pytest.mark.integration, pytest.mark.xdist_group("distributed")]

ALL |= {name: FAMILIES[name] for name in ("gpt_oss", "cohere")}
# one head of keys and values, which nothing divides
SKIP = dict.fromkeys(("gemma", "gemma2", "gemma3_text"), ("*self_attn",)) | {"falcon": ("*self_attention",)}
BARE = "torch_mha_bare"  # returns its weights too: nothing of it is divided


def compared(name: str, dtype: torch.dtype, sequence_parallel: bool) -> dict[str, Any]:
    """The errors of the original and of the divided model against the original in fp64."""
    case = ALL[name]
    model, sample = zero_dropout(case.build()).to(dtype).train(), sample_of(case, dtype)
    wide = copy.deepcopy(model).double()
    if case.hf:
        wide.set_experts_implementation("eager")  # PyTorch's grouped products have no fp64
    exact = gradients(wide, sample_of(case, torch.float64))
    original = gradients(copy.deepcopy(model), sample)
    converted = te_transform.convert(model, sample, verify=False)
    skip = SKIP.get(name, ())
    te_transform.parallelize(converted, mesh(), sample, sequence_parallel=sequence_parallel, skip=skip)
    divided = gradients(converted, sample)
    return {
        "original": errors(original, exact),
        "divided": errors(divided, exact),
        "shards": {name for name, p in converted.named_parameters() if isinstance(p.placements[0], Shard)},
        "same": {name: grad.sum().item() for name, grad in divided.items()},
    }


def check(results: list[dict[str, Any]], dtype: torch.dtype) -> None:
    """No error is more than twice the original's own and four ulp: sums over shards round otherwise."""
    ulp = torch.finfo(dtype).eps
    for found in results:
        worst = max(found["original"].values())
        wrong = {n: e for n, e in found["divided"].items() if not e <= 2 * worst + 4 * ulp}
        assert not wrong, f"the original is off by {worst:.2g} at most, here are {wrong}"
        assert found["shards"]
        assert found["same"] == results[0]["same"]  # on each rank


def cases(
    *names: str, dtype: torch.dtype = torch.float32, sequence_parallel: bool = True
) -> dict[str, dict[str, Any]]:
    return {name: compared(name, dtype, sequence_parallel) for name in names}


@pytest.mark.xdist_group("distributed")  # one process that others are forked off for all of these
def test_two_ranks_train_a_gpt(tmp_path: Path) -> None:
    results = spawn(partial(cases, "small"), 2, tmp_path)
    check([found["small"] for found in results], torch.float32)
    assert {"transformer.wte.weight"} <= results[0]["small"]["shards"]  # which the head is tied to


@pytest.mark.xdist_group("distributed")
def test_checkpointed_blocks_run_one_graph_in_forward_and_backward(process_group: None) -> None:
    """In the step after the first, whose forward found the checkpoints, as well."""
    converted = te_transform.parallelize(convert(original()), mesh(), BATCHES[0])
    models = original(), converted
    for model in models:
        model.blocks.register_module("0", checkpoint_wrapper(model.blocks[0]))
    for batch in BATCHES:
        losses = [model(*batch) for model in models]
        for loss in losses:
            loss.backward()
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-12)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(whole(other.grad), one.grad)


DECODERS = ("llama_4", "gpt2", "quickstart")


class TestParity:
    pytestmark = distributed

    @pytest.mark.parametrize("ranks", [1, 2, 4])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("sequence_parallel", [False, True])
    def test_decoders(self, ranks: int, dtype: torch.dtype, sequence_parallel: bool, tmp_path: Path) -> None:
        work = partial(cases, *DECODERS, dtype=dtype, sequence_parallel=sequence_parallel)
        results = spawn(work, ranks, tmp_path)
        for name in DECODERS:
            check([found[name] for found in results], dtype)

    @pytest.mark.parametrize("sequence_parallel", [False, True])
    def test_experts_are_products_by_groups_in_bf16(self, sequence_parallel: bool, tmp_path: Path) -> None:
        work = partial(cases, "mixtral", dtype=torch.bfloat16, sequence_parallel=sequence_parallel)
        check([found["mixtral"] for found in spawn(work, 2, tmp_path)], torch.bfloat16)

    def test_sinks_are_divided_with_the_heads(self, tmp_path: Path) -> None:
        check([found["gpt_oss"] for found in spawn(partial(cases, "gpt_oss"), 2, tmp_path)], torch.float32)

    @pytest.mark.parametrize("sequence_parallel", [False, True])
    def test_attention_and_mlp_may_read_one_norm(self, sequence_parallel: bool, tmp_path: Path) -> None:
        results = spawn(partial(cases, "cohere", sequence_parallel=sequence_parallel), 2, tmp_path)
        check([found["cohere"] for found in results], torch.float32)

    @pytest.mark.parametrize("name", [name for name in {**CASES, **EXTRA} if name != BARE])
    def test_the_test_list(self, name: str, tmp_path: Path) -> None:
        results = spawn(partial(cases, name), 2, tmp_path)
        check([found[name] for found in results], torch.float32)


def trained(name: str, folder: Path) -> dict[str, Tensor]:
    """A step of AdamW on the ranks, whose state is then saved; returns the whole weights."""
    model = divided(ALL[name])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss_of(model(**sample_of(ALL[name]))).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    saved = {"model": model.state_dict(), "steps": optimizer.state_dict()["state"]}
    dcp.save(saved, checkpoint_id=folder)
    return {name: whole(tensor.detach()) for name, tensor in model.state_dict().items()}


def loaded(name: str, folder: Path) -> dict[str, Tensor]:
    """The whole weights of a model of other numbers that has loaded the checkpoint, and its next loss."""
    model = divided(ALL[name])
    state = model.state_dict()
    dcp.load({"model": state}, checkpoint_id=folder)
    model.load_state_dict(state)
    loss = loss_of(model(**sample_of(ALL[name]))).detach()
    return {name: whole(tensor.detach()) for name, tensor in model.state_dict().items()} | {"the loss": loss}


def divided(case: Case, **options: Any) -> nn.Module:
    sample = sample_of(case)
    converted = te_transform.convert(zero_dropout(case.build()).train(), sample, verify=False)
    return te_transform.parallelize(converted, mesh(), sample, **options)


class TestCheckpoints:
    pytestmark = distributed

    @pytest.mark.parametrize("name", ["llama_4", "gpt2"])
    def test_written_on_two_ranks(self, name: str, tmp_path: Path) -> None:
        for folder in ("two", "four", "one", "saved"):
            (tmp_path / folder).mkdir()
        expected, again = spawn(partial(trained, name, tmp_path / "saved"), 2, tmp_path / "two")
        vanilla = zero_dropout(ALL[name].build()).train()
        state = vanilla.state_dict()
        dcp.load({"model": state}, checkpoint_id=tmp_path / "saved", no_dist=True)
        vanilla.load_state_dict(state)
        equal(vanilla.state_dict(), expected)
        equal(again, expected)
        loss = loss_of(vanilla(**sample_of(ALL[name])))
        for ranks, folder in ((4, "four"), (1, "one")):
            for found in spawn(partial(loaded, name, tmp_path / "saved"), ranks, tmp_path / folder):
                assert found.pop("the loss").item() == pytest.approx(loss.item(), rel=1e-6)
                equal(found, expected)


def seeded_apart() -> str:
    torch.manual_seed(dist.get_rank())
    x = torch.randn(2, 8, 16)
    model = te_transform.convert(Dropped().train(), x, verify=False)
    te_transform.parallelize(model, mesh(), x)
    with pytest.raises(ParallelError, match="expected equal random generators"):
        model(x)
    return ""


class TestDropout:
    pytestmark = distributed

    @pytest.mark.parametrize("sequence_parallel", [False, True])
    def test_shards_draw_their_own_numbers(self, sequence_parallel: bool, tmp_path: Path) -> None:
        check_dropouts(*spawn(partial(dropouts, sequence_parallel), 2, tmp_path))

    def test_ranks_with_other_seeds_are_told(self, tmp_path: Path) -> None:
        spawn(seeded_apart, 2, tmp_path)


def sharded_twice() -> dict[str, Any]:
    """Two ranks of data by two of tensors: the gradient of each half of a batch, averaged."""
    from torch.distributed.fsdp import fully_shard

    case = LLAMA_4
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, sample = zero_dropout(case.build()).train(), sample_of(case)
    alone = gradients(copy.deepcopy(model), sample)
    converted = te_transform.convert(model, sample, verify=False)
    te_transform.parallelize(converted, both["tp"], sample, sequence_parallel=True)
    for layer in converted.model.layers:
        fully_shard(layer, mesh=both["dp"])
    fully_shard(converted, mesh=both["dp"])
    half = {
        k: v[both["dp"].get_local_rank() :][:1] if isinstance(v, Tensor) else v for k, v in sample.items()
    }
    found = gradients(converted, half)
    dist.all_reduce(found["the loss"], op=dist.ReduceOp.SUM)
    found["the loss"] /= 4
    placements = {str(p.placements) for p in converted.parameters()}
    optimizer = torch.optim.AdamW(converted.parameters())
    nn.utils.clip_grad_norm_(converted.parameters(), 1.0)
    optimizer.step()
    return {"errors": errors(found, {k: v.double() for k, v in alone.items()}), "placements": placements}


class TestBesideFSDP2:
    pytestmark = distributed

    def test_a_mesh_of_two_dimensions(self, tmp_path: Path) -> None:
        for found in spawn(sharded_twice, 4, tmp_path):
            assert max(found["errors"].values()) < 1e-5
            assert any("Shard" in placement for placement in found["placements"])


def in_other_ways() -> dict[str, float]:
    """Return the distance of a divided Llama from the original in modes other than the first."""
    case = LLAMA_4
    model, sample = zero_dropout(case.build()).train(), sample_of(case)
    original, fused = copy.deepcopy(model), divided(case, sequence_parallel=True)
    ids, found = sample["input_ids"], {}

    def off(mine: Tensor, theirs: Tensor) -> float:
        return ((mine - theirs).norm() / theirs.norm()).item()

    for length in (7, 12):  # two ranks do not divide the first: residuals stay whole
        with torch.no_grad():
            given = {"input_ids": ids[:1, :length]}
            mine, theirs = fused.eval()(**given), original.eval()(**given)
        found[f"logits of {length}"] = off(mine.logits, theirs.logits)
        keys = (output.past_key_values.layers[-1].keys for output in (mine, theirs))
        found[f"keys of {length}"] = off(*keys)
    asked = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    same = torch.equal(fused.generate(ids[:, :5], **asked), original.generate(ids[:, :5], **asked))
    found["tokens"] = 0.0 if same else 1.0
    for kept in (fused.train(), original.train()):
        kept.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    frozen = gradients(fused, sample), gradients(original, sample)
    found["frozen"] = max(errors(frozen[0], {k: v.double() for k, v in frozen[1].items()}).values())
    for kept in (fused, original):
        kept.zero_grad()
        kept.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed = gradients(fused, sample), gradients(original, sample)
    exact = {k: v.double() for k, v in checkpointed[1].items()}
    found["checkpointed"] = max(errors(checkpointed[0], exact).values())
    return found


def of_one_layer() -> bool:
    """Whether a BART of one layer in each half generates what it does undivided: its encoder is called by
    itself."""
    one = {"encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 64, "forced_eos_token_id": 2}
    case = hf_case("one", "BartForConditionalGeneration", "BartConfig", SEQ2SEQ | one, text_to_text)
    ids = sample_of(case)["input_ids"]
    made = [
        model.eval().generate(ids, max_new_tokens=3, do_sample=False)
        for model in (divided(case), zero_dropout(case.build()))
    ]
    return torch.equal(*made)


class TestOtherCalls:
    pytestmark = distributed

    def test_a_part_of_one_layer_is_called_by_itself(self, tmp_path: Path) -> None:
        assert all(spawn(of_one_layer, 2, tmp_path))

    def test_give_the_originals_numbers(self, tmp_path: Path) -> None:
        for found in spawn(in_other_ways, 2, tmp_path):
            assert max(found.values()) < 1e-5, found
