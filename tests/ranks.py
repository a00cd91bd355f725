"""Several processes of one test, over gloo, and what they train."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import te_transform
from te_transform.backends import limits
from te_transform.backends.fp8 import scale_table
from tests import compilers, fast_captures, stand_in  # noqa: F401  fast_captures has effects

WIDTH, LENGTH = 32, 16
NAMES = ("replicas", "shards")  # of the dimensions of a mesh for HSDP


def spawn(
    work: Callable[..., Any], ranks: int, folder: Path, *arguments: Any, backend: str = "gloo"
) -> list[Any]:
    """Run work(*arguments) in processes that form one group, and return the results.

    Each process has a GPU if the backend is "nccl". torch.multiprocessing raises the first exception of a
    process. Without a GPU, processes are forked from one that has imported torch, which takes seconds.
    """
    method = "spawn" if backend == "nccl" else "forkserver"
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    torch.multiprocessing.start_processes(
        _work, (work, ranks, folder, arguments, backend), nprocs=ranks, start_method=method
    )
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _work(
    rank: int, work: Callable[..., Any], ranks: int, folder: Path, arguments: tuple, backend: str
) -> None:
    torch.set_num_threads(1)
    places = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
    }  # as torchrun's
    os.environ.update({name: str(value) for name, value in places.items()})
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group(backend, rank=rank, world_size=ranks, store=store)
    torch.save(work(*arguments), folder / f"{rank}.pt")
    dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.k = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.Linear(WIDTH, 48)
        self.o = nn.Linear(48, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(approximate="tanh"), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Compute a norm that two linears read, a linear, and an MLP."""
        y = self.norm(x)
        x = x + self.o(self.q(y) * torch.tanh(self.k(y)))
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] -> a loss."""
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()


def net(blocks: int = 2) -> nn.Module:
    """Return the model in bf16, the same at each call."""
    torch.manual_seed(0)
    return Net(blocks).to(torch.bfloat16)


def inputs(step: int, rank: int = 0) -> Tensor:
    """Return inputs that grow with the rank, so that each rank would find scales of its own."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (torch.randn(2, LENGTH, WIDTH, generator=generator) * 3**rank).to(torch.bfloat16)


def in_fp8(**options: Any) -> nn.Module:
    """Return the model, converted on the stand-in for Transformer Engine; call install_stand_in() before."""
    options = {"backend": "te", "recipe": "fp8-delayed", "verify": False, **options}
    return te_transform.convert(net(), inputs(0), **options)


def install_stand_in() -> None:
    """For the rest of a process's life."""
    stand_in.install(pytest.MonkeyPatch())
    limits.ignore_size_limits.__enter__()


def alone(model: nn.Module) -> nn.Module:
    return model


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def sharded(model: nn.Module, mesh: Any = None) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def sharded_whole(model: nn.Module) -> nn.Module:
    return fully_shard(model)


def hybrid(model: nn.Module) -> nn.Module:
    return sharded(model, init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=NAMES))


def train(
    model: nn.Module, steps: range = range(4), optimizer: torch.optim.Optimizer | None = None
) -> list[float]:
    optimizer, losses = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in steps:
        loss = model(inputs(step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def scales_before(train: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, list[float]]]:
    """Return the scales of each step of train() after the ranks agreed, or what first scales come from."""
    found, agree = [], scale_table.RankTable.agree

    def noting(shared: scale_table.RankTable, maximum: Any) -> None:
        agree(shared, maximum)
        found.append(dict(item for kernel in shared.kernels for item in _scales(kernel)))

    monkeypatch.setattr(scale_table.RankTable, "agree", noting)
    train()
    return found


def _scales(kernel: scale_table.ScaledKernel) -> Iterator[tuple[str, list[float]]]:
    name = scale_table.names_of(kernel)[0]
    if kernel.seen.has_scales:
        yield from ((f"{name} {direction}", s.scale.tolist()) for direction, s in kernel.delayed().items())
    elif kernel.seen.knows([True] * len(kernel.seen.products)):
        amaxes = [(p.input.item(), p.weight.item(), p.grad.item()) for p in kernel.seen.products]
        yield f"{name} seen", amaxes


def scales_of(wraps: tuple[Callable[[nn.Module], nn.Module], ...], compiles: bool = False) -> dict[str, Any]:
    """By the name of what a model was wrapped in: the scales of each step, the state to be saved, and what
    runs uncompiled."""
    install_stand_in()
    if compiles:
        compilers.install()
    found = {}
    for wrap in wraps:
        model = in_fp8(compile=compiles)
        with pytest.MonkeyPatch.context() as patch:
            steps = scales_before(partial(train, wrap(model)), patch)
        notes = [note for note in te_transform.report(model).notes if "uncompiled" in note]
        found[wrap.__name__] = steps, te_transform.scaling_state(model), notes
    return found


def mesh(device: str = "cpu") -> DeviceMesh:
    """Return a mesh of all processes, in one dimension."""
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))
