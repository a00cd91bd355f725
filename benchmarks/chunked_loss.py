"""Compare a whole head and loss with chunked_loss=True: time and memory of a step on a GPU.

    python benchmarks/chunked_loss.py [--layers 4] [--vocabulary 32000 128256]

The model is a Llama of the 8B shape with 2 x 4096 tokens, in bf16, on TE. Contenders take turns in one
process, and times are medians. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from command_line import on_gpu, positive
from rich.console import Console
from rich.table import Table
from transformers import LlamaForCausalLM

import te_transform
from tests.models.llama import shape_of_8b

ROUNDS = 9


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--vocabulary", type=positive, nargs="+", default=[32000, 128256])
    asked = on_gpu(parser)
    table = Table(title=f"{asked.layers} layers, {torch.cuda.get_device_name()}")
    for column in ("vocabulary", "", "ms", "peak beside weights, MiB"):
        table.add_column(column)
    for words in asked.vocabulary:
        for row in measured(asked.layers, words):
            table.add_row(f"{words:,}", *row)
    Console(width=100).print(table)


def measured(layers: int, words: int) -> list[tuple[str, ...]]:
    """Return the name, time and memory of each contender. All have the same weights."""
    ids = torch.randint(words, (2, 4096), device="cuda")
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(shape_of_8b(layers=layers, vocab_size=words, length=4096))
    torch.set_default_dtype(torch.float32)
    ways = {"original": model}
    sample = {"input_ids": ids, "labels": ids}
    for name, options in (("te_transform", {}), ("te_transform, chunked_loss=True", {"chunked_loss": True})):
        ways[name] = te_transform.convert(model, sample, backend="te", verify=False, **options)

    def step(model: torch.nn.Module) -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad(set_to_none=True)

    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(ROUNDS + 2):
        for name, each in ways.items():
            seconds = _timed(lambda each=each: step(each))
            times[name] += [seconds] if turn > 1 else []
    rows = []
    for name, each in ways.items():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(each)
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        rows.append((name, f"{1e3 * statistics.median(times[name]):.1f}", f"{peak:,.0f}"))
    return rows


def _timed(run: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
