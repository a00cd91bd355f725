"""Measure nanoGPT as published, and each change that makes it faster: 124M parameters, 12 x 1024 tokens.

    python benchmarks/nanogpt.py [--rows 12] [--bf16] [--json PATH]

A step is a forward and backward under torch.autocast in bf16, as nanoGPT trains, or with weights in bf16.
The changes are those of PyTorch's own article on this model:

- attention written out, or each of PyTorch's attention kernels,
- compiled, and as CUDA graphs,
- a padded vocabulary.

Times are medians of consecutive steps in milliseconds, by turns. Memory is what PyTorch takes on the GPU for
model, gradients and a step. The rows that fit are computed from it: all memory but the weights is assumed to
grow with the rows.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import measure
import torch
import with_te  # noqa: F401
from command_line import on_gpu, output_file, positive
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import te_transform
from tests.models.nanogpt import GPT, GPTConfig

LENGTH, VOCABULARY = 1024, 50257
SIZES = {"block_size": LENGTH, "n_layer": 12, "n_head": 12, "n_embd": 768, "dropout": 0.0, "bias": False}
STEPS, ROUNDS = 5, 7

Step = Callable[[], None]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rows", type=positive, default=12, help="rows of 1024 tokens in a step")
    parser.add_argument("--bf16", action="store_true", help="weights in bf16, without torch.autocast")
    parser.add_argument("--json", type=output_file, help="also write the rows to this file")
    asked = on_gpu(parser, "transformer_engine")
    calls, memory = {}, {}
    for name, make in _variants(asked.bf16).items():
        calls[name], memory[name] = _prepared(partial(make, asked.bf16), asked.rows)
        print(name, memory[name], flush=True)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            samples[name].append(measure.in_a_row(call, STEPS))
    rows = [
        {"name": name, "ms": 1e3 * statistics.median(each), "MiB": memory[name][0], "rows": memory[name][1]}
        for name, each in samples.items()
    ]
    if asked.json:
        Path(asked.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    table = Table("", "ms", "MiB", "rows that fit", title=torch.cuda.get_device_name())
    for row in rows:
        table.add_row(row["name"], f"{row['ms']:.2f}", f"{row['MiB']:,}", str(row["rows"]))
    Console(width=100).print(table)


def _variants(bf16: bool) -> dict[str, Callable[[bool, int], Step]]:
    """Return a function for each variant, from a flag for bf16 weights and a number of rows to a step."""
    kernels = {
        "math": SDPBackend.MATH,
        "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "cuDNN": SDPBackend.CUDNN_ATTENTION,
    }
    found: dict[str, Callable[[bool, int], Step]] = {"attention written out": partial(_original, flash=False)}
    for name, kernel in kernels.items():
        found[f"attention: {name}"] = partial(_original, around=partial(sdpa_kernel, kernel))
    found["compiled"] = partial(_original, mode="default")
    found["compiled, 50304 words"] = partial(_original, mode="default", words=50304)
    found["compiled, CUDA graphs"] = partial(_original, mode="reduce-overhead")
    ours: dict[str, dict[str, Any]] = {
        "te_transform": {},
        "te_transform, padded": {"pad_vocabulary": True},
        "te_transform, padded, CUDA graphs": {"pad_vocabulary": True, "graphs": True},
        "te_transform, compiled": {"compile": True},
        "te_transform, compiled, CUDA graphs": {"compile": True, "graphs": True},
    }
    if bf16:
        plan = te_transform.PrecisionPlan("fp8-delayed", small_calls=True)
        ours["te_transform fp8-delayed, compiled, CUDA graphs"] = ours[[*ours][-1]] | {"recipe": plan}
    return found | {name: partial(_converted, options=options) for name, options in ours.items()}


def _original(
    bf16: bool,
    rows: int,
    flash: bool = True,
    mode: str | None = None,
    words: int = VOCABULARY,
    around: Callable[[], Any] = contextlib.nullcontext,
) -> Step:
    model = _model(bf16, flash, words)
    if mode is not None:
        model.compile(mode=mode)
    return _step(model, bf16, rows, around)


def _converted(bf16: bool, rows: int, options: dict[str, Any]) -> Step:
    model = _model(bf16)
    ids = torch.randint(VOCABULARY, (rows, LENGTH), device="cuda")
    made = te_transform.convert(model, {"idx": ids, "targets": ids}, inplace=True, verify=False, **options)
    return _step(made, bf16, rows, contextlib.nullcontext)


def _model(bf16: bool, flash: bool = True, words: int = VOCABULARY) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(GPTConfig(vocab_size=words, flash=flash, **SIZES))
    return model.bfloat16() if bf16 else model


def _step(model: nn.Module, bf16: bool, rows: int, around: Callable[[], Any]) -> Step:
    ids = torch.randint(VOCABULARY, (rows, LENGTH), device="cuda")

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with around(), torch.autocast("cuda", torch.bfloat16, enabled=not bf16):
            _, loss = model(ids, ids)
        loss.backward()

    return step


def _prepared(make: Callable[[int], Step], rows: int) -> tuple[Step, tuple[int, int]]:
    """Return a warmed-up step, the MiB that it takes with its model, and the number of rows that fit."""
    before = _taken()
    step = make(rows)
    weights = _taken() - before
    for _ in range(6):
        step()
    _taken()
    step()
    torch.cuda.synchronize()
    taken = torch.cuda.memory_reserved() / 2**20 - before
    whole = torch.cuda.mem_get_info()[1] / 2**20
    return step, (round(taken), int(rows * (whole - weights) / (taken - weights)))


def _taken() -> float:
    """Return the MiB of tensors that PyTorch holds."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() / 2**20


if __name__ == "__main__":
    main()
