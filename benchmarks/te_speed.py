"""Compare te_transform on Transformer Engine with other tools: forward and backward on a Hopper GPU.

    python benchmarks/te_speed.py layer|llama [--only ours] [--rounds 15] [--profile NAME] [--json PATH]

| subject | model |
| --- | --- |
| layer | the layer of TE's quickstart: hidden 4096, ffn 16384, 32 heads, 2048 x 4 tokens, no mask |
| llama | LlamaForCausalLM with its loss: 8 layers of the 8B shape, 2 x 4096 tokens, vocabulary 32000 |

Contenders run in bf16 and FP8, by turns in one process, on the same weights. There is no dropout, and
gradients are dropped after each step. Times are medians with quartiles. Peak memory is that of a step,
without the weights of other contenders. Errors are of the output, relative to fp32 on the same bf16
weights. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import with_te  # noqa: F401
from command_line import on_gpu, output_file, positive
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import te_transform
from tests.models.llama import shape_of_8b
from tests.models.quickstart import BasicLayer

HAND = "hand port"  # ratios are relative to this contender, in the same precision
IN_GRAPHS = {"compile": True, "graphs": True}
_Context = Callable[[], contextlib.AbstractContextManager]
STEPS = 6  # warm-up steps: delayed scaling finds its scales, and CUDA graphs are recorded


@dataclass(frozen=True)
class Subject:
    """A model to train, and how each contender builds it."""

    build: Callable[[], nn.Module]
    inputs: dict[str, Tensor]
    example: dict[str, Tensor]
    port: Callable[[nn.Module], nn.Module]
    graphed: Callable[[nn.Module, Any], nn.Module]  # makes TE's CUDA graphs of the hand port in a recipe
    output: Callable[[Any], Tensor]  # selects the tensor whose error is measured
    loss: Callable[[Any], Tensor]
    head: str = ""  # the path of the linear that te_transform keeps out of FP8


@dataclass(frozen=True)
class Row:
    """The measurements of a contender, in milliseconds and MiB."""

    name: str
    median: float
    low: float
    high: float
    peak: float
    error: float


def layer() -> Subject:
    import hand_port

    x = torch.randn(2048, 4, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    cotangent = torch.randn_like(x)

    def port(original: nn.Module) -> nn.Module:
        made = hand_port.layer(4096, 16384, 32)
        own = made.self_attention
        moves = {
            own.layernorm_qkv.layer_norm_weight: original.ln1.weight,
            own.layernorm_qkv.layer_norm_bias: original.ln1.bias,
            own.layernorm_qkv.weight: original.qkv_projection.weight,
            own.layernorm_qkv.bias: original.qkv_projection.bias,
            own.proj.weight: original.projection.weight,
            own.proj.bias: original.projection.bias,
            made.layernorm_mlp.layer_norm_weight: original.ln2.weight,
            made.layernorm_mlp.layer_norm_bias: original.ln2.bias,
            made.layernorm_mlp.fc1_weight: original.mlp.linear1.weight,
            made.layernorm_mlp.fc1_bias: original.mlp.linear1.bias,
            made.layernorm_mlp.fc2_weight: original.mlp.linear2.weight,
            made.layernorm_mlp.fc2_bias: original.mlp.linear2.bias,
        }
        with torch.no_grad():
            for target, value in moves.items():
                target.copy_(value)
        return _Named(made, "x")

    def graphed(port: nn.Module, recipe: Any) -> nn.Module:
        sample = (x.detach().clone().requires_grad_(),)
        return _Named(hand_port.in_graphs((port.layer,), (sample,), recipe)[0], "x")

    return Subject(
        build=lambda: BasicLayer(4096, 16384, 32, attention_dropout=0.0, hidden_dropout=0.0),
        inputs={"x": x},
        example={"x": x[:128, :2].detach()},
        port=port,
        graphed=graphed,
        output=lambda out: out,
        loss=lambda out: (out * cotangent).sum(),
    )


class _Named(nn.Module):
    """A TE layer that is called with the original's argument name."""

    def __init__(self, layer: nn.Module, name: str):
        super().__init__()
        self.layer, self.name = layer, name

    def forward(self, **kwargs: Tensor) -> Tensor:
        return self.layer(kwargs[self.name])


def llama() -> Subject:
    import hand_port

    config = shape_of_8b(layers=8, vocab_size=32000, length=4096)
    ids = torch.randint(32000, (2, 4096), device="cuda")
    return Subject(
        build=lambda: LlamaForCausalLM(config),
        inputs={"input_ids": ids, "labels": ids},
        example={"input_ids": ids[:, :256], "labels": ids[:, :256]},
        port=hand_port.llama,
        graphed=lambda port, recipe: hand_port.graphed(port, *ids.shape, recipe),
        output=lambda out: out.logits,
        loss=lambda out: out.loss,
        head="lm_head",
    )


