"""Measure the cost of te_transform: a conversion, and each call of a converted model.

    python benchmarks/convert_speed.py [--layers 24] [--only converting running] [--json]

The backend is plain PyTorch, on the CPU. Each measurement runs alone, in a process of its own. Nothing is
asserted. The last column has the number of cores that other programs kept busy. Above a few tenths of a
core, the times mean little. The stack of 24 layers takes 12 GB.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import pairwise, product
from typing import Any

import measure
import torch
from command_line import positive
from models import SUBJECTS, VOCAB, llama, loss
from rich.console import Console
from rich.table import Table
from torch import nn

import te_transform

STAGES = {
    "first_calls": "capturing and rewriting",
    "make_adjacent": "making parameters adjacent",
    "reported": "the report",
}
MEASURED = ("converting", "running")
RUNS = 3  # runs per conversion; the fastest counts, because disturbances only slow a run down


@dataclass(frozen=True)
class Row:
    """A line of the table; --json also prints `data`."""

    what: str
    result: str
    detail: str
    data: dict[str, Any]


# Measurements, each in a process of its own


def conversion(layers: int) -> dict[str, Any]:
    """Convert a stack of `layers` Llama layers in place. Return seconds by stage, and memory in layers."""
    model, ids = llama(layers), torch.randint(VOCAB, (2, 8))
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    _touch(2 * layer)
    gc.collect()
    gc.disable()  # as timeit does: a full collection takes 0.2 s, in some runs only
    with (
        measure.memory() as used,
        measure.stopwatch(import_module("te_transform.convert"), tuple(STAGES)) as stages,
    ):
        start = time.perf_counter()
        te_transform.convert(model, ids, backend="torch", verify=False, inplace=True)
        seconds = time.perf_counter() - start
    fused = len(te_transform.report(model).fused)
    held = {"extra": (used.peak - used.before) / layer, "kept": (used.after - used.before) / layer}
    return {"layers": layers, "fused": fused, "seconds": seconds, **held, **stages}


def joining(layers: int) -> dict[str, float]:
    """Return the seconds to copy the joined weights of each layer, which every conversion needs."""
    model = llama(layers)
    _touch(2 * sum(p.nbytes for p in model.model.layers[0].parameters()))
    start = time.perf_counter()
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for linears in (
                (attention.q_proj, attention.k_proj, attention.v_proj),
                (mlp.gate_proj, mlp.up_proj),
            ):
                joined = torch.cat([linear.weight for linear in linears])
                for linear, rows in zip(
                    linears, joined.split([m.out_features for m in linears]), strict=True
                ):
                    linear.weight.data = rows
    return {"joining": time.perf_counter() - start}


def _touch(size: int) -> None:
    """Write to `size` bytes of memory before the measurement.

    In a virtual machine, the first access to a page takes several times as long.
    """
    torch.ones(size, dtype=torch.uint8)


def eager_forward(layers: int) -> dict[str, float]:
    """Return the seconds of the forward that a conversion captures: the first of its process."""
    model, ids = llama(layers).train(), torch.randint(VOCAB, (2, 8))
    with torch.no_grad():
        start = time.perf_counter()
        model(ids)
        return {"eager_forward": time.perf_counter() - start}


def running(subject: int, compiled: bool, backward: bool) -> dict[str, Any]:
    """Compare a forward in eval mode without gradients, or a forward and backward in train mode."""
    torch.set_num_threads(SUBJECTS[subject].threads or torch.get_num_threads())
    model, kwargs = SUBJECTS[subject].build()
    converted = te_transform.convert(model, kwargs, backend="torch", verify=False, compile=compiled)
    if compiled:
        model.compile()
    calls = [_call(m.train(backward), kwargs, backward) for m in (model, converted)]
    return asdict(measure.interleaved(*calls, calls=SUBJECTS[subject].calls))


def _call(model: nn.Module, kwargs: dict[str, Any], backward: bool) -> Callable[[], None]:
    def forward() -> None:
        with torch.no_grad():
            model(**kwargs)

    def both() -> None:
        model.zero_grad()
        loss(model(**kwargs)).backward()

    return both if backward else forward


# The table


def main() -> None:
    """Measure and print."""
    summary, _, rest = __doc__.partition("\n")
    parser = argparse.ArgumentParser(description=summary, epilog=rest)
    parser.add_argument("--layers", type=positive, default=24, help="of the largest stack (24 take 12 GB)")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--only", choices=MEASURED, nargs="+", default=MEASURED, help="what to measure")
    asked = parser.parse_args()
    measured = {"converting": lambda: _conversions(asked.layers), "running": _running}
    rows = [row for name in asked.only for row in measured[name]()]
    if asked.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        Console().print(_table(rows))


def _conversions(layers: int) -> Iterator[Row]:
    done = []
    for count in sorted({max(layers * quarter // 4, 1) for quarter in (1, 2, 3, 4)}):
        found = _fastest(conversion, count, "seconds")
        found |= _fastest(eager_forward, count, "eager_forward") | _fastest(joining, count, "joining")
        done.append(found)
        stages = ", ".join(f"{words} {found[name]:.2f}" for name, words in STAGES.items())
        yield Row(
            f"convert {count} Llama layers in place (h 4096, bf16, 2x8 tokens)",
            f"{found['seconds']:.2f} s, peak +{found['extra']:.2f} layers",
            f"{stages} s; alone, the eager forward {found['eager_forward']:.2f} s, copying joined weights "
            f"{found['joining']:.2f} s; {found['kept']:+.2f} layers after",
            found,
        )
    between = ", ".join(f"{a['layers']} to {b['layers']}" for a, b in pairwise(done))
    added = _added(done, [found["seconds"] for found in done])
    yield Row("each layer more", ", ".join(f"{s:.3f} s" for s in added), f"from {between}", {"added": added})
    own = _added(done, [found["seconds"] - found["eager_forward"] - found["joining"] for found in done])
    less = "less the model's own forward and the copying of joined weights"
    yield Row("of that, our own", ", ".join(f"{s:.3f} s" for s in own), less, {"added": own})


def _fastest(function: Callable[[int], dict[str, Any]], layers: int, key: str) -> dict[str, Any]:
    return min((_alone(function, layers) for _ in range(RUNS)), key=lambda run: run[key])


def _added(done: list[dict[str, Any]], seconds: list[float]) -> list[float]:
    """Return the seconds for each additional layer, from one stack to the next."""
    pairs = pairwise(zip((found["layers"] for found in done), seconds, strict=True))
    return [(b - a) / (more - less) for (less, a), (more, b) in pairs]


def _running() -> Iterator[Row]:
    for index, compiled, backward in product(range(len(SUBJECTS)), (False, True), (False, True)):
        how = f"{'torch.compile' if compiled else 'eager'}, {'forward + backward' if backward else 'forward'}"
        found = _alone(running, index, compiled, backward)
        yield _ratio(f"converted / original, {SUBJECTS[index].name}, {how}", found)


def _ratio(what: str, found: dict[str, Any]) -> Row:
    times = f"{1e3 * found['one']:.4g} -> {1e3 * found['other']:.4g} ms"
    spread = f"quartiles {found['low']:.3f} to {found['high']:.3f} of {found['rounds']} pairs"
    return Row(what, f"x {found['ratio']:.3f}", f"{times}, {spread}", found)


def _alone(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Return the result of function(*args) in a new process, with its own memory and caches."""
    print(f"{function.__name__}{args}", file=sys.stderr)
    spawn = multiprocessing.get_context("spawn")
    with measure.load() as load, ProcessPoolExecutor(1, mp_context=spawn) as process:
        found = process.submit(function, *args).result()
    return found | {"others": load.others, "load_average": os.getloadavg()[0]}


def _table(rows: list[Row]) -> Table:
    table = Table(title=f"te_transform on {os.cpu_count()} cores, torch {torch.__version__}")
    for column, ratio in (("what", 4), ("result", 3), ("detail", 6)):
        table.add_column(column, ratio=ratio)
    table.add_column("others' cores, load", justify="right", ratio=1)
    for row in rows:
        load = f"{row.data['others']:.1f}, {row.data['load_average']:.1f}" if "others" in row.data else ""
        table.add_row(row.what, row.result, row.detail, load)
    return table


if __name__ == "__main__":
    main()
