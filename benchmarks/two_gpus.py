"""Compare training on two GPUs, and on one: te_transform and other tools under FSDP2, DDP and TP.

    python benchmarks/two_gpus.py [--wraps none,FSDP2,DDP,TP] [--layers 8] [--rounds 9] [--only ours]
    python benchmarks/two_gpus.py --device cpu --layers 1 --width 64  # a dry run

TP is tensor and sequence parallelism. The model is LlamaForCausalLM with its loss, with layers of the 8B
shape, and a step includes fused AdamW. Everything is in bf16. Each GPU gets 2 x 4096 tokens; under TP, both
GPUs share the same 2 x 4096 tokens. The other contenders:

- eager,
- each block compiled, as in torchtitan, without and with asynchronous tensor parallelism,
- torchao's float8, compiled in the same way, which gathers shards in FP8 under FSDP2,
- Transformer Engine's layers, ported by hand.

Contenders take turns in small groups; the first contender is in each group. Times are medians of the slowest
process. Peak memory is that of a GPU with the contender alone. If a contender cannot run, its row has the
reason. Rows are printed, and written by --json, once they are measured. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from command_line import output_file, positive
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import te_transform

VOCABULARY, ROWS = 32000, 2
WRAPS = ("none", "FSDP2", "DDP", "TP")
Inputs = dict[str, Tensor]


@dataclass
class Row:
    """The measurements of a contender in milliseconds and GiB, or why it did not run."""

    gpus: int
    wrap: str
    name: str
    median: float = 0.0
    low: float = 0.0
    high: float = 0.0
    peak: float = 0.0
    first: str = ""  # the contender that `to_first` is relative to
    to_first: float = 0.0  # ratio to the time of the first contender, of neighboring rounds
    prepared: float = 0.0  # seconds until it was ready, with compilation
    why: str = ""
    times: list[float] = field(default_factory=list)


@dataclass
class Made:
    """A contender's model, and the parts of its step."""

    model: nn.Module
    inputs: Inputs
    around: Callable[[], Any] = contextlib.nullcontext  # around forward and backward
    forward: Callable[[], Any] = contextlib.nullcontext
    sharded: Callable[[nn.Module], None] = lambda _: None  # called after fully_shard()
    reduce: Callable[[], None] = lambda: None  # called before the optimizer's step
    after: Callable[[], None] = lambda: None  # called after the optimizer's step


@dataclass
class Running:
    """A contender that is ready."""

    row: Row
    step: Callable[[], None]
    own: int  # bytes that it holds between steps
    model: nn.Module


def mesh_of(model: nn.Module) -> DeviceMesh:
    return init_device_mesh(model.device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))


def eager(model: nn.Module, wrap: str, inputs: Inputs, **plan: Any) -> Made:
    return divided(model, inputs, **plan) if wrap == "TP" else Made(model, inputs)


