"""Train a small GPT on the standard library's sources, with Adam and with 1-bit optimizers."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from te_transform.training import OneBitAdam, ZeroOneAdam
from te_transform.training.one_bit.compressed import CompressedMean
from te_transform.training.one_bit.layout import FlatLayout
from tests.models.nanogpt import GPT, GPTConfig

STEPS, WARM_UP, ROWS, LENGTH = 300, 100, 16, 32
OPTIONS = {"lr": 0.02, "betas": (0.9, 0.98)}


class OfCompressedGradients(torch.optim.Adam):
    """Adam on gradients that are compressed with error feedback, after as long a warm-up."""

    taken = 0

    def step(self, closure: None = None) -> None:
        (group,) = self.param_groups
        if not self.taken:
            self.layout = FlatLayout([group["params"]], dist.get_world_size())
            self.mean = CompressedMean(self.layout, dist.group.WORLD)
        values = self.layout.buffer()
        for parameter in group["params"]:
            self.layout.view(values, parameter).copy_(parameter.grad)
        if self.taken < WARM_UP:
            dist.all_reduce(values.div_(dist.get_world_size()))
        else:
            self.mean(values)
        for parameter in group["params"]:
            parameter.grad.copy_(self.layout.view(values, parameter))
        self.taken += 1
        super().step()


def losses() -> dict[str, list[float]]:
    """Return the mean loss of the last 50 steps, over all ranks, of runs that see other batches."""
    text = standard_library()
    return {
        "Adam": [trained(lambda p: torch.optim.Adam(p, **OPTIONS), seed, text) for seed in range(3)],
        "OneBitAdam": [
            trained(lambda p: OneBitAdam(p, freeze_step=WARM_UP, **OPTIONS), seed, text) for seed in range(2)
        ],
        "ZeroOneAdam": [
            trained(lambda p: ZeroOneAdam(p, var_freeze_step=WARM_UP, **OPTIONS), seed, text)
            for seed in range(2)
        ],
        "compressed gradients": [trained(lambda p: OfCompressedGradients(p, **OPTIONS), 0, text)],
    }


def standard_library() -> Tensor:
    """Return the ASCII characters of Python's own sources, in the order of their names."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:40]
    characters = bytearray(b"".join(file.read_bytes() for file in files))
    return torch.frombuffer(characters, dtype=torch.uint8).long().clamp(max=127)


def trained(make: Callable[..., torch.optim.Optimizer], seed: int, text: Tensor) -> float:
    torch.manual_seed(0)
    model: nn.Module = GPT(GPTConfig(LENGTH, 128, n_layer=1, n_head=2, n_embd=16, dropout=0.0, bias=False))
    optimizer = make(model.parameters())
    if not isinstance(optimizer, OfCompressedGradients):
        model = DistributedDataParallel(model)
    if isinstance(optimizer, OneBitAdam):
        optimizer.register(model)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    generator, last = torch.Generator().manual_seed(100 * seed + dist.get_rank()), torch.zeros(())
    for step in range(STEPS):
        starts = torch.randint(len(text) - LENGTH - 1, (ROWS,), generator=generator)
        rows = text[starts[:, None] + torch.arange(LENGTH + 1)]
        loss = model(rows[:, :-1], rows[:, 1:].contiguous())[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        last += loss.detach() * (step >= STEPS - 50) / 50
    dist.all_reduce(last)
    return last.item() / dist.get_world_size()


def factor(step: int) -> float:
    """Return the learning rate as a share of the highest: 20 steps of rise, then half a cosine."""
    return min(1.0, (step + 1) / 20) * (0.5 + 0.5 * math.cos(math.pi * step / STEPS))
