"""Fit the times of te_transform/plan/cost.py to measured times, without a GPU.

    python benchmarks/fit_cost.py benchmarks/grid.jsonl benchmarks/llama.jsonl

The first file was written by grid.py. The second has Llamas of the shapes of compile_speed.py. The script
prints the times, in seconds per unit, and the error. To compute the error, it predicts each point by times
that it fits to all other points.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers as hf
from command_line import json_lines
from grid import VOCABULARY, model_of
from rich.progress import track

from te_transform.inspect import plans_of
from te_transform.plan.cost import ORIGINAL, RUN_MODES, RunMode, works_of
from te_transform.plan.work import Work

# Initial values: an H100's data sheet, and a few microseconds for a launch.
START = {
    "product": 1.6e-15, "product in FP8": 0.9e-15, "quantized": 1e-12, "attention": 2.5e-15, "launch": 2e-6,
    "product, odd": 7.87e-15, "bytes": 4e-13, "bytes, fused": 4e-13, "bytes, compiled": 4e-13,
    "call": 2e-5, "call, captured": 2e-5,
    "call, fused": 4e-5, "call, compiled": 2e-5, "call, replayed": 3e-6,
    "call in FP8": 1e-4, "call, captured in FP8": 1e-4,
    "call, fused in FP8": 1e-4, "call, compiled in FP8": 4e-5,
    "call, replayed in FP8": 2e-5,
    "call forward": 3e-4, "call, captured forward": 3e-4,
    "call, fused forward": 3e-4, "call, compiled forward": 5e-4,
    "call, replayed forward": 3e-4,
    "call backward": 1e-3, "call, captured backward": 1e-3,
    "call, fused backward": 1e-3, "call, compiled backward": 2e-3,
    "call, replayed backward": 1e-3,
}  # fmt: skip


@dataclass
class Point:
    """A call in one mode: its work, and the measured seconds."""

    where: str
    mode: RunMode
    work: Work
    seconds: float


def main() -> None:
    """Fit and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("grid", type=json_lines)
    parser.add_argument("llama", type=json_lines)
    asked = parser.parse_args()
    points = [point for row in track(asked.grid + asked.llama, "counting") for point in _points(row)]
    places = list(dict.fromkeys(point.where for point in points))
    off = []
    for place in track(places, "fitting"):
        times = _fitted([point for point in points if point.where != place])
        found = [
            (point.mode.seconds(point.work, times) / point.seconds, point)
            for point in points
            if point.where == place
        ]
        off += [abs(math.log(ratio)) for ratio, _ in found]
        for ratio, point in found:
            print(f"{place}, {point.mode.calls}: {1e3 * point.seconds:.2f} ms, predicted {ratio:.2f} of it")
    times = _fitted(points)
    print(json.dumps({name: float(f"{seconds:.3g}") for name, seconds in times.items()}, indent=4))
    half, worst = math.expm1(statistics.median(off)), math.expm1(max(off))
    print(f"{len(points)} points; off by {half:.0%} in half of them, by {worst:.0%} at the most")


def _points(row: dict[str, Any]) -> Iterator[Point]:
    training = row.get("mode", "training") == "training"
    with torch.device("meta"):
        model, inputs = model_of(row) if "model" in row else _llama(row)
    where = " ".join(str(row[name]) for name in ("model", "shape", "mode", "width", "tokens") if name in row)
    planned = cache(lambda recipe: plans_of(model, inputs, backend="te", recipe=recipe))
    for name, ms in row["ms"].items():
        if name != "eager" and not name.startswith("te_transform"):
            continue
        plans, precision = planned("fp8-delayed" if "fp8-delayed" in name else None)
        asked = ORIGINAL if name == "eager" else RUN_MODES["compiled" in name, "CUDA graphs" in name]
        ((mode, work),) = works_of(plans, asked, precision, training)
        if mode is asked or precision is not None or row.get("model") == "llama" or row.get("notes"):
            yield Point(where, mode, work, ms / 1e3)
        # older rows were measured before models without gated MLPs ran as captured


def _llama(row: dict[str, Any]) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = hf.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=row["width"],
        intermediate_size=row["ffn"],
        num_hidden_layers=row["layers"],
        num_attention_heads=row["heads"],
        num_key_value_heads=row["groups"],
        use_cache=False,
    )
    ids = torch.zeros(row["batch"], row["length"], dtype=torch.int64)
    return hf.LlamaForCausalLM(config).bfloat16(), {"input_ids": ids, "labels": ids}


def _fitted(points: Sequence[Point]) -> dict[str, float]:
    """Return the times with the least sum of squared logarithms of predicted / measured."""
    logs = torch.zeros(len(START), dtype=torch.float64, requires_grad=True)
    start = torch.tensor([*START.values()], dtype=torch.float64)
    measured = torch.tensor([point.seconds for point in points], dtype=torch.float64)
    gpu, cpu = (torch.tensor(rows, dtype=torch.float64) for rows in _linear(points))
    optimizer = torch.optim.LBFGS([logs], max_iter=300, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        times = start * logs.exp()
        predicted = torch.maximum(gpu @ times, cpu @ times)
        # keeps times that no point depends on near their initial values
        total = (predicted / measured).log().square().mean() + 1e-3 * logs.square().mean()
        total.backward()
        return total

    optimizer.step(loss)
    return dict(zip(START, (start * logs.exp()).tolist(), strict=True))


def _linear(points: Sequence[Point]) -> tuple[list[list[float]], list[list[float]]]:
    """Return how many units of each time of START the GPU and the CPU take for each point."""
    units = [{name: float(name == one) for name in START} for one in START]
    gpu = [[point.mode.gpu_seconds(point.work, unit) for unit in units] for point in points]
    cpu = [[point.mode.cpu_seconds(point.work, unit) for unit in units] for point in points]
    return gpu, cpu


if __name__ == "__main__":
    main()
