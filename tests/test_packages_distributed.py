"""DDP, FSDP2 and HSDP in two and four processes, over gloo.

They have the losses and weights of the original, and those of one process that has the whole batch.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import te_transform
from te_transform.backends.joined import adjacent
from tests.packages import BATCHES, LLAMA_IDS, close, convert, llama, original
from tests.ranks import NAMES, spawn

pytestmark = [
    pytest.mark.integration,
    pytest.mark.xdist_group("distributed"),  # `results` once a process
    pytest.mark.usefixtures("at_any_size"),
]
STEPS = 20

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


def fsdp_whole(model: nn.Module) -> nn.Module:
    return fully_shard(model)


def hsdp(model: nn.Module) -> nn.Module:
    return fsdp(model, mesh=init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=NAMES))


def checkpointed(model: nn.Module) -> nn.Module:
    """Each block's activations are computed again in the backward."""
    for name, block in model.blocks.named_children():
        model.blocks.register_module(name, checkpoint_wrapper(block))
    return model


CASES: dict[str, tuple[Change, ...]] = {
    "DDP": (convert, ddp),
    "FSDP2": (convert, fsdp),
    "FSDP2, kept after forward": (convert, fsdp_kept),
    "FSDP2 of the whole": (convert, fsdp_whole),
    "FSDP2 in bf16": (convert, fsdp_in_bf16),
    "HSDP": (convert, hsdp),
    "FSDP2 of checkpoints": (convert, checkpointed, fsdp),
}


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    return BATCHES[(step + rank) % len(BATCHES)]


def local_step(model: nn.Module, step: int) -> Tensor:
    loss = model(*batch(step, dist.get_rank()))
    loss.backward()
    return loss.detach()


def accumulating_step(model: nn.Module, step: int) -> Tensor:
    """Two backward passes, of which the second alone reduces gradients."""
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            local_step(model, step)
    else:
        model.set_requires_gradient_sync(False)
        local_step(model, step)
        model.set_requires_gradient_sync(True)
    return local_step(model, step + 1)


def train(
    model: nn.Module, take: Callable[[nn.Module, int], Tensor] = local_step, steps: int = STEPS
) -> list[Tensor]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(steps):
        losses.append(take(model, step))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def trained(changes: tuple[Change, ...], **how: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The losses on other batches in each process, and the whole model's weights."""
    model = original(blocks=2)
    for change in changes:
        model = change(model)
    losses = train(model, **how)
    return losses, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def both_ways() -> dict[str, Any]:
    """Run every case in each process, with and without conversion."""
    results = {name: (trained(changes[1:]), trained(changes)) for name, changes in CASES.items()}
    for name in ("DDP", "FSDP2"):
        how = {"take": accumulating_step, "steps": 4}
        pair = trained(CASES[name][1:], **how), trained(CASES[name], **how)
        results[f"{name}, accumulating"] = pair
    return results


@pytest.fixture(scope="module", params=[2, 4])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawn(both_ways, request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", [*CASES, "DDP, accumulating", "FSDP2, accumulating"])
def test_training_is_that_of_the_original(name: str, results: list[dict[str, Any]]):
    """Within the rounding of float64; in bf16 within that of bf16."""
    for rank in results:
        (losses, weights), (actual, actual_weights) = rank[name]
        close(actual, losses, **({"rtol": 2e-2} if "bf16" in name else {}))
        if "bf16" not in name:
            close(actual_weights, weights)
        assert actual_weights.keys() == weights.keys()
    assert results[0][name][1][0][0] != results[1][name][1][0][0]  # each had a batch of its own


@pytest.mark.parametrize("name", [name for name in CASES if "bf16" not in name])
def test_training_is_that_of_one_process_with_the_whole_batch(name: str, results: list[dict[str, Any]]):
    def whole_step(model: nn.Module, step: int) -> Tensor:
        batches = [batch(step, rank) for rank in range(len(results))]
        loss = model(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
        loss.backward()
        return loss.detach()

    expected = train(convert(original(blocks=2)), whole_step)
    close(torch.tensor([rank[name][1][0] for rank in results]).mean(0), torch.stack(expected))


# Models that no process ever holds the whole of


def sharded_on_meta(converts: bool) -> nn.Module:
    """A Llama that is converted where it has no memory, and has a shard of it in each process."""
    with torch.device("meta"):
        model = llama(layers=2)
    if converts:
        ids = torch.zeros(2, 8, dtype=torch.long, device="meta")
        sample = {"input_ids": ids, "labels": ids}
        model = te_transform.convert(model, sample, inplace=True)
        assert te_transform.report(model).counts["merge_siblings"] == 4
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    rotary = model.model.rotary_emb  # its buffers are in no checkpoint
    for name, buffer in type(rotary)(rotary.config).named_buffers():
        rotary.get_buffer(name).copy_(buffer)
    return model


def load_dcp(model: nn.Module, folder: Path) -> None:
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder / "dcp")
    set_model_state_dict(model, state)


def load_safetensors(model: nn.Module, folder: Path) -> None:
    """Rank 0 reads one tensor after the other, each process keeps its shard."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state = load_file(folder / "model.safetensors") if dist.get_rank() == 0 else {}
    set_model_state_dict(model, state, options=options)


def loaded_and_trained(folder: Path, load: Callable[..., None]) -> tuple[list[Any], ...]:
    """The losses of the original and of the converted model, and whether a shard is all that was held."""
    found = []
    for converts in (False, True):
        model = sharded_on_meta(converts)
        load(model, folder)
        ids = LLAMA_IDS[2 * dist.get_rank() : 2 * dist.get_rank() + 2]
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
        for _ in range(3):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        found.append(losses)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert isinstance(model, FSDPModule)
    return (*found, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))


@pytest.mark.parametrize("load", [load_dcp, load_safetensors])
def test_a_model_on_meta_is_converted_sharded_and_loaded(load: Callable[..., None], tmp_path: Path):
    """A checkpoint of the original class, under its own names."""
    weights = llama(layers=2).state_dict()
    dcp.save(weights, checkpoint_id=tmp_path / "dcp", no_dist=True)
    save_file(weights, tmp_path / "model.safetensors")
    one, other = spawn(loaded_and_trained, 2, tmp_path, tmp_path, load)
    for losses, actual, state in (one, other):
        close(actual, losses, rtol=1e-4)
        assert state.keys() == weights.keys()
    alone = llama(layers=2)
    first = [alone(input_ids=ids, labels=ids).loss.detach() for ids in (LLAMA_IDS[:2], LLAMA_IDS[2:4])]
    close([one[1][0], other[1][0]], first, rtol=1e-4)


def test_parameters_converted_on_meta_become_adjacent_later():
    """q, k and v in one buffer, once there is memory."""
    batch = [tensor.to("meta") for tensor in BATCHES[0]]
    model = te_transform.convert(original(blocks=2).to("meta"), (*batch,), inplace=True)
    model.to_empty(device="cpu")
    model.load_state_dict(original(blocks=2).state_dict())
    close(model(*BATCHES[0]), original(blocks=2)(*BATCHES[0]))
    model(*BATCHES[0])
    attention = model.blocks[0].attention
    parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    torch.testing.assert_close(adjacent(parts), torch.cat(parts), rtol=0, atol=0)
