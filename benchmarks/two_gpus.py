"""Training on two GPUs, and on one of them: te_transform under FSDP2 and DDP against what others do.

    python benchmarks/two_gpus.py [--gpus 2] [--layers 8] [--rounds 9] [--only ours] [--json PATH]
    python benchmarks/two_gpus.py --device cpu --layers 1 --width 64  # a dry run

transformers' LlamaForCausalLM, layers of the 8B shape, 2 x 4096 tokens a GPU, with its loss and a step of
fused AdamW, all in bf16. Others: eager, each block compiled as torchtitan does, and torchao's float8 compiled
so, which gathers shards in FP8 under FSDP2. Contenders take turns, a few at a time, the first of them
(torchao, eager where it is missing) with each few. Times are medians of the slowest process, peak memory is
that of a GPU with the contender alone. A contender that cannot run is a row that says why. Nothing is
asserted.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import te_transform

VOCABULARY, ROWS = 32000, 2
AFTER_STEP: dict[int, Callable[[], None]] = {}  # what torchao does after the optimizer, by the model's id


@dataclass
class Row:
    """What one contender took: milliseconds, GiB; or why it did not run."""

    gpus: int
    wrap: str
    name: str
    median: float = 0.0
    low: float = 0.0
    high: float = 0.0
    peak: float = 0.0
    to_first: float = 0.0  # time over that of the first contender, of neighboring rounds
    why: str = ""
    times: list[float] = field(default_factory=list)


@dataclass
class Running:
    """A contender that is ready."""

    row: Row
    step: Callable[[], None]
    own: int  # bytes that it holds between steps
    model: nn.Module


def eager(model: nn.Module, wrap: str, sample: dict[str, Tensor]) -> nn.Module:
    return model


def by_block(model: nn.Module, wrap: str, sample: dict[str, Tensor]) -> nn.Module:
    for layer in model.model.layers:
        layer.compile()
    return model


def torchao(model: nn.Module, wrap: str, sample: dict[str, Tensor]) -> nn.Module:
    from torchao.float8 import (
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )

    gathers = wrap == "FSDP2"
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathers)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "lm_head" not in name)
    if gathers:
        AFTER_STEP[id(model)] = partial(precompute_float8_dynamic_scale_for_fsdp, model)
    return by_block(model, wrap, sample)


def ours(
    model: nn.Module, wrap: str, sample: dict[str, Tensor], recipe: str | None = None, compile: bool = False
) -> nn.Module:
    backend = "te" if model.device.type == "cuda" else "torch"
    options = {"recipe": recipe, "compile": compile, "verify": False, "inplace": True}
    return te_transform.convert(model, sample, backend=backend, **options)


MAKE: dict[str, Callable[..., nn.Module]] = {
    "torchao float8, compiled by block": torchao,
    "eager": eager,
    "compiled by block": by_block,
    "ours, bf16": ours,
    "ours, fp8-delayed": partial(ours, recipe="fp8-delayed"),
    "ours, fp8-current": partial(ours, recipe="fp8-current"),
    "ours, bf16, compiled": partial(ours, compile=True),
    "ours, fp8-delayed, compiled": partial(ours, recipe="fp8-delayed", compile=True),
    "ours, fp8-current, compiled": partial(ours, recipe="fp8-current", compile=True),
}


FIRST = next(iter(MAKE)) if find_spec("torchao") else "eager"  # what ratios are to


def main() -> None:
    """Measure on one GPU, then on all, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gpus", type=int, default=2, help="processes")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--length", type=int, help="tokens of a row; 4096, on a CPU 64")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--at-once", type=int, default=3, help="contenders in memory at a time")
    parser.add_argument("--only", default="", help="contenders whose name has this in it, and the first")
    parser.add_argument("--json", default="", help="add a line for each row to this file")
    asked = parser.parse_args()
    asked.length = asked.length or (4096 if asked.device == "cuda" else 64)
    rows: list[Row] = []
    for gpus, wraps in ((1, ("none",)), (asked.gpus, ("FSDP2", "DDP"))):
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(work, (asked, gpus, wraps, folder), nprocs=gpus)
            rows += torch.load(Path(folder, "rows.pt"), weights_only=False)
    console = Console(width=140)
    console.print(table(rows))
    for why in dict.fromkeys(f"{row.wrap}, {row.name}: {row.why}" for row in rows if row.why):
        console.print(f"not run, {why}")
    if asked.json:
        with open(asked.json, "a") as file:
            file.writelines(json.dumps({**asdict(row), **about(asked)}) + "\n" for row in rows)


def about(asked: argparse.Namespace) -> dict[str, Any]:
    """What a row was measured with."""
    device = torch.cuda.get_device_name() if asked.device == "cuda" else "CPU"
    return {"device": device, "torch": torch.__version__, "layers": asked.layers, "width": asked.width}


