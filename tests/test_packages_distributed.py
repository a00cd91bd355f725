"""DDP and FSDP2 in two processes, over gloo: the losses and weights of the original."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.packages import BATCHES, close, convert, original

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("distributed")]  # `results` once a process
RANKS = 2

Change = Callable[[nn.Module], nn.Module]


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def fsdp(model: nn.Module, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def fsdp_in_bf16(model: nn.Module) -> nn.Module:
    return fsdp(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def fsdp_kept(model: nn.Module) -> nn.Module:
    return fsdp(model, reshard_after_forward=False)


CASES: dict[str, tuple[Change, ...]] = {
    "DDP": (convert, ddp),
    "FSDP2": (convert, fsdp),
    "FSDP2, kept after forward": (convert, fsdp_kept),
    "FSDP2 in bf16": (convert, fsdp_in_bf16),
}


def trained(changes: tuple[Change, ...]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of four steps, on other batches in each process, and the whole model's weights."""
    model = original(blocks=2)
    for change in changes:
        model = change(model)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(4):
        loss = model(*BATCHES[(step + dist.get_rank()) % len(BATCHES)])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def work(rank: int, folder: Path) -> None:
    """What each process does: every case, and the same without conversion."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, store=store)
    results = {}
    for name, changes in CASES.items():
        results[name] = trained(changes[1:]), trained(changes)
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(work, (folder,), nprocs=RANKS)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("name", CASES)
def test_training_in_two_processes(name: str, results: list[dict[str, Any]]):
    for rank in range(RANKS):
        (losses, weights), (actual, actual_weights) = results[rank][name]
        close(actual, losses, **({"rtol": 2e-2} if "bf16" in name else {}))
        if "bf16" not in name:
            close(actual_weights, weights)
        assert actual_weights.keys() == weights.keys()
    assert results[0][name][1][0] != results[1][name][1][0]  # each had a batch of its own
