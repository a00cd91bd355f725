"""A converted model against the original, by turns in one process, on a GPU: what families.py, mixtures.py
and masks.py share."""

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
import transformer_engine.pytorch  # noqa: F401  before PyTorch loads a cuDNN of its own
import transformers
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
    """What all of them can be asked: names of models, seconds for each line, and a file for the rows."""
    made = argparse.ArgumentParser(description=about.partition("\n")[0])
    made.add_argument("names", nargs="*", choices=[*models, []], help="of models; all if none is given")
    made.add_argument("--seconds", type=float, default=2.0, help="for each line")
    made.add_argument("--json", default="", help="write the rows to this file too")
    return made


def in_one_way(
    about: str, models: Collection[str], build: Callable[[str], tuple[nn.Module, dict[str, Tensor]]]
) -> None:
    """Measure and print, both compiled if that is asked for."""
    options = parser(about, models)
    options.add_argument("--compile", action="store_true", help="both, the original by torch.compile")
    asked = options.parse_args()
    ways = {"compiled": {"compile": True}} if asked.compile else {"as it is": {}}
    show(rows(asked.names or models, build, ways, asked.seconds), asked.json)


def show(found: Iterable[dict[str, Any]], path: str) -> None:
    """Print each row when it is there, as JSON to stderr, and all as a table; write them to a file."""
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
    """Of each model in each way, by the options of its conversion; compiled, the original is by
    torch.compile."""
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
    """A training step and a forward of both, with the milliseconds of their kernels and what each takes of
    the GPU's memory beside the model, in MiB."""
    for what, call, training in (("training", step, True), ("forward", forward, False)):
        calls = [partial(call, each.train(training), batch) for each in (original, converted)]
        row = {"call": what} | asdict(measure.interleaved(*calls, seconds=seconds))
        yield row | {"kernels": [*map(_milliseconds_of_kernels, calls)], "peak": [*map(_peak, calls)]}


def built(kind: str, config: str, told: dict[str, Any]) -> nn.Module:
    """A model of transformers of random weights, in bf16 on the GPU."""
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**told)).to("cuda", torch.bfloat16)


def step(model: nn.Module, batch: dict[str, Tensor]) -> None:
    """A training step without optimizer."""
    model(**batch).loss.backward()
    model.zero_grad()
    torch.cuda.synchronize()


def forward(model: nn.Module, batch: dict[str, Tensor]) -> None:
    """A forward without gradients."""
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
