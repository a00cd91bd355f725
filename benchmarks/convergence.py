"""Compare the losses of a GPT on real text: the original in bf16, and converted in bf16 and in each recipe.

    python benchmarks/convergence.py [--steps 300] [--json losses.json] [--plot docs/loss_curves.svg]
    python benchmarks/convergence.py --read losses.json --plot docs/loss_curves.svg

The model is nanoGPT with 6 layers of width 512. The text is the bytes of the Python standard library's
sources. All runs start from the same weights and see the same batches. The model is too small to gain from
TE, but its modules run in TE's kernels. The script prints the mean loss over each fifth of the steps. Nothing
is asserted.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from command_line import json_file, output_file, positive
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import te_transform
from te_transform.backends import limits
from te_transform.execution.console import progress
from tests.models.nanogpt import GPT, GPTConfig

BATCH, LENGTH = 16, 512
RUNS: dict[str, dict[str, Any] | None] = {
    "original, bf16": None,
    "converted, bf16": {"recipe": None},
    "converted, fp8-delayed": {"recipe": "fp8-delayed"},
    "converted, fp8-delayed-fast": {"recipe": "fp8-delayed-fast"},
    "converted, fp8-current": {"recipe": "fp8-current"},
    "converted, fp8-block": {"recipe": "fp8-block"},
}


def main() -> None:
    """Train, print, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=positive, default=300)
    parser.add_argument("--only", default="", help="comma-separated parts of the names of runs")
    parser.add_argument("--json", type=output_file, help="write the losses to this file")
    parser.add_argument("--plot", type=output_file, help="draw into this file (needs matplotlib)")
    parser.add_argument("--read", type=json_file, help="draw the losses in this file, train nothing")
    asked = parser.parse_args()
    losses = asked.read or {}
    chosen = {name: way for name, way in RUNS.items() if any(word in name for word in asked.only.split(","))}
    for name, found in () if asked.read else measured(chosen, asked.steps):
        losses[name] = found
        if asked.json:  # after each run, to keep the runs of an interrupted script
            Path(asked.json).write_text(json.dumps(losses))
    Console(width=130).print(_table(losses))
    if asked.plot:
        draw(losses, asked.plot)


def measured(chosen: dict[str, dict[str, Any] | None], steps: int) -> Iterator[tuple[str, list[float]]]:
    """Yield the name and the losses of each run, trained on a GPU with TE."""
    import transformer_engine.pytorch  # noqa: F401  before PyTorch has loaded a cuDNN of its own

    torch.manual_seed(0)
    config = GPTConfig(LENGTH, 256, n_layer=6, n_head=8, n_embd=512, dropout=0.0, flash=True, gelu="tanh")
    model = GPT(config).to("cuda", torch.bfloat16)
    text = standard_library()
    with limits.ignore_size_limits:
        for name, options in progress(chosen.items(), "training"):
            yield name, trained(model, options, text, steps)


def standard_library() -> Tensor:
    """Return the bytes of Python's own sources, in the order of their names."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(
        bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8
    ).long()


def trained(model: nn.Module, options: dict[str, Any] | None, text: Tensor, steps: int) -> list[float]:
    """Return the loss at each step.

    Args:
        options: the options of convert(), or None to train the original.
    """
    run = copy.deepcopy(model).train()
    if options is not None:
        idx, targets = batch(text, step=0)
        run = te_transform.convert(
            run, {"idx": idx[:2, :64], "targets": targets[:2, :64]}, backend="te", inplace=True, **options
        )
    optimizer = torch.optim.AdamW(run.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step in range(steps):
        idx, targets = batch(text, step)
        _, loss = run(idx, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def batch(text: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Return token ids and the next tokens, [BATCH, LENGTH]."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=generator)
    rows = torch.stack([text[start : start + LENGTH + 1] for start in starts]).cuda()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def draw(losses: dict[str, list[float]], path: str) -> None:
    """Draw the curves, and below them their differences from the first. Both are smoothed over 10 steps."""
    import matplotlib.pyplot as plt

    figure, (curves, apart) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, height_ratios=(2, 1))
    first = _smooth(next(iter(losses.values())))
    for name, values in losses.items():
        smooth = _smooth(values)
        curves.plot(smooth, label=name, linewidth=1)
        apart.plot([a - b for a, b in zip(smooth, first, strict=True)], linewidth=1)
    curves.set_ylabel("loss, nats per byte")
    curves.legend()
    apart.set_ylabel("less the original's")
    apart.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path)


def _smooth(values: list[float], width: int = 10) -> list[float]:
    return [sum(values[i : i + width]) / width for i in range(len(values) - width + 1)]


def _table(losses: dict[str, list[float]]) -> Table:
    fifth = len(next(iter(losses.values()))) // 5
    parts = [slice(part * fifth, (part + 1) * fifth) for part in range(5)]
    columns = [f"steps {part.start + 1} to {part.stop}" for part in parts]
    table = Table("", *columns, title="loss, nats per byte")
    for name, values in losses.items():
        table.add_row(name, *(f"{sum(values[part]) / fifth:.4f}" for part in parts))
    return table


if __name__ == "__main__":
    main()
