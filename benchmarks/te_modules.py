"""Compare four ways to run bf16 products, uncompiled, on a Hopper GPU.

    python benchmarks/te_modules.py [MODEL ...] [--widths 2048 4096] [--tokens 2048 8192] [--layers 10]
                                    [--json PATH]

| column | products run |
| --- | --- |
| as captured | as captured |
| plain PyTorch | in fused ops in plain PyTorch |
| TE for gated MLPs | in TE's modules for gated MLPs, else in plain PyTorch |
| TE for all | in TE's modules |

Models are those of grid.py, each converted once; the choice of TE's modules changes between calls. Times are
relative to the original, by turns in one process. The limits in backends/limits.py and `gains` of the fused
ops come from these numbers. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grid
import measure
import torch
import with_te  # noqa: F401
from command_line import on_gpu, output_file, positive
from rich.console import Console
from rich.table import Table

import te_transform
from te_transform.backends import limits, plain
from te_transform.execution.small_batch import SmallBatch

# True if products run as captured, and the types of fused ops that run in TE's modules
WAYS: dict[str, tuple[bool, tuple[type, ...]]] = {
    "as captured": (True, ()),
    "plain PyTorch": (False, ()),
    "TE for gated MLPs": (False, (plain.LayerNormMLP,)),
    "TE for all": (False, (plain.LayerNormLinear,)),  # includes MLPs
}
ROUNDS, SAMPLE = 9, 0.02  # the number of samples of each contender, and the seconds of a sample


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("models", nargs="*", choices=[*grid.MODELS, []], help="default: all")
    parser.add_argument("--widths", nargs="+", type=positive, default=(2048, 4096, 8192))
    parser.add_argument("--tokens", nargs="+", type=positive, default=(2048, 8192), help="tokens of a step")
    parser.add_argument("--layers", type=positive, default=0, help="number of layers (default: grid.py's)")
    parser.add_argument("--json", type=output_file, help="also write the rows to this file")
    asked = on_gpu(parser, "transformer_engine")
    table = Table(title=f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for column in ("model", "mode", "width", "tokens", "original, ms", *WAYS):
        table.add_column(column)
    rows = []
    for each in itertools.product(asked.models or grid.MODELS, grid.MODES, asked.widths, asked.tokens):
        point = dict(zip(("model", "mode", "width", "tokens"), each, strict=True))
        point |= {"layers": asked.layers, "recipe": None}
        before, *ours = milliseconds(point).values()
        rows.append(point | {"ms": before} | dict(zip(WAYS, ours, strict=True)))
        table.add_row(*map(str, each), f"{before:.2f}", *(f"{ms / before:.3f}" for ms in ours))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    Console().print(table)
    if asked.json:
        Path(asked.json).write_text("".join(json.dumps(row) + "\n" for row in rows))


def milliseconds(point: dict[str, Any]) -> dict[str, float]:
    """Return the time of a step of each contender, the original first."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    with torch.device("cuda"):
        (model, inputs), (copy, _) = grid.model_of(point), grid.model_of(point)
    copy = te_transform.convert(copy, inputs, backend="te", verify=False, inplace=True)
    steps = [grid.step_of(point, each, inputs, contextlib.nullcontext) for each in (model, copy)]
    ways = {"original": (steps[0], (False, ()))} | {name: (steps[1], way) for name, way in WAYS.items()}
    calls: dict[str, int] = {}
    for name, (step, way) in ways.items():
        with running(*way):
            for _ in range(4):
                step()
            calls[name] = max(2, round(SAMPLE / measure.in_a_row(step, 3)))
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, (step, way) in ways.items():
            with running(*way):
                samples[name].append(measure.in_a_row(step, calls[name]))
    return {name: 1e3 * statistics.median(each) for name, each in samples.items()}


@contextlib.contextmanager
def running(as_captured: bool, in_te: tuple[type, ...]) -> Iterator[None]:
    """Run products as captured, or in fused ops of which `in_te` run in TE."""
    gains = property(lambda op: isinstance(op, in_te))
    with (
        patch.object(SmallBatch, "refuse", lambda self, arguments: "asked for" if as_captured else None),
        patch.object(limits, "break_even_rows", lambda width, in_fp8, in_cuda_graphs=False: 0),
        patch.object(plain.LayerNormLinear, "gains", gains),
        patch.object(plain.LayerNormMLP, "gains", gains),
    ):
        yield


if __name__ == "__main__":
    main()
