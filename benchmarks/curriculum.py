"""Measure the sequence-length curriculum: its cost per step, and its effect on loss and stability.

    python benchmarks/curriculum.py [--steps 1000] [--json curriculum.json] [--plot docs/curriculum.svg]
    python benchmarks/curriculum.py --read curriculum.json --plot docs/curriculum.svg
    python benchmarks/curriculum.py --steps 30 --batch 4 --length 128 --layers 2 --width 64  # on a CPU

The model and the text are those of examples/train_gpt.py. Each run has the same budget of tokens. Runs use
the usual learning rate, and four times the usual learning rate.

| column | meaning |
| --- | --- |
| loss ratio | the loss of a step over the lowest loss before it |
| norms | of sqrt(v) over all parameters, where v are Adam's second moments |
| r | Pearson's correlation of loss ratio and norm over the steps (arXiv 2108.06084, section 3) |

Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from command_line import json_file
from loss_plot import draw
from measure import interleaved
from rich.console import Console
from rich.table import Table
from torch.optim.lr_scheduler import CosineAnnealingLR
from train_gpt import GPU, Run
from train_gpt import arguments as arguments_of_example
from transformers.utils import logging

from te_transform import training

EVERY = 5  # steps between two readings of the norms
SPIKE = 1.2  # the loss ratio from which a step counts as a spike


def main() -> None:
    """Measure the cost and train, or read the runs; then print, write and draw."""
    logging.set_verbosity_error()
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--skip-training", action="store_true")
    parser.add_argument("--read", type=json_file)
    ours, sys.argv[1:] = parser.parse_known_args()
    asked = arguments_of_example()
    console = Console(width=130)
    runs: dict[str, Any] = ours.read or {}
    if not ours.read:
        dist.init_process_group("nccl" if GPU else "gloo", rank=0, world_size=1, store=dist.HashStore())
        console.print(costs(asked))
        for name, options in () if ours.skip_training else settings(asked).items():
            runs[name] = trained(argparse.Namespace(**vars(asked) | options))
            Path(asked.json).write_text(json.dumps(runs))  # keeps the runs of an interrupted script
        dist.destroy_process_group()
    if runs:
        console.print(summary(runs))
        draw({name: run["eval"] for name, run in runs.items()}, asked.plot)


def settings(asked: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the options of each run by its name."""
    high = 4 * asked.lr
    return {
        f"lr {asked.lr:g}": {},
        f"lr {asked.lr:g}, curriculum": {"curriculum": True},
        f"lr {asked.lr:g}, curriculum, reshaped": {"curriculum": True, "reshape": True},
        f"lr {high:g}": {"lr": high},
        f"lr {high:g}, curriculum": {"lr": high, "curriculum": True},
    }


def costs(asked: argparse.Namespace) -> Table:
    """Compare training steps on batches that the wrapper cuts with steps on batches cut before."""
    table = Table(
        "tokens", "step, ms", "with the wrapper", "quartiles", "cut() alone", title="the wrapper's cost"
    )
    run = Run(argparse.Namespace(**vars(asked) | {"curriculum": False}), 0, 1)
    whole = next(iter(run.loader))
    for length in (64, asked.length // 2, asked.length):
        curriculum = training.SequenceCurriculum(
            cycle([whole]), max_length=asked.length, total_steps=10**9, schedule={0: length}, bucket=length,
            longest_first=False,
        )  # fmt: skip
        short = {name: tensor[:, :length].contiguous() for name, tensor in whole.items()}
        plain, wrapped = cycle([short]), iter(curriculum)
        ratio = interleaved(partial(steps, run, plain), partial(steps, run, wrapped), seconds=20.0)
        start = time.perf_counter()
        for _ in range(1000):
            curriculum.cut(whole)
        alone = time.perf_counter() - start  # seconds of 1000 calls: milliseconds of one
        shown = (f"{100 * ratio.one:.2f}", f"{ratio.ratio:.4f}", f"{ratio.low:.4f} to {ratio.high:.4f}")
        table.add_row(str(length), *shown, f"{1000 * alone:.0f} us, {100 * alone / (100 * ratio.one):.2f}%")
    return table


def steps(run: Run, batches: Iterator[dict[str, torch.Tensor]], count: int = 10) -> None:
    """Take ten training steps, and wait for the GPU after the last."""
    for _ in range(count):
        run.step(next(batches))
    if GPU:
        torch.cuda.synchronize()


def trained(asked: argparse.Namespace) -> dict[str, Any]:
    """Train for the budget of tokens; return losses, lengths, norms, and evaluations with their seconds."""
    run, full = Run(asked, 0, 1), asked.batch * asked.length
    cosine = CosineAnnealingLR(run.optimizer, asked.steps, eta_min=asked.lr / 10)
    schedule = training.TokenSchedule(cosine, full, warmup_steps=asked.warmup)
    found: dict[str, Any] = {"loss": [], "length": [], "norms": [], "eval": []}
    seconds, losses = 0.0, []
    for step, batch in enumerate(run.loader, 1):
        start = time.perf_counter()
        losses.append(run.step(batch))
        schedule.step(batch["input_ids"].numel())
        if GPU:
            torch.cuda.synchronize()
        seconds += time.perf_counter() - start
        found["length"].append(batch["input_ids"].shape[1])
        if step % EVERY == 0:
            found["norms"].append([step, *training.variance_norms(run.optimizer)])
        if step % asked.every == 0 or schedule.tokens >= asked.steps * full:
            point = {"step": step, "tokens": schedule.tokens, "seconds": seconds, "loss": run.evaluated()}
            found["eval"].append(point)
        if schedule.tokens >= asked.steps * full:
            break
    return found | {"loss": torch.stack(losses).tolist()}


def loss_ratios(losses: list[float]) -> list[float]:
    """Return each loss over the lowest before it; 1 for the first."""
    lowest, found = losses[0], []
    for loss in losses:
        found.append(loss / lowest)
        lowest = min(lowest, loss)
    return found


def summary(runs: dict[str, Any]) -> Table:
    """Return a table of the runs."""
    columns = ("steps", "loss", "seconds", "to the first's loss: tokens", "seconds", "worst ratio", "spikes")
    table = Table("", *columns, "norm l1", "r", "norm max", "r", title=f"spikes: ratio over {SPIKE}")
    target = next(iter(runs.values()))["eval"][-1]["loss"]
    for name, run in runs.items():
        last, ratios = run["eval"][-1], loss_ratios(run["loss"])
        there = next((point for point in run["eval"] if point["loss"] <= target), None)
        reached = (
            (f"{there['tokens'] / 1e6:.2f}M", f"{there['seconds']:.1f}") if there else ("never", "never")
        )
        norms = []
        for values in list(zip(*run["norms"], strict=True))[1:]:
            at = [ratios[int(step) - 1] for step, *_ in run["norms"]]
            norms += [f"{max(values):.3g}", correlation(at, list(values))]
        counts = (f"{max(ratios):.2f}", str(sum(ratio > SPIKE for ratio in ratios)))
        table.add_row(
            name,
            str(last["step"]),
            f"{last['loss']:.4f}",
            f"{last['seconds']:.1f}",
            *reached,
            *counts,
            *norms,
        )
    return table


def correlation(one: list[float], other: list[float]) -> str:
    """Return Pearson's r, or a dash if one of the two does not vary."""
    function: Callable[..., float] = statistics.correlation
    try:
        return f"{function(one, other):.2f}"
    except statistics.StatisticsError:
        return "-"


if __name__ == "__main__":
    main()
