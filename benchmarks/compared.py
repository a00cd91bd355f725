"""Compare converted models with their originals on a GPU, for families.py, mixtures.py and masks.py.

The two models take turns in one process.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import measure
import torch
import transformers
import with_te  # noqa: F401
from command_line import on_gpu, output_file
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import te_transform

VOCABULARY = 8192
TOKENS = {"bos_token_id": 1, "pad_token_id": 0, "eos_token_id": 2, "vocab_size": VOCABULARY}
COLUMNS = (
    "model", "way", "call", "original, ms", "converted", "ratio", "quartiles", "kernels, ms", "ours",
    "peak, MiB", "ours",
)  # fmt: skip


def parser(about: str, models: Collection[str]) -> argparse.ArgumentParser:
    """Return the parser of the common options: names of models, seconds for each line, and an output file."""
    made = argparse.ArgumentParser(description=about.partition("\n")[0])
    made.add_argument("names", nargs="*", choices=[*models, []], help="names of models (default: all)")
    made.add_argument("--seconds", type=float, default=2.0, help="seconds for each line")
    made.add_argument("--json", type=output_file, help="also write the rows to this file")
    return made


def in_one_way(
    about: str, models: Collection[str], build: Callable[[str], tuple[nn.Module, dict[str, Tensor]]]
) -> None:
    """Measure and print; with --compile, compile both models."""
    options = parser(about, models)
    options.add_argument("--compile", action="store_true", help="compile both models")
    asked = on_gpu(options, "transformer_engine")
    ways = {"compiled": {"compile": True}} if asked.compile else {"as it is": {}}
    show(rows(asked.names or models, build, ways, asked.seconds), asked.json)


def show(found: Iterable[dict[str, Any]], path: str | None) -> None:
    """Print each row as JSON to stderr once it is measured, then all as a table. Write the rows to a file."""
    table = Table(*COLUMNS, title=f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    kept = []
    for row in found:
        print(json.dumps(row), file=sys.stderr, flush=True)
        kept.append(row)
        table.add_row(
            row["model"], row["way"], row["call"], f"{1e3 * row['one']:.2f}", f"{1e3 * row['other']:.2f}",
            f"{row['ratio']:.3f}", f"{row['low']:.3f} to {row['high']:.3f}",
            *(f"{each:.2f}" for each in row["kernels"]), *(f"{each:,.0f}" for each in row["peak"]),
        )  # fmt: skip
    Console().print(table)
    if path:
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in kept))


def rows(
    names: Iterable[str],
    build: Callable[[str], tuple[nn.Module, dict[str, Tensor]]],
    ways: dict[str, dict[str, Any]],
    seconds: float,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of each model, for each set of conversion options.

    If the options compile the conversion, torch.compile compiles the original.
    """
    for name in names:
        torch._dynamo.reset()
        model, batch = build(name)
        for way, options in ways.items():
            original = torch.compile(model) if options.get("compile") else model
            converted = te_transform.convert(model, batch, **options)
            for row in _compared(original, converted, batch, seconds):
                yield {"model": name, "way": way} | row


def _compared(
    original: nn.Module, converted: nn.Module, batch: dict[str, Tensor], seconds: float
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a training step and of a forward.

    Each row has the time of the kernels in milliseconds, and the peak memory beside the model in MiB.
    """
    for what, call, training in (("training", step, True), ("forward", forward, False)):
        calls = [partial(call, each.train(training), batch) for each in (original, converted)]
        row = {"call": what} | asdict(measure.interleaved(*calls, seconds=seconds))
        yield row | {"kernels": [*map(_milliseconds_of_kernels, calls)], "peak": [*map(_peak, calls)]}


def built(kind: str, config: str, told: dict[str, Any]) -> nn.Module:
    """Return a transformers model with random weights, in bf16, on the GPU."""
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**told)).to("cuda", torch.bfloat16)


def step(model: nn.Module, batch: dict[str, Tensor]) -> None:
    """Run a training step without an optimizer."""
    model(**batch).loss.backward()
    model.zero_grad()
    torch.cuda.synchronize()


def forward(model: nn.Module, batch: dict[str, Tensor]) -> None:
    """Run a forward without gradients."""
    with torch.no_grad():
        model(**batch)
    torch.cuda.synchronize()


def _peak(call: Callable[[], None]) -> float:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _milliseconds_of_kernels(call: Callable[[], None]) -> float:
    call()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
    return sum(event.self_device_time_total for event in found.key_averages()) / 1e3
