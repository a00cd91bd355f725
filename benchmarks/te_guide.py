"""Compare te_transform with a hand port of the layer in TE's performance guide, on two GPUs.

    python benchmarks/te_guide.py [--settings 'layer;tensor'] [--rounds 9] [--json PATH]
    python benchmarks/te_guide.py --device cpu --hidden 64 --length 32  # a dry run, ours alone

The layer is the guide's encoder layer: hidden 4096, 32 heads, ffn 16384, 2048 x 4 tokens, no mask. It runs
without dropout, in bf16 and in FP8 with delayed scaling. In each setting, all contenders take turns:

| setting | measures |
| --- | --- |
| layer | forward and backward, on each GPU alone |
| data | the same under DDP, with 2048 x 4 tokens per GPU |
| tensor | tensor and sequence parallelism, with the same 2048 x 4 tokens for both GPUs |
| fused | gradients of 4 micro-batches, which kernels add to buffers in fp32, on each GPU alone |
| cached | the same, with weights that are cast to FP8 once |
| tensor, fused, cached | all of these |

Times are medians of the slowest process, per micro-batch. Ratios are to the hand port in the same precision
and setting. The divided hand port reads and returns shards of the tokens, as in the guide. te_transform's
divided layer reads and returns all tokens, which takes one more collective. If a contender cannot run, its
row has the reason. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from command_line import output_file, positive
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from two_gpus import Row, Running, agreed, allocated, finished, forget, joined, take_turns

import te_transform
from tests.models.quickstart import BasicLayer

HEADS, BATCH, MICRO_BATCHES = 32, 4, 4
HAND = "hand port"
PRECISIONS = ("bf16", "fp8-delayed")
SETTINGS = ("layer", "data", "tensor", "fused", "cached", "tensor, fused, cached")


@dataclass
class Job:
    """The work of a contender."""

    setting: str
    precision: str
    hidden: int
    x: Tensor  # [length, batch, hidden]
    cotangent: Tensor

    @property
    def recipe(self) -> str | None:
        return None if self.precision == "bf16" else self.precision

    @property
    def is_divided(self) -> bool:
        return "tensor" in self.setting

    @property
    def micro_batches(self) -> int:
        return MICRO_BATCHES if "fused" in self.setting or "cached" in self.setting else 1

    def layer(self) -> nn.Module:
        """Return the original layer, which is the same in each process."""
        torch.manual_seed(0)
        with self.x.device:
            made = BasicLayer(self.hidden, 4 * self.hidden, HEADS, attention_dropout=0.0, hidden_dropout=0.0)
        return made.to(torch.bfloat16).train()

    def wrapped(self, model: nn.Module) -> nn.Module:
        if self.setting != "data":
            return model
        return DistributedDataParallel(model, gradient_as_bucket_view=True)


def by_hand(job: Job) -> Callable[[], None]:
    """Return a step of te.TransformerLayer with the guide's options."""
    import hand_port

    group = dist.group.WORLD if job.is_divided else None
    adds, keeps = job.micro_batches > 1, "cached" in job.setting
    options = hand_port.divided(group) | {"fuse_wgrad_accumulation": adds}
    layer = loaded(hand_port.layer(job.hidden, 4 * job.hidden, HEADS, **options), job.layer(), group)
    forward = hand_port.within(hand_port.RECIPES[job.precision])
    x, cotangent = (hand_port.share(t, group).contiguous() for t in (job.x, job.cotangent))
    x = x.detach().requires_grad_()
    model = job.wrapped(layer)
    if adds:
        for parameter in layer.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)

    def step() -> None:
        for number in range(job.micro_batches):
            with forward():
                out = model(x, is_first_microbatch=number == 0 if keeps else None)
            out.backward(cotangent)
            x.grad = None
        if group is not None:
            hand_port.sum_shared(layer, group)
        for parameter in layer.parameters():
            parameter.grad = None
        # the flag makes the first micro-batch overwrite the buffers
        if adds and not keeps:
            torch._foreach_zero_([parameter.main_grad for parameter in layer.parameters()])

    return step


