"""Train one contender of node.py on one rank, in a process of its own, and measure it."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import statistics
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pretended_ranks
import torch
import torch.distributed as dist
from node_contenders import Contender, Job, Prepared
from node_model import PEAKS, batches, blocks_of, built, config_of, flops_per_token
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

TOLD = 3  # the exit code of a process that wrote its error to the store


@dataclass
class Row:
    """The measurements of a contender on the slowest rank, or why it did not run; 0 if not measured."""

    name: str
    why: str = ""
    tokens_per_second: float = 0.0  # per GPU: the median of the second half of the steps
    low: float = 0.0  # quartiles
    high: float = 0.0
    mfu: float = 0.0
    peak: float = 0.0  # GiB of tensors, in all steps
    reserved: float = 0.0  # GiB that PyTorch held
    first: float = 0.0  # seconds from the model to the end of the first step
    later: float = 0.0  # seconds that later steps took to compile or record
    first_loss: float = 0.0
    loss: float = 0.0  # of the last step, mean of all ranks
    parameters: int = 0
    device: str = ""
    traceback: str = ""


def work(asked: argparse.Namespace, name: str, contender: Contender) -> None:
    """Train a contender; write its row, or an error, to the store of its turn."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    store, rank = store_of(name), int(os.environ["RANK"])
    try:
        device = _joined(asked.device, store, asked.pretend_ranks)
        row = measured(asked, name, contender, device)
        if rank == 0:
            store.set("row", json.dumps(asdict(row)))
        dist.destroy_process_group()
    except BaseException as error:
        tell(store, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", traceback.format_exc())
        os._exit(TOLD)  # without cleanup: threads and collectives may wait for ended ranks


def tell(store: dist.Store, why: str, trace: str = "") -> None:
    """Tell all ranks that this one failed."""
    error = {"rank": os.environ["RANK"], "why": why, "traceback": trace}
    store.append("failed", json.dumps(error) + "\n")


def store_of(name: str) -> dist.Store:
    """Connect to the store of all ranks, under the name of a contender."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"node.py/{attempt}/{name}", store)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _joined(kind: str, store: dist.Store, pretended: int | None) -> torch.device:
    """Return this rank's device, after it has joined the group."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        with contextlib.suppress(ImportError, OSError):  # before PyTorch loads its cuDNN
            import transformer_engine.pytorch  # noqa: F401
    if pretended:
        pretended_ranks.join(pretended)
        return device
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(minutes=10),
        device_id=device if kind == "cuda" else None,
    )
    return device


def measured(asked: argparse.Namespace, name: str, contender: Contender, device: torch.device) -> Row:
    """Return the row of a contender that trains in this process."""
    config = config_of(asked.config, asked.layers, dict(asked.set))
    length = length_of(asked, config)
    rows, vocabulary = asked.tokens // length, config.get_text_config().vocab_size
    model = built(config, device)
    flops, parameters = flops_per_token(model, length), sum(p.numel() for p in model.parameters())
    if asked.checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    data = batches(vocabulary, rows, length, asked.steps, dist.get_rank()).to(device)
    start = time.perf_counter()
    mesh = mesh_of(asked.parallel, device)
    inputs = {"input_ids": data[0], "labels": data[0]}
    prepared = contender.prepare(Job(model, inputs, mesh, asked.checkpoint))
    del model
    step = _step(prepared, _wrapped(prepared.model, asked, mesh), asked.learning_rate)
    seconds, first, later, losses = _train(step, data, device, start)
    row = Row(name, first=first, later=later, parameters=parameters, device=name_of(device))
    if not asked.pretend_ranks:
        row.first_loss, row.loss = _mean(losses[0]), _mean(losses[-1])
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    row.tokens_per_second, row.low, row.high = (asked.tokens / each for each in (middle, high, low))
    if device.type == "cuda":
        row.peak, row.reserved = map(_slowest, _memory(device), [device] * 2)
        row.mfu = row.tokens_per_second * (flops or 0.0) / PEAKS.get(row.device, float("inf"))
    return row


def name_of(device: torch.device) -> str:
    """Return the name of a GPU, or "CPU"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def length_of(asked: argparse.Namespace, config: Any) -> int:
    """Return the tokens of a sequence."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None) or asked.tokens
    length = asked.length or min(longest, asked.tokens)
    if length > longest or asked.tokens % length:
        raise ValueError(
            f"expected --tokens {asked.tokens} to be a multiple of --length, and --length to be at most "
            f"{longest}, got {length}; pass others"
        )
    return length


def mesh_of(parallel: str, device: torch.device) -> DeviceMesh | None:
    """Return the mesh to shard over: None for DDP and none."""
    kind, _, sizes = parallel.partition(":")
    if kind == "fsdp2":
        return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shards",))
    if kind == "hsdp":
        replicas, shards = map(int, sizes.split("x"))
        return init_device_mesh(device.type, (replicas, shards), mesh_dim_names=("replicas", "shards"))
    return None


def _wrapped(model: nn.Module, asked: argparse.Namespace, mesh: DeviceMesh | None) -> nn.Module:
    """Return the model sharded block by block, under DDP, or unchanged."""
    if mesh is not None:
        for block in blocks_of(model):
            fully_shard(block, mesh=mesh, reshard_after_forward=asked.reshard)
        fully_shard(model, mesh=mesh)
        if asked.pretend_ranks:
            pretended_ranks.copy_within(model)
        return model
    return DistributedDataParallel(model, gradient_as_bucket_view=True) if asked.parallel == "ddp" else model


def _step(prepared: Prepared, model: nn.Module, rate: float) -> Callable[[Tensor], Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)

    def step(ids: Tensor) -> Tensor:
        with prepared.around_forward():
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        prepared.after_step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _train(
    step: Callable[[Tensor], Tensor], data: Tensor, device: torch.device, start: float
) -> tuple[list[float], float, float, list[Tensor]]:
    """Train on all batches. Wait for the GPU after the first step only.

    Returns:
        The seconds of each step of the second half, the seconds from `start` to the end of the first step,
        the seconds beyond the median in the other steps of the first half, and all losses.
    """
    gc.collect()
    _wait(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    losses = [step(data[0])]
    _wait(device)
    first = time.perf_counter()
    half = len(data) // 2
    losses += [step(ids) for ids in data[1:half]]
    _wait(device)
    warm = time.perf_counter()
    marks = [_mark(device)]
    for ids in data[half:]:
        losses.append(step(ids))
        marks.append(_mark(device))
    _wait(device)
    seconds = [_slowest(_between(*pair), device) for pair in pairwise(marks)]
    later = warm - first - (half - 1) * statistics.median(seconds)
    return seconds, _slowest(first - start, device), _slowest(max(0.0, later), device), losses


def _wait(device: torch.device) -> None:
    """Wait for the GPU, and for the other ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(one: Any, other: Any) -> float:
    return other - one if isinstance(one, float) else one.elapsed_time(other) / 1e3


def _slowest(value: float, device: torch.device) -> float:
    """Return the largest value of all ranks."""
    largest = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def _mean(loss: Tensor) -> float:
    total = loss.double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _memory(device: torch.device) -> tuple[float, float]:
    return torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30