SUBJECTS = {"layer": layer, "llama": llama}


def contenders(subject: Subject) -> dict[str, Callable[[nn.Module], tuple[nn.Module, _Context]]]:
    """Return functions by name that make a model and the context of its forward from a fresh original."""
    import hand_port

    def plain(model: nn.Module) -> tuple[nn.Module, _Context]:
        return model, contextlib.nullcontext

    def compiled(model: nn.Module) -> tuple[nn.Module, _Context]:
        model.compile()
        return model, contextlib.nullcontext

    def torchao(model: nn.Module) -> tuple[nn.Module, _Context]:
        return hand_port.torchao(model), contextlib.nullcontext

    def accelerate(model: nn.Module) -> tuple[nn.Module, _Context]:
        from accelerate import Accelerator
        from accelerate.utils.transformer_engine import convert_model

        Accelerator()  # convert_model reads its settings
        with torch.no_grad():  # it writes into the weights
            convert_model(model)
        return model.to(torch.bfloat16), hand_port.within(hand_port.RECIPES["fp8-delayed"])

    def ported(recipe: Any) -> Callable:
        return lambda model: (subject.port(model), hand_port.within(recipe))

    def in_graphs(recipe: Any) -> Callable:
        return lambda model: (subject.graphed(subject.port(model), recipe), hand_port.within(recipe))

    def ours(recipe: Any, **ways: Any) -> Callable:
        def converted(model: nn.Module) -> tuple[nn.Module, _Context]:
            options = {"backend": "te", "recipe": recipe, "inplace": True, "verify": False, **ways}
            # compiled and recorded calls have one size
            sample = {k: v.detach() for k, v in subject.inputs.items()} if ways else subject.example
            return te_transform.convert(model, sample, **options), contextlib.nullcontext

        return converted

    found: dict[str, Callable] = {
        "eager bf16": plain,
        "torch.compile bf16": compiled,
        "torchao float8 + torch.compile": torchao,
        "accelerate convert_model fp8-delayed": accelerate,
    }
    found |= {f"{HAND} {name}": ported(recipe) for name, recipe in hand_port.RECIPES.items()}
    found |= {f"te_transform {name}": ours(None if name == "bf16" else name) for name in hand_port.RECIPES}
    if subject.head:
        too = te_transform.PrecisionPlan("fp8-delayed", {subject.head: None})
        found["te_transform fp8-delayed with its head"] = ours(too)
        found["te_transform fp8-delayed with its head, compiled, CUDA graphs"] = ours(too, **IN_GRAPHS)
    found["te_transform fp8-delayed-fast"] = ours("fp8-delayed-fast")
    found["te_transform fp8-block"] = ours("fp8-block")
    found[f"{HAND} fp8-delayed, CUDA graphs"] = in_graphs(hand_port.RECIPES["fp8-delayed"])
    found["te_transform fp8-delayed, compiled"] = ours("fp8-delayed", compile=True)
    found["te_transform fp8-delayed-fast, compiled"] = ours("fp8-delayed-fast", compile=True)
    found["te_transform fp8-delayed, CUDA graphs"] = ours("fp8-delayed", graphs=True)
    found["te_transform fp8-delayed, compiled, CUDA graphs"] = ours("fp8-delayed", **IN_GRAPHS)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("--only", default="", help="comma-separated names of contenders, or parts of names")
    parser.add_argument("--rounds", type=positive, default=15, help="number of turns of each contender")
    parser.add_argument("--profile", default="", help="print the kernels of this contender, no times")
    parser.add_argument("--json", type=output_file, help="also write the rows to this file")
    asked = on_gpu(parser, "transformer_engine")
    torch.manual_seed(0)
    subject = SUBJECTS[asked.subject]()
    chosen = contenders(subject)
    wanted = [asked.profile] if asked.profile else asked.only.split(",")
    chosen = {
        name: make
        for name, make in chosen.items()
        if any(word == name if word in chosen else word in name for word in wanted)
    }
    original = _on_gpu(subject.build)
    reference = _reference(original, subject)
    steps, errors = {}, {}
    for name, make in chosen.items():
        try:
            steps[name], errors[name] = _prepared(make, original, subject, reference)
        except Exception as error:  # the other contenders still run
            print(
                f"{name} does not run: {type(error).__name__}: {str(error)[:300]}",
                file=sys.stderr,
                flush=True,
            )
    del original
    if asked.profile:
        print(profiled(steps[asked.profile]))
        return
    rows = measured(steps, errors, asked.rounds)
    if asked.json:
        Path(asked.json).write_text(json.dumps([asdict(row) for row in rows], indent=1))
    Console(width=130).print(_table(asked.subject, rows))