def divided(
    model: nn.Module,
    inputs: Inputs,
    columns: type = ColwiseParallel,
    rows: type = RowwiseParallel,
    whole_input: type = PrepareModuleInput,
) -> Made:
    """Divide the model as torchtitan divides its own Llama.

    Residuals are shards of the tokens. Logits are shards of the vocabulary, and the loss reads the shards.
    """
    mesh = mesh_of(model)
    divide_ends(model, mesh)
    of_layer = {
        "input_layernorm": SequenceParallel(),
        "self_attn": whole_input(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "self_attn.o_proj": rows(output_layouts=Shard(1)),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": whole_input(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.down_proj": rows(output_layouts=Shard(1)),
    }
    reading = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    for layer in model.model.layers:
        parallelize_module(layer, mesh, of_layer | {name: columns() for name in reading})
    return Made(model, with_positions(inputs), around=loss_parallel)


def divide_ends(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide embedding and head by the vocabulary, and the input of the last norm by tokens."""
    of_model = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.norm": SequenceParallel(use_local_output=True),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, of_model)
    # The embedding returns a tensor whose collective may still run. A compiled block unwraps this tensor,
    # and its gradient is lost (PyTorch 2.13). A copy is an ordinary tensor.
    model.model.embed_tokens.register_forward_hook(lambda _, inputs, output: output.clone())


def with_positions(inputs: Inputs) -> Inputs:
    """Pass the positions of all tokens, because the model would count those of its shard only."""
    ids = inputs["input_ids"]
    return inputs | {"position_ids": torch.arange(ids.shape[1], device=ids.device)[None]}


def by_block(model: nn.Module, wrap: str, inputs: Inputs, **plan: Any) -> Made:
    made = eager(model, wrap, inputs, **plan)
    for layer in model.model.layers:
        layer.compile()
    return made


def asynchronous(model: nn.Module, wrap: str, inputs: Inputs) -> Made:
    """Compile, with products in pieces that overlap with communication."""
    import torch._inductor.config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    if wrap != "TP" or model.device.type != "cuda":
        raise ValueError("asynchronous tensor parallelism is of GPUs that divide a model")
    enable_symm_mem_for_group(dist.group.WORLD.group_name)
    enable_symm_mem_for_group(mesh_of(model).get_group().group_name)
    inductor._micro_pipeline_tp = True  # prepared() resets this after the compilation
    return by_block(model, wrap, inputs)


def torchao(model: nn.Module, wrap: str, inputs: Inputs) -> Made:
    from torchao.float8 import (
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )

    gathers, plan = wrap == "FSDP2", {}
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathers)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "lm_head" not in name)
    if wrap == "TP":
        from torchao.float8.float8_tensor_parallel import (
            Float8ColwiseParallel,
            Float8RowwiseParallel,
            PrepareFloat8ModuleInput,
        )

        plan = {
            "columns": Float8ColwiseParallel,
            "rows": Float8RowwiseParallel,
            "whole_input": PrepareFloat8ModuleInput,
        }
    made = by_block(model, wrap, inputs, **plan)
    if gathers:
        made.after = partial(precompute_float8_dynamic_scale_for_fsdp, model)
    return made


def by_hand(model: nn.Module, wrap: str, inputs: Inputs, recipe: str = "bf16") -> Made:
    """Replace the decoder layers by Transformer Engine's layers."""
    import hand_port

    forward = hand_port.within(hand_port.RECIPES[recipe])
    if wrap != "TP":
        return Made(hand_port.llama(model), inputs, forward=forward)
    mesh = mesh_of(model)
    hand_port.llama(model, mesh.get_group())
    divide_ends(model, mesh)
    reduce = partial(hand_port.sum_shared, model, mesh.get_group())
    return Made(model, with_positions(inputs), loss_parallel, forward, reduce)


def ours(model: nn.Module, wrap: str, inputs: Inputs, recipe: str | None = None, **ways: bool) -> Made:
    backend = "te" if model.device.type == "cuda" else "torch"
    options = {"recipe": recipe, "verify": False, "inplace": True, **ways}
    converted = te_transform.convert(model, inputs, backend=backend, **options)
    if wrap == "TP":
        te_transform.parallelize(converted, mesh_of(model), inputs, sequence_parallel=True)
    return Made(converted, inputs)


def half_gathered(model: nn.Module, wrap: str, inputs: Inputs, **options: Any) -> Made:
    """Convert the model, but gather half of the bytes of each matrix, as many as in FP8.

    The gathered bytes are not used, so the matrices keep their first values. This is the least time that
    gathering shards in FP8 can take.
    """
    if wrap != "FSDP2":
        raise ValueError(f"{wrap} gathers no parameters")
    made = ours(model, wrap, inputs, **options)
    made.sharded = gather_half
    return made


def gather_half(model: nn.Module) -> None:
    layers = [module for module in model.modules() if isinstance(module, FSDPModule) and module is not model]
    for layer in layers:
        for parameter in layer._get_fsdp_state()._fsdp_param_group.fsdp_params:
            if parameter.sharded_param.dim() == 2:
                extend(parameter)


def extend(parameter: Any) -> None:
    """Add FSDP2's extension methods to the class of a shard."""
    shard, whole = parameter._sharded_local_tensor, parameter.sharded_param.full_tensor().detach()

    def gives(*_: Any) -> Any:
        return (shard.flatten().view(torch.uint8)[: shard.numel()].view(shard.shape),), None

    def takes(outputs: Any, metadata: Any, dtype: torch.dtype, out: Tensor | None = None) -> Any:
        return (whole, ()) if out is None else None

    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = gives, takes
    parameter._init_extensions()


HAND = "hand port, bf16"
MAKE: dict[str, Callable[..., Made]] = {
    "torchao float8, compiled by block": torchao,
    HAND: by_hand,
    "eager": eager,
    "compiled by block": by_block,
    "hand port, fp8-delayed": partial(by_hand, recipe="fp8-delayed"),
    "ours, bf16": ours,
    "ours, fp8-delayed": partial(ours, recipe="fp8-delayed"),
    "ours, fp8-current": partial(ours, recipe="fp8-current"),
    "ours, bf16, compiled": partial(ours, compile=True),
    "ours, fp8-delayed, compiled": partial(ours, recipe="fp8-delayed", compile=True),
    "ours, fp8-current, compiled": partial(ours, recipe="fp8-current", compile=True),
    "ours, bf16, CUDA graphs": partial(ours, compile=True, graphs=True),
    "ours, fp8-delayed, CUDA graphs": partial(ours, recipe="fp8-delayed", compile=True, graphs=True),
    "ours, fp8-delayed, compiled, half gathered": partial(half_gathered, recipe="fp8-delayed", compile=True),
    "compiled by block, asynchronous": asynchronous,  # the last contender: its errors end the process
}


def first_of(wrap: str) -> str:
    """Return the contender that ratios are relative to."""
    if wrap == "TP" and find_spec("transformer_engine"):
        return HAND
    return "torchao float8, compiled by block" if wrap != "TP" and find_spec("torchao") else "eager"


def main() -> None:
    """Measure on one GPU, then on all, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gpus", type=positive, default=2, help="processes")
    parser.add_argument("--wraps", default=",".join(WRAPS), help="comma-separated settings; none: one GPU")
    parser.add_argument("--layers", type=positive, default=8)
    parser.add_argument("--width", type=positive, default=4096)
    parser.add_argument("--length", type=positive, help="tokens of a row; 4096, on a CPU 64")
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--at-once", type=positive, default=4, help="contenders in memory at a time")
    parser.add_argument("--only", default="", help="the first contender, and comma-separated parts of names")
    parser.add_argument("--without", default="", help="leave out contenders with these parts of names")
    parser.add_argument("--json", type=output_file, help="add a line for each row to this file")
    asked = parser.parse_args()
    asked.length = asked.length or (4096 if asked.device == "cuda" else 64)
    rows: list[Row] = []
    for wrap in asked.wraps.split(","):
        gpus = 1 if wrap == "none" else asked.gpus
        with tempfile.TemporaryDirectory() as folder:
            try:
                torch.multiprocessing.spawn(work, (asked, gpus, wrap, folder), nprocs=gpus)
            except Exception as error:  # the rows before the error are kept
                print(f"{wrap} ended: {str(error)[-2000:]}", flush=True)
            done = Path(folder, "rows.jsonl")
            lines = done.read_text().splitlines() if done.exists() else []
            rows += [Row(**json.loads(line)) for line in lines]
    console = Console(width=150)
    console.print(table(rows))
    for why in dict.fromkeys(f"{row.wrap}, {row.name}: {row.why}" for row in rows if row.why):
        console.print(f"not run, {why}")


def about(asked: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of a row."""
    device = torch.cuda.get_device_name() if asked.device == "cuda" else "CPU"
    return {"device": device, "torch": torch.__version__, "layers": asked.layers, "width": asked.width}


def work(rank: int, asked: argparse.Namespace, gpus: int, wrap: str, folder: str) -> None:
    """Run the contenders in one process."""
    device = joined(rank, asked.device, gpus, folder)
    for row in measured(asked, wrap, device):
        if rank == 0:
            write(row, asked, Path(folder, "rows.jsonl"))
    dist.destroy_process_group()


def joined(rank: int, kind: str, gpus: int, folder: str) -> torch.device:
    """Join the group, and return the device. A collective that hangs ends after three minutes."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        import transformer_engine.pytorch  # noqa: F401  loads its libraries first

        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        store=dist.FileStore(f"{folder}/store", gpus),
        rank=rank,
        world_size=gpus,
        timeout=timedelta(minutes=3),
        device_id=device if kind == "cuda" else None,
    )
    return device


def write(row: Row, asked: argparse.Namespace, done: Path) -> None:
    """Print a row, and add it to the files."""
    ratio = f", {row.to_first:.3f} of {row.first}" if row.to_first else ""
    numbers = f"{row.median:.1f} ms{ratio}, {row.peak:.1f} GiB, ready after {row.prepared:.0f} s"
    print(f"{row.gpus} x {row.wrap}, {row.name}: {row.why or numbers}", flush=True)
    with done.open("a") as file:
        file.write(json.dumps(asdict(row)) + "\n")
    if asked.json:
        with open(asked.json, "a") as file:
            file.write(json.dumps({**asdict(row), **about(asked)}) + "\n")


def named(words: str, name: str) -> bool:
    return any(word and word in name for word in words.split(","))


def measured(asked: argparse.Namespace, wrap: str, device: torch.device) -> Iterator[Row]:
    """Yield each contender's row; the first contender's once."""
    first = first_of(wrap)
    others = [name for name in MAKE if name != first and (not asked.only or named(asked.only, name))]
    others = [name for name in others if not named(asked.without, name)]
    if wrap != "TP":
        others = [name for name in others if MAKE[name] is not asynchronous]
    for start in range(0, max(1, len(others)), asked.at_once - 1):
        names = [first, *others[start : start + asked.at_once - 1]]
        made = [prepared(asked, wrap, name, device) for name in names]
        running = [one for one in made if isinstance(one, Running)]
        take_turns(running, asked.rounds, device)
        leader = running[0].row if running and running[0].row.name == first else None
        for one in made[0 if start == 0 else 1 :]:
            yield finished(one.row, leader) if isinstance(one, Running) else one
        made.clear()
        running.clear()
        forget(device)


def take_turns(running: Iterable[Running], rounds: int, device: torch.device) -> None:
    running = [*running]
    for number in range(rounds):
        for one in running if number % 2 else reversed(running):
            one.row.times.append(timed(one, device))


def forget(device: torch.device) -> None:
    """Free the memory of contenders."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def prepared(asked: argparse.Namespace, wrap: str, name: str, device: torch.device) -> Running | Row:
    """Return the contender after three steps, or its row if it failed in a process."""
    import torch._inductor.config as inductor

    row, made, before, start = Row(dist.get_world_size(), wrap, name), None, allocated(device), time.time()
    try:
        made = Running(row, *built(asked, wrap, name, device))
        for _ in range(3):
            made.step()
        made.own = allocated(device) - before
    except Exception as error:
        row.why = ": ".join((type(error).__name__, *str(error).splitlines()[:1]))
    inductor._micro_pipeline_tp = False
    row.prepared = time.time() - start
    row.why = agreed(row.why)
    return row if row.why or made is None else made


def agreed(why: str) -> str:
    """Return the reason of the first process that has a reason."""
    reasons: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, why)
    return next((why for why in reasons if why), "")


def built(
    asked: argparse.Namespace, wrap: str, name: str, device: torch.device
) -> tuple[Callable[[], None], int, nn.Module]:
    """Return the contender's training step, a list for the bytes that it holds, and its model."""
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
    generator = torch.Generator().manual_seed(0 if wrap == "TP" else dist.get_rank())
    ids = torch.randint(VOCABULARY, (ROWS, asked.length), generator=generator).to(device)
    made = MAKE[name](model, wrap, {"input_ids": ids, "labels": ids})
    wrapped = wrapped_in(wrap, made.model, device)
    made.sharded(wrapped)
    optimizer = torch.optim.AdamW(groups(wrapped), lr=1e-4, fused=True)

    def step() -> None:
        with made.around():
            with made.forward():
                loss = wrapped(**made.inputs).loss
            loss.backward()
        made.reduce()
        optimizer.step()
        made.after()
        optimizer.zero_grad()

    return step, 0, made.model


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameters in groups for an optimizer, which updates DTensors and tensors separately."""
    kinds: dict[bool, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        kinds.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    return [{"params": parameters} for parameters in kinds.values()]


def wrapped_in(wrap: str, model: nn.Module, device: torch.device) -> nn.Module:
    """Return the model under DDP, sharded block by block, or unchanged."""
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
    """Return the milliseconds of a step on the slowest process, and note the peak memory."""
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
    """Return the row with the medians of its rounds."""
    row.first = "" if leader is None else leader.name
    row.low, row.median, row.high = statistics.quantiles(row.times, n=4)
    if leader is not None:
        row.to_first = statistics.median(a / b for a, b in zip(row.times, leader.times, strict=True))
    return row


def table(rows: list[Row]) -> Table:
    """Return a table of all rows, with the scaling relative to one GPU."""
    alone = {row.name: row.median for row in rows if row.gpus == 1}
    made = Table("GPUs", "", "contender", "ms", "quartiles", "to the first", "peak, GiB", "efficiency")
    for row in rows:
        if row.why:
            made.add_row(str(row.gpus), row.wrap, row.name, "not run")
            continue
        tokens = 1 if row.wrap == "TP" else row.gpus  # the tokens of all GPUs, in units of one GPU's
        kept = tokens * alone.get(row.name, 0.0) / (row.gpus * row.median)
        numbers = (
            f"{row.median:.1f}",
            f"{row.low:.1f} to {row.high:.1f}",
            f"{row.to_first:.3f}" if row.to_first else "",
        )
        ends = f"{row.peak:.1f}", f"{kept:.2f}" if kept else ""
        made.add_row(str(row.gpus), row.wrap, row.name, *numbers, *ends)
    return made


if __name__ == "__main__":
    sys.exit(main())
