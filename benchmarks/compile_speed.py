"""Compare convert(..., compile=...) with torch.compile of the original: training steps on a Hopper GPU.

    python benchmarks/compile_speed.py [--only 768 8B] [--modes graphs] [--recipe fp8-delayed] [--autocast]
                                       [--masked] [--seconds 3.0] [--json PATH]

The model is transformers' Llama, in bf16 or FP8. Both models take turns in one process. Each line has the
median ratio of neighboring steps, with quartiles. The GPU is waited for after each step. Each line also has
the time of a step if several run without waiting.

The original runs in bf16. Its mask function is patched to create no mask, which makes the original fastest.
--masked adds a line without the patch, in which the mask is computed during tracing. With --autocast, the
weights of both models are in float32, under torch.autocast in bf16. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import measure
import torch
import with_te  # noqa: F401
from command_line import on_gpu, output_file
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

import te_transform

VOCABULARY = 32000
# layers, width, ffn, heads, groups of heads, batch, length
SHAPES = {
    "768": (12, 768, 2048, 12, 12, 4, 512),
    "1024": (12, 1024, 2816, 16, 16, 8, 1024),
    "2048": (12, 2048, 5632, 16, 16, 2, 2048),
    "8B": (8, 4096, 14336, 32, 8, 2, 4096),
}
# the options of convert(); "graphs" is compared with the original in "reduce-overhead"
MODES = {
    "default": {"compile": True},
    "reduce-overhead": {"compile": "reduce-overhead"},
    "graphs": {"compile": True, "graphs": True},
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--only", nargs="+", default=[*SHAPES], choices=SHAPES, help="widths")
    parser.add_argument("--modes", nargs="+", default=[*MODES], choices=MODES, help="options of convert()")
    parser.add_argument("--recipe", default=None, help="recipe of the conversion")
    parser.add_argument("--autocast", action="store_true", help="float32 weights under torch.autocast")
    parser.add_argument("--masked", action="store_true", help="also compare without the patch")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds for each line")
    parser.add_argument("--json", type=output_file, help="also write the rows to this file")
    asked = on_gpu(parser, "transformer_engine")
    rows = []
    for name in asked.only:
        for mode in asked.modes:
            for masked in (False, True)[: 1 + asked.masked]:
                rows.append(_row(name, mode, asked.recipe, masked, asked.autocast, asked.seconds))
                print(rows[-1], flush=True)
    if asked.json:
        Path(asked.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    Console(width=120).print(_table(rows))


def _row(
    name: str, mode: str, recipe: str | None, masked: bool, autocast: bool, seconds: float
) -> dict[str, Any]:
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    original, ids = _llama(name, torch.float32 if autocast else torch.bfloat16)
    options = {"backend": "te", "recipe": recipe, "verify": False}
    converted = te_transform.convert(original, _inputs(ids), **MODES[mode], **options)
    original.compile(mode="reduce-overhead" if mode == "graphs" else mode)
    calls = [
        _step(original, ids, contextlib.nullcontext if masked else _no_mask, autocast),
        _step(converted, ids, contextlib.nullcontext, autocast),
    ]
    # the first call finds the scales and runs uncompiled; later calls record CUDA graphs
    for call in calls * 4:
        call()
    ratio = measure.interleaved(*calls, seconds=seconds)
    rows = [measure.in_a_row(partial(call, waits=False), 6) for _ in range(5) for call in calls]
    in_a_row = {f"{who} in a row": statistics.median(rows[n::2]) for n, who in enumerate(("one", "other"))}
    peaks = {f"peak {who}, MiB": _peak(call) for who, call in zip(("theirs", "ours"), calls, strict=True)}
    what = {"shape": name, "mode": mode, "recipe": recipe, "mask": masked, "autocast": autocast}
    return what | asdict(ratio) | in_a_row | peaks


def _llama(name: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    layers, width, ffn, heads, groups, batch, length = SHAPES[name]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=length,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        return LlamaForCausalLM(config).to(dtype), torch.randint(VOCABULARY, (batch, length))


def _inputs(ids: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids, "labels": ids}


@contextlib.contextmanager
def _no_mask() -> Iterator[None]:
    with patch.object(modeling_llama, "create_causal_mask", lambda *_, **__: None):
        yield


def _step(model: nn.Module, ids: Tensor, around: Callable[[], Any], autocast: bool) -> Callable[..., None]:
    def step(waits: bool = True) -> None:
        model.zero_grad(set_to_none=True)
        with around():
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                loss = model(**_inputs(ids)).loss
            loss.backward()
        if waits:
            torch.cuda.synchronize()

    return step


def _peak(step: Callable[[], None]) -> int:
    """Return the peak memory of a step, beside the weights of both models."""
    step()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return (torch.cuda.max_memory_allocated() - before) // 2**20


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    columns = ("shape", "mode", "recipe", "against", "theirs, ms", "ours, ms", "ratio", "quartiles")
    for column in (*columns, "in a row, ms", "peak, MiB"):
        table.add_column(column)
    for row in rows:
        table.add_row(
            row["shape"],
            row["mode"],
            row["recipe"] or "",
            ("the original" if row["mask"] else "no mask") + ", autocast" * row["autocast"],
            f"{1e3 * row['one']:.2f}",
            f"{1e3 * row['other']:.2f}",
            f"{row['ratio']:.3f}",
            f"{row['low']:.3f} to {row['high']:.3f}",
            f"{1e3 * row['one in a row']:.2f} -> {1e3 * row['other in a row']:.2f}",
            f"{row['peak theirs, MiB']} -> {row['peak ours, MiB']}",
        )
    return table


if __name__ == "__main__":
    main()