def loaded(layer: nn.Module, source: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    """Return the layer with this rank's shards of the original's weights."""
    from hand_port import share

    own, its = layer.self_attention, layer.layernorm_mlp
    moves = {
        own.layernorm_qkv.layer_norm_weight: source.ln1.weight,
        own.layernorm_qkv.layer_norm_bias: source.ln1.bias,
        own.layernorm_qkv.weight: share(source.qkv_projection.weight, group),
        own.layernorm_qkv.bias: share(source.qkv_projection.bias, group),
        own.proj.weight: share(source.projection.weight, group, 1),
        own.proj.bias: source.projection.bias,
        its.layer_norm_weight: source.ln2.weight,
        its.layer_norm_bias: source.ln2.bias,
        its.fc1_weight: share(source.mlp.linear1.weight, group),
        its.fc1_bias: share(source.mlp.linear1.bias, group),
        its.fc2_weight: share(source.mlp.linear2.weight, group, 1),
        its.fc2_bias: source.mlp.linear2.bias,
    }
    with torch.no_grad():
        for target, value in moves.items():
            target.copy_(value)
    return layer


def ours(
    job: Job, compile: bool = False, graphs: bool = False, accumulates: bool = True
) -> Callable[[], None]:
    """Return a step of the converted layer. With `accumulates`, kernels add gradients to buffers."""
    backend = "te" if job.x.is_cuda else "torch"
    options = {"recipe": job.recipe, "compile": compile, "graphs": graphs, "verify": False, "inplace": True}
    converted = te_transform.convert(job.layer(), job.x, backend=backend, **options)
    if job.is_divided:
        mesh = init_device_mesh(job.x.device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
        te_transform.parallelize(converted, mesh, job.x, sequence_parallel=True)
    model, x = job.wrapped(converted), job.x.detach().requires_grad_()

    def accumulating() -> contextlib.AbstractContextManager:
        if job.micro_batches == 1 or not accumulates:
            return contextlib.nullcontext()
        return te_transform.accumulate(model, steps=job.micro_batches)

    def step() -> None:
        with accumulating():
            for _ in range(job.micro_batches):
                model(x).backward(job.cotangent)
                x.grad = None
        for parameter in converted.parameters():
            parameter.grad = None

    return step


CONTENDERS: dict[str, Callable[[Job], Callable[[], None]]] = {
    HAND: by_hand,
    "ours": ours,
    "ours, compiled": partial(ours, compile=True),
    "ours, compiled, CUDA graphs": partial(ours, compile=True, graphs=True),
    "ours, gradients added by autograd": partial(ours, accumulates=False),
}


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gpus", type=positive, default=2, help="processes")
    parser.add_argument("--settings", default=";".join(SETTINGS), help="settings, separated by semicolons")
    parser.add_argument("--hidden", type=positive, default=4096)
    parser.add_argument("--length", type=positive, default=2048)
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--json", type=output_file, help="add a line for each row to this file")
    asked = parser.parse_args()
    if unknown := {*asked.settings.split(";")} - {*SETTINGS}:
        parser.error(f"there is no setting {', '.join(unknown)}, one of {'; '.join(SETTINGS)} is needed")
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(work, (asked, folder), nprocs=asked.gpus)
        except Exception as error:  # the rows before the error are kept
            print(f"ended: {str(error)[-2000:]}", flush=True)
        done = Path(folder, "rows.jsonl")
        lines = done.read_text().splitlines() if done.exists() else []
    rows = [Row(**json.loads(line)) for line in lines]
    console = Console(width=130)
    console.print(table(rows))
    for row in rows:
        if row.why:
            console.print(f"not run, {row.wrap}, {row.name}: {row.why}")


def work(rank: int, asked: argparse.Namespace, folder: str) -> None:
    """Run the settings in one process."""
    device = joined(rank, asked.device, asked.gpus, folder)
    for setting in asked.settings.split(";"):
        for row in measured(asked, setting, device):
            if rank == 0:
                write(row, asked, Path(folder, "rows.jsonl"))
    dist.destroy_process_group()


def measured(asked: argparse.Namespace, setting: str, device: torch.device) -> Iterator[Row]:
    """Return the rows of a setting. Ratios are to the hand port in the same precision."""
    torch.manual_seed(1 if setting != "data" else 1 + dist.get_rank())
    x = torch.randn(asked.length, BATCH, asked.hidden, device=device, dtype=torch.bfloat16)
    cotangent = torch.randn_like(x)
    made = []
    for precision in PRECISIONS:
        job = Job(setting, precision, asked.hidden, x, cotangent)
        for name, make in CONTENDERS.items():
            if "autograd" not in name or job.micro_batches > 1:
                made.append(prepared(make, name, job))
    running = [one for one in made if isinstance(one, Running)]
    take_turns(running, asked.rounds, device)
    for one in made:
        if isinstance(one, Running):
            hand = f"{HAND}, {one.row.name.rpartition(', ')[2]}"
            leader = next((other.row for other in running if other.row.name == hand), None)
            micro_batches = Job(setting, "", asked.hidden, x, cotangent).micro_batches
            yield of_one(finished(one.row, leader), micro_batches)
        else:
            yield one
    made.clear()
    running.clear()
    forget(device)


def of_one(row: Row, micro_batches: int) -> Row:
    """Return the row with the times per micro-batch."""
    for name in ("median", "low", "high"):
        setattr(row, name, getattr(row, name) / micro_batches)
    return row


def prepared(make: Callable[[Job], Callable[[], None]], name: str, job: Job) -> Running | Row:
    """Return the warmed-up contender, or its row if it failed in a process."""
    row = Row(dist.get_world_size(), job.setting, f"{name}, {job.precision}")
    step, before, start = None, allocated(job.x.device), time.time()
    try:
        step = make(job)
        for _ in range(4):
            step()
    except Exception as error:
        row.why = ": ".join((type(error).__name__, *str(error).splitlines()[:1]))
    row.prepared, row.why = time.time() - start, agreed(row.why)
    if row.why or step is None:
        return row
    return Running(row, step, allocated(job.x.device) - before, nn.Module())


def write(row: Row, asked: argparse.Namespace, done: Path) -> None:
    """Print a row, and add it to the files."""
    ratio = f", {row.to_first:.3f} of the hand port" if row.to_first else ""
    print(f"{row.wrap} | {row.name}: {row.why or f'{row.median:.2f} ms{ratio}'}", flush=True)
    line = json.dumps(vars(row)) + "\n"
    for path in filter(None, (str(done), asked.json)):
        with open(path, "a") as file:
            file.write(line)


def table(rows: list[Row]) -> Table:
    """Return a table of all rows."""
    made = Table("setting", "contender", "ms", "quartiles", "to the hand port", "peak, GiB")
    for row in rows:
        if row.why:
            made.add_row(row.wrap, row.name, "not run")
            continue
        ratio = f"{row.to_first:.3f}" if row.to_first else ""
        quartiles = f"{row.low:.2f} to {row.high:.2f}"
        made.add_row(row.wrap, row.name, f"{row.median:.2f}", quartiles, ratio, f"{row.peak:.1f}")
    return made


if __name__ == "__main__":
    sys.exit(main())
