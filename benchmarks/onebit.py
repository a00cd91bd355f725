"""Compare step times of the 1-bit optimizers with DDP and fused AdamW.

    torchrun --nproc-per-node 2 benchmarks/onebit.py
    NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 torchrun --nproc-per-node 2 benchmarks/onebit.py  # over sockets
    torchrun --nproc-per-node 2 benchmarks/onebit.py --device cpu --layers 1 --width 64  # a dry run

The model is a GPT-2 of 124M parameters with random weights, in bf16, on random tokens. In each round, every
contender makes a few steps, and the slowest rank counts. The script prints the median step time of each
contender, and the median over rounds of its ratio to DDP. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from command_line import positive
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

from te_transform.training import OneBitAdam, OneBitLamb, ZeroOneAdam

LONG = 10**9  # steps: longer than this run
WARM_UP = 3  # steps before the timed steps


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--layers", type=positive, default=12)
    parser.add_argument("--width", type=positive, default=768)
    parser.add_argument("--rows", type=positive, default=8, help="sequences per rank and step")
    parser.add_argument("--length", type=positive, default=1024)
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--steps", type=positive, default=4, help="steps per contender and round")
    asked = parser.parse_args()
    device = torch.device(asked.device, int(os.environ["LOCAL_RANK"]) if asked.device == "cuda" else None)
    if asked.device == "cuda":
        torch.cuda.set_device(device)
    else:
        asked.rows, asked.length = min(asked.rows, 2), min(asked.length, 64)
    dist.init_process_group("nccl" if asked.device == "cuda" else "gloo")
    rounds = measured(asked, device)
    if dist.get_rank() == 0:
        Console(width=130).print(table(rounds, asked))
    dist.destroy_process_group()


def optimizers() -> dict[str, Callable[[nn.Module], torch.optim.Optimizer]]:
    """Return the contenders by name. Ratios are relative to the first."""
    return {
        "DDP, fused AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
        "OneBitAdam, warm-up": lambda model: OneBitAdam(model.parameters(), lr=1e-4, freeze_step=LONG),
        "OneBitAdam, compressed": lambda model: OneBitAdam(model.parameters(), lr=1e-4, freeze_step=1),
        "OneBitLamb, compressed": lambda model: OneBitLamb(model.parameters(), lr=1e-4, freeze_step=1),
        "ZeroOneAdam, phase 1, compressed": lambda model: ZeroOneAdam(
            model.parameters(), lr=1e-4, var_freeze_step=LONG, var_update_scaler=1
        ),
        "ZeroOneAdam, local steps, exchange every 4th": lambda model: ZeroOneAdam(
            model.parameters(), lr=1e-4, var_freeze_step=1, local_step_scaler=1, local_step_clipper=4
        ),
    }


def measured(asked: argparse.Namespace, device: torch.device) -> dict[str, list[float]]:
    """Return the seconds of a step in each round, of the slowest rank, by contender."""
    steps = {name: contender(make, asked, device) for name, make in optimizers().items()}
    for step in steps.values():
        timed(step, WARM_UP, device)
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(asked.rounds):
        for name, step in steps.items():
            found[name].append(timed(step, asked.steps, device))
    return found


def contender(make: Callable[[nn.Module], Any], asked: argparse.Namespace, device: torch.device) -> Any:
    """Return a function that makes one training step."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=asked.layers, n_embd=asked.width, n_head=max(asked.width // 64, 1), n_positions=asked.length,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).to(device, torch.bfloat16)
    ids = [device] if device.type == "cuda" else None
    ddp = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    optimizer = make(model)
    if hasattr(optimizer, "register"):
        optimizer.register(ddp)
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    tokens = torch.randint(50000, (asked.rows, asked.length), generator=generator, device=device)

    def step() -> None:
        ddp(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def timed(step: Callable[[], None], steps: int, device: torch.device) -> float:
    """Return the seconds of a step among `steps` steps, on the slowest rank."""
    dist.barrier()
    _wait(device)
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    _wait(device)
    seconds = torch.tensor((time.perf_counter() - begin) / steps, dtype=torch.float64, device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table(rounds: dict[str, list[float]], asked: argparse.Namespace) -> Table:
    """Return medians, and ratios to the first contender of the same round."""
    ways = [name for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE") if os.environ.get(name) == "1"]
    where = torch.cuda.get_device_name() if asked.device == "cuda" else "CPU"
    over = "sockets" if len(ways) == 2 else " and ".join(ways) or "the fastest transport"
    drawn = Table(title=f"{dist.get_world_size()} x {where}, {asked.layers} layers of {asked.width}, {over}")
    for column in ("contender", "step, ms", "of DDP", "lowest", "highest"):
        drawn.add_column(column, justify="left" if column == "contender" else "right")
    first = next(iter(rounds.values()))
    for name, seconds in rounds.items():
        ratios = [own / ddp for own, ddp in zip(seconds, first, strict=True)]
        ends = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
        middle = f"{statistics.median(seconds) * 1e3:.1f}", f"{statistics.median(ratios):.2f}"
        drawn.add_row(name, *middle, *ends)
    return drawn


if __name__ == "__main__":
    main()
