"""DDP and FSDP2 on two GPUs, in bf16 and in FP8."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import te_transform
from te_transform.backends import limits
from tests.gpu.test_training import VOCAB, llama
from tests.ranks import scales_before, spawn
from tests.zoo import seeded

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs are here")
STEPS = 5
# How far the loss of a step may be from that of the original, relative to it. In bf16 each rounds sums of its
# own. In FP8 each operand has a significand of 4 bits: test_training.py allows the loss of one step 0.01, and
# after five steps of AdamW the weights differ too.
BOUNDS = {None: 0.005, "fp8-delayed": 0.02, "fp8-current": 0.02}


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def batch(step: int) -> dict[str, Tensor]:
    """Other tokens in each process, and more of one kind in one: each alone would find other scales."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    ids = torch.randint(VOCAB // (1 + dist.get_rank()), (2, 64), generator=generator).cuda()
    return {"input_ids": ids, "labels": ids}


def train(model: nn.Module) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), []
    for step in range(STEPS):
        loss = model(**batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(recipe: str | None, compile: bool) -> dict[str, dict[str, Any]]:
    """By what models were wrapped in: the losses of the original and of the converted one, the scales of each
    step, and what a checkpoint has of them, before and after it was loaded."""
    import transformer_engine.pytorch  # noqa: F401, whose libraries have to be loaded before any model runs

    limits.at_any_size.__enter__()
    results = {}
    for wrap in (ddp, fsdp):
        torch._dynamo.reset()
        found: dict[str, Any] = {"original": train(wrap(seeded(llama)))}
        model = te_transform.convert(seeded(llama), batch(0), backend="te", recipe=recipe, compile=compile)
        te_transform.check_ranks(model)
        wrapped = wrap(model.train())
        with pytest.MonkeyPatch.context() as patch:
            found["scales"] = scales_before(lambda: found.update(converted=train(wrapped)), patch)  # noqa: B023
        found["saved"] = te_transform.scaling_state(wrapped)
        te_transform.load_scaling_state(wrapped, found["saved"])
        found["loaded"] = te_transform.scaling_state(wrapped)
        train(wrapped)
        results[wrap.__name__] = found
    return results


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("recipe", BOUNDS)
def test_training_on_two_gpus(recipe: str | None, compile: bool, tmp_path: Path) -> None:
    one, other = spawn(trained, 2, tmp_path, recipe, compile, backend="nccl")
    for wrap in one:
        for rank in (one[wrap], other[wrap]):
            for loss, expected in zip(rank["converted"], rank["original"], strict=True):
                assert abs(loss - expected) <= BOUNDS[recipe] * expected, (wrap, rank)
        assert one[wrap]["original"] != other[wrap]["original"]
        check_scales(one[wrap], other[wrap], recipe == "fp8-delayed")


def check_scales(one: dict[str, Any], other: dict[str, Any], is_delayed: bool) -> None:
    """Each step of two processes quantized by the same scales, and both would save the same."""
    assert one["scales"] == other["scales"]
    assert len(one["scales"]) == STEPS * is_delayed
    for key in ("saved", "loaded"):
        torch.testing.assert_close(one[key], other[key], rtol=0, atol=0)
        torch.testing.assert_close(one[key], one["saved"], rtol=0, atol=0)
    if is_delayed:  # forward and backward, of three products in each of four layers
        assert len(one["scales"][-1]) == 2 * 3 * 4