def _on_gpu(build: Callable[[], nn.Module]) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return build()
    finally:
        torch.set_default_dtype(before)


def _reference(original: nn.Module, subject: Subject) -> Tensor:
    """Return the output in fp32."""
    wide = copy.deepcopy(original).float()
    inputs = {k: v.float() if v.is_floating_point() else v for k, v in subject.inputs.items()}
    with torch.no_grad():
        return subject.output(wide(**inputs))


def _prepared(
    make: Callable, original: nn.Module, subject: Subject, reference: Tensor
) -> tuple[Callable[[], None], float]:
    model, context = make(copy.deepcopy(original))

    def step() -> None:
        with context():
            out = model(**subject.inputs)
        subject.loss(out).backward()
        for tensor in (*model.parameters(), *subject.inputs.values()):
            tensor.grad = None

    for _ in range(STEPS):
        step()
    with context():  # in the mode of a step, to use the same compiled graph
        out = subject.output(model(**subject.inputs))
    error = ((out.detach().float() - reference).norm() / reference.norm()).item()
    del out
    gc.collect()
    return step, error


def measured(steps: dict[str, Callable[[], None]], errors: dict[str, float], rounds: int) -> list[Row]:
    """Return each contender's times, measured by turns, and its peak memory."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            step()  # fills the cache with the data of this contender
            torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            torch.cuda.synchronize()
            times[name].append(1e3 * (time.perf_counter() - start))
    rows = []
    for name, step in steps.items():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        low, middle, high = statistics.quantiles(times[name], n=4)
        rows.append(Row(name, middle, low, high, peak, errors[name]))
    return rows


def profiled(step: Callable[[], None]) -> str:
    """Return a table of the kernels of three steps, and the share of time in which no kernel ran."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        start = time.perf_counter()
        for _ in range(3):
            step()
        issued = time.perf_counter() - start
        torch.cuda.synchronize()
        took = time.perf_counter() - start
    kernels = [
        e for e in seen.key_averages() if e.self_device_time_total > 0 and e.device_type.name == "CUDA"
    ]
    busy = sum(e.self_device_time_total for e in kernels) / 3e3
    lines = [
        f"{1e3 * took / 3:.1f} ms a step, {sum(e.count for e in kernels) // 3} kernels take "
        f"{busy:.1f} ms, all launched after {1e3 * issued / 3:.1f} ms"
    ]
    for e in sorted(kernels, key=lambda e: -e.self_device_time_total)[:45]:
        lines.append(f"{e.self_device_time_total / 3e3:8.3f} ms {e.count // 3:5d} x {e.key[:100]}")
    return "\n".join([*lines, *_gaps(seen)])


def _gaps(seen: Any) -> list[str]:
    """Return the longest times between two kernels of the last step."""
    kernels = sorted(
        (e.time_range.start, e.time_range.end, e.name)
        for e in seen.events()
        if e.device_type.name == "CUDA" and not e.name.startswith("Mem")
    )
    last = kernels[-len(kernels) // 3 :]
    gaps = [(b[0] - a[1], a[2][:60], b[2][:60]) for a, b in pairwise(last) if b[0] - a[1] > 10]
    total = sum(gap for gap, *_ in gaps)
    lines = [f"{len(gaps)} gaps above 10 us, {total / 1e3:.2f} ms in all"]
    return lines + [f"{gap:8.0f} us  {a} -> {b}" for gap, a, b in sorted(gaps, reverse=True)[:12]]


def _table(subject: str, rows: list[Row]) -> Table:
    table = Table(title=f"{subject}, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    for column in ("", "ms", "quartiles", "to the hand port", "peak, MiB", "to the hand port", "error"):
        table.add_column(column)
    hand = {row.name.removeprefix(f"{HAND} "): row for row in rows if row.name.startswith(HAND)}
    for row in rows:
        own = hand.get(row.name.partition(",")[0].rpartition(" ")[2])
        ratios = ["", ""] if own is None else [f"{row.median / own.median:.3f}", f"{row.peak / own.peak:.3f}"]
        times = (f"{row.median:.2f}", f"{row.low:.2f} to {row.high:.2f}", ratios[0])
        table.add_row(row.name, *times, f"{row.peak:.0f}", ratios[1], f"{row.error:.1e}")
    return table


if __name__ == "__main__":
    main()
