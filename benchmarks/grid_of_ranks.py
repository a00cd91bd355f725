"""Compare converted Llamas of all sizes with other tools, under FSDP2 and DDP, in bf16.

    torchrun --nproc-per-node 2 benchmarks/grid_of_ranks.py ranks.jsonl [--wraps FSDP2 DDP]
                                [--widths 1024 4096] [--tokens 512 2048 8192] [--minutes 9]
    python benchmarks/grid_of_ranks.py ranks.jsonl --table

Models, sizes and steps are those of grid.py, with as many tokens on each GPU. The others are the original,
eager and with each block compiled. Contenders take turns in one process for each rank.

The script adds a JSON line for each point, with the milliseconds of each contender on the slowest rank. It
skips points that the file contains: call it again until no point is left. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grid
import measure
import torch
import torch.distributed as dist
from command_line import json_lines, output_file, positive
from node_model import blocks_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import te_transform

WRAPS, WIDTHS, TOKENS = ("FSDP2", "DDP"), (1024, 4096), (512, 2048, 8192)
WARMUP, ROUNDS, SAMPLE = 6, 9, 0.1  # steps, samples of each contender, seconds of a sample

Point = dict[str, Any]
Step = Callable[[], None]


def main() -> None:
    """Measure the points that the file lacks, or print the file as a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("file", type=output_file, help="file of JSON lines to add to")
    parser.add_argument("--wraps", nargs="+", default=WRAPS, choices=WRAPS)
    parser.add_argument("--widths", nargs="+", type=positive, default=WIDTHS)
    parser.add_argument("--tokens", nargs="+", type=positive, default=TOKENS, help="tokens of a GPU and step")
    parser.add_argument("--minutes", type=float, default=9.0, help="time until the last point starts")
    parser.add_argument("--table", action="store_true", help="print the file as a table")
    asked = parser.parse_args()
    known = json_lines(asked.file) if Path(asked.file).exists() else []
    if asked.table:
        print("\n".join(table(known)))
        return
    if "RANK" not in os.environ:
        parser.error("expected several ranks, got none; start this script by torchrun")
    keys = {_key(point) for point in known}
    wanted = (
        {"model": "llama", "mode": "training", "wrap": wrap, "width": width, "tokens": tokens}
        for width, tokens, wrap in itertools.product(asked.widths, asked.tokens, asked.wraps)
    )
    points = [point for point in wanted if _key(point) not in keys]
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    end = time.monotonic() + 60 * asked.minutes
    for point in points:
        if _slowest(time.monotonic() - end) > 0:
            break
        row = point | {"ms": _measured(point), "gpus": dist.get_world_size()}
        row |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
            with open(asked.file, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    dist.destroy_process_group()


def _key(point: Point) -> tuple[Any, ...]:
    return tuple(point[name] for name in ("wrap", "width", "tokens"))


def _measured(point: Point) -> dict[str, float]:
    """Return the milliseconds of each contender, which take turns."""
    steps = {name: _step(point, prepare) for name, prepare in CONTENDERS.items()}
    for step in steps.values():
        for _ in range(WARMUP):
            step()
    calls = {
        name: max(2, round(SAMPLE / _slowest(measure.in_a_row(step, 2)))) for name, step in steps.items()
    }
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            dist.barrier()
            samples[name].append(_slowest(measure.in_a_row(step, calls[name])))
    steps.clear()
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    return {name: round(1e3 * statistics.median(each), 3) for name, each in samples.items()}


def _slowest(seconds: float) -> float:
    """Return the largest of all ranks' values."""
    found = torch.tensor(seconds, dtype=torch.float64, device="cuda")
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def _step(point: Point, prepare: Callable[[nn.Module, dict[str, Any]], nn.Module]) -> Step:
    """Return the training step of a contender, without an optimizer."""
    with torch.device("cuda"):
        model, inputs = grid.model_of(point)
    model = prepare(model, inputs)
    if point["wrap"] == "DDP":
        return grid.step_of(point, DistributedDataParallel(model), inputs, contextlib.nullcontext)
    for block in blocks_of(model):
        fully_shard(block)
    return grid.step_of(point, fully_shard(model), inputs, contextlib.nullcontext)


def _by_block(model: nn.Module, inputs: dict[str, Any]) -> nn.Module:
    for block in blocks_of(model):
        block.compile()
    return model


def _converted(model: nn.Module, inputs: dict[str, Any], **options: Any) -> nn.Module:
    made = te_transform.convert(model, inputs, backend="te", verify=False, inplace=True, **options)
    te_transform.check_ranks(made)
    return made


CONTENDERS = {
    "eager": lambda model, inputs: model,
    "compiled by block": _by_block,
    "te_transform": _converted,
    "te_transform, compiled": lambda model, inputs: _converted(model, inputs, compile=True),
}


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a Markdown table of the times, and the ratio of our best to the best of the others."""
    yield "| " + " | ".join(("wrap", "width", "tokens", *CONTENDERS, "ratio")) + " |"
    yield "| --- |" + " ---: |" * (len(CONTENDERS) + 3)
    for row in sorted(rows, key=_key):
        ms = [row["ms"][name] for name in CONTENDERS]
        ratio = min(ms[2:]) / min(ms[:2])
        yield (
            "| " + " | ".join((*map(str, _key(row)), *(f"{each:.2f}" for each in ms), f"{ratio:.2f}")) + " |"
        )


if __name__ == "__main__":
    main()
