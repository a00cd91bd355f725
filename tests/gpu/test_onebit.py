"""The kernels that pack signs against torch ops, and the optimizers on a GPU: one process, and two."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from te_transform.training import OneBitAdam, OneBitLamb, ZeroOneAdam
from te_transform.training.one_bit import signs
from tests.ranks import spawn

SIZES = {"one block": (1, 128), "odd blocks": (3, 128 * 17), "large": (4, 128 * 8191), "empty": (2, 0)}


def values(rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(columns)
    made = torch.randn(rows, columns, generator=generator)
    made[:, ::7] = 0.0
    made[:, ::14] = -0.0
    return made


def apart(rows: int, columns: int, device: str) -> Tensor:
    """Rows of bits with a gap behind each, as in a message."""
    return torch.zeros(rows, columns // 8 + 16, dtype=torch.uint8, device=device)[:, : columns // 8]


@pytest.mark.parametrize("size", SIZES)
def test_the_kernels_are_bitwise_the_torch_ops(size: str) -> None:
    rows, columns = SIZES[size]
    found = {}
    for device in ("cpu", "cuda"):
        error, bits = values(rows, columns).to(device), apart(rows, columns, device)
        signs.pack_(error, torch.tensor(0.7, device=device), bits)
        scales = torch.tensor([0.3, 1e-8, 2.0, 0.1], device=device)[:rows]
        unpacked, total = torch.empty_like(error), torch.linspace(-1, 1, columns).to(device)
        signs.unpack(bits, scales, unpacked)
        signs.add_sum_(total, bits, scales)
        found[device] = [tensor.cpu() for tensor in (error, bits, unpacked, total)]
    for cpu, cuda in zip(*found.values(), strict=True):
        assert torch.equal(cpu.view(torch.uint8), cuda.view(torch.uint8))


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(63, 257), nn.LayerNorm(257), nn.GELU(), nn.Linear(257, 63, bias=False)
    return nn.Sequential(*layers).to("cuda", dtype)


def batch(step: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(16, 63, generator=generator).to("cuda", dtype)


def trained(dtype: torch.dtype) -> dict[str, tuple[list[float], list[Tensor]]]:
    """Train with each optimizer over 24 steps, of which 8 warm up; return losses and weights."""
    found = {}
    makes = {
        "OneBitAdam": lambda p: OneBitAdam(p, lr=1e-3, freeze_step=8),
        "OneBitLamb": lambda p: OneBitLamb(p, lr=1e-2, freeze_step=8),
        "ZeroOneAdam": lambda p: ZeroOneAdam(
            p, lr=1e-3, var_freeze_step=8, var_update_scaler=2, local_step_scaler=4, local_step_clipper=4
        ),
    }
    for name, make in makes.items():
        own = model(dtype)
        ddp, optimizer = DistributedDataParallel(own, device_ids=[own[0].weight.device.index]), None
        optimizer = make(own.parameters())
        optimizer.register(ddp)
        losses = []
        for step in range(24):
            given = batch(step, dtype)
            loss = (ddp(given) - given.sin()).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if name == "ZeroOneAdam":
            optimizer.synchronize()
        found[name] = losses, [p.detach().cpu() for p in own.parameters()]
    return found


def warmed_up() -> tuple[list[Tensor], list[Tensor]]:
    """Return the weights after eight steps of warm-up, and those of torch.optim.Adam."""
    own, theirs = model(torch.float32), model(torch.float32)
    pairs = []
    for each, make in ((own, lambda p: OneBitAdam(p, freeze_step=9)), (theirs, torch.optim.Adam)):
        ddp = DistributedDataParallel(each, device_ids=[each[0].weight.device.index])
        optimizer = make(each.parameters())
        if isinstance(optimizer, OneBitAdam):
            optimizer.register(ddp)
        for step in range(8):
            ddp(batch(step, torch.float32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        pairs.append([p.detach().cpu() for p in each.parameters()])
    return pairs[0], pairs[1]


def both() -> tuple:
    return trained(torch.bfloat16), trained(torch.float32), warmed_up()


def check(ranks: list[tuple]) -> None:
    for of_dtype in range(2):
        for name, (losses, weights) in ranks[0][of_dtype].items():
            assert all(torch.tensor(losses).isfinite()), name
            assert sum(losses[-4:]) < sum(losses[:4]), name
            for other in ranks[1:]:
                assert all(map(torch.equal, weights, other[of_dtype][name][1])), name
    for ours, theirs in (rank[2] for rank in ranks):
        assert all(map(torch.equal, ours, theirs))


def test_one_gpu(tmp_path: Path) -> None:
    check(spawn(both, 1, tmp_path, backend="nccl"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs are here")
def test_two_gpus(tmp_path: Path) -> None:
    check(spawn(both, 2, tmp_path, backend="nccl"))


def test_an_exchange_is_the_one_of_a_cpu() -> None:
    """A message that a GPU packs is read by a CPU, and the other way round."""
    error = values(2, 1024)
    on_gpu, bits = error.cuda(), apart(2, 1024, "cuda")
    signs.pack_(on_gpu, torch.tensor(0.5, device="cuda"), bits)
    read = torch.empty(2, 1024)
    signs.unpack(bits.cpu(), torch.tensor([0.5, 0.5]), read)
    assert torch.equal(read, torch.where(error >= 0, 0.5, -0.5))
    assert torch.equal(copy.copy(on_gpu).cpu(), error - read)