def work(rank: int, asked: argparse.Namespace, gpus: int, wraps: tuple[str, ...], folder: str) -> None:
    """What each process does."""
    device = torch.device(asked.device, rank) if asked.device == "cuda" else torch.device("cpu")
    if asked.device == "cuda":
        import transformer_engine.pytorch  # noqa: F401, whose libraries have to be loaded before any model runs

        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if asked.device == "cuda" else "gloo",
        store=dist.FileStore(f"{folder}/store", gpus),
        rank=rank,
        world_size=gpus,
        device_id=device if asked.device == "cuda" else None,
    )
    rows = [row for wrap in wraps for row in measured(asked, wrap, device)]
    if rank == 0:
        torch.save(rows, Path(folder, "rows.pt"))
    dist.destroy_process_group()


def measured(asked: argparse.Namespace, wrap: str, device: torch.device) -> Iterator[Row]:
    """Each contender's row, the first one's once."""
    others = [name for name in MAKE if name != FIRST and asked.only in name]
    for start in range(0, max(1, len(others)), asked.at_once - 1):
        names = [FIRST, *others[start : start + asked.at_once - 1]]
        made = [prepared(asked, wrap, name, device) for name in names]
        running = [one for one in made if isinstance(one, Running)]
        for number in range(asked.rounds):
            for one in running if number % 2 else reversed(running):
                one.row.times.append(timed(one, device))
        leader = running[0].row if running and running[0].row.name == FIRST else None
        for one in made[0 if start == 0 else 1 :]:
            yield finished(one.row, leader) if isinstance(one, Running) else one
        made.clear()
        running.clear()
        AFTER_STEP.clear()
        torch._dynamo.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def prepared(asked: argparse.Namespace, wrap: str, name: str, device: torch.device) -> Running | Row:
    """The contender after three steps; or its row, where one process at least has failed."""
    row, made, before = Row(dist.get_world_size(), wrap, name), None, allocated(device)
    try:
        made = Running(row, *built(asked, wrap, name, device))
        for _ in range(3):
            made.step()
        made.own = allocated(device) - before
    except Exception as error:
        row.why = ": ".join((type(error).__name__, *str(error).splitlines()[:1]))
    reasons: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, row.why)
    row.why = next((why for why in reasons if why), "")
    return row if row.why or made is None else made


def built(
    asked: argparse.Namespace, wrap: str, name: str, device: torch.device
) -> tuple[Callable[[], None], int, nn.Module]:
    """A training step of the contender, a place for the bytes that it holds, and its model."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=asked.width,
        intermediate_size=asked.width * 7 // 2,
        num_hidden_layers=asked.layers,
        num_attention_heads=max(4, asked.width // 128),
        num_key_value_heads=max(2, asked.width // 512),
        max_position_embeddings=asked.length,
        use_cache=False,
    )
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(VOCABULARY, (ROWS, asked.length), generator=generator).to(device)
    inputs = {"input_ids": ids, "labels": ids}
    model = MAKE[name](model, wrap, inputs)
    wrapped = wrapped_in(wrap, model, device)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4, fused=True)
    after = AFTER_STEP.get(id(model), lambda: None)

    def step() -> None:
        wrapped(**inputs).loss.backward()
        optimizer.step()
        after()
        optimizer.zero_grad()

    return step, 0, model


def wrapped_in(wrap: str, model: nn.Module, device: torch.device) -> nn.Module:
    """The model under DDP, or sharded block by block, or as it is."""
    if wrap == "DDP":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    if wrap == "FSDP2":
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return model


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def timed(one: Running, device: torch.device, steps: int = 5) -> float:
    """Milliseconds a step, of the slowest process; notes the peak of memory."""
    is_cuda, before = device.type == "cuda", allocated(device)
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps if is_cuda else 1):
        one.step()
    if is_cuda:
        torch.cuda.synchronize()
        peak = one.own + torch.cuda.max_memory_allocated() - before
        one.row.peak = max(one.row.peak, peak / 2**30)
    taken = torch.tensor((time.perf_counter() - start) / (steps if is_cuda else 1) * 1e3, device=device)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def finished(row: Row, leader: Row | None) -> Row:
    """The row, with medians of its rounds."""
    row.low, row.median, row.high = statistics.quantiles(row.times, n=4)
    if leader is not None:
        row.to_first = statistics.median(a / b for a, b in zip(row.times, leader.times, strict=True))
    return row


def table(rows: list[Row]) -> Table:
    """Of all rows, with how much of one GPU's speed each has on several."""
    alone = {row.name: row.median for row in rows if row.gpus == 1}
    made = Table("GPUs", "", "contender", "ms", "quartiles", f"to {FIRST}", "peak, GiB", "efficiency")
    for row in rows:
        if row.why:
            made.add_row(str(row.gpus), row.wrap, row.name, "not run")
            continue
        kept = f"{alone[row.name] / row.median:.2f}" if alone.get(row.name) else ""
        numbers = (
            f"{row.median:.1f}",
            f"{row.low:.1f} to {row.high:.1f}",
            f"{row.to_first:.2f}" if row.to_first else "",
        )
        made.add_row(str(row.gpus), row.wrap, row.name, *numbers, f"{row.peak:.1f}", kept)
    return made


if __name__ == "__main__":
    sys.exit(main())
