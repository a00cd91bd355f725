"""Compare training steps with progressive layer dropping and plain training steps, on a GPU.

    python benchmarks/drop_layers.py [--model gpt llama] [--modes uncompiled compiled graphs compiled-graphs]
                                     [--recipe fp8-delayed]
                                     [--layers 12] [--width 1024] [--batch 8] [--length 1024] [--vocab 8192]
                                     [--steps 100] [--json PATH]

A step is a forward, a backward and fused AdamW, in bf16. Each line has four times, measured by turns in one
process:

| column | time of a step |
| --- | --- |
| plain | before drop_layers() |
| pieces | with a theta so close to 1 that nothing is dropped: the cost of running layers one by one |
| dropping | with theta 0.5 |
| none | with all layers dropped |
| kept | the share of layers that ran in the timed steps |
| ideal | the ratio that this share allows: (none + kept * (plain - none)) / plain |

The goal is a ratio of 0.80 at a mean keep rate of 0.73. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
import torch
from command_line import on_gpu, output_file, positive
from torch import nn

import te_transform
from te_transform.training import LayerDropping, drop_layers
from tests.models.nanogpt import GPT, GPTConfig

MODES: dict[str, dict[str, Any]] = {
    "uncompiled": {},
    "compiled": {"compile": True},
    "graphs": {"graphs": True},  # graphs of the whole model before drop_layers(), of each layer after it
    "compiled-graphs": {"compile": True, "graphs": True},
}
ROUNDS = 5


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--model", nargs="+", default=["gpt", "llama"], choices=["gpt", "llama"])
    parser.add_argument("--modes", nargs="+", default=[*MODES], choices=MODES)
    parser.add_argument("--recipe", default=None)
    sizes = {"layers": 12, "width": 1024, "batch": 8, "length": 1024, "vocab": 8192, "steps": 100}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=positive, default=size)
    parser.add_argument("--json", type=output_file, help="also write the rows to this file")
    asked = on_gpu(parser)
    rows = []
    for model in asked.model:
        for mode in asked.modes:
            rows.append(_row(model, mode, asked))
            print(json.dumps(rows[-1]), flush=True)
    if asked.json:
        Path(asked.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")


def _row(name: str, mode: str, asked: argparse.Namespace) -> dict[str, Any]:
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    ids = torch.randint(asked.vocab, (asked.batch, asked.length), device="cuda")
    inputs = (
        {"idx": ids, "targets": ids}
        if name == "gpt"
        else {"input_ids": ids, "labels": ids, "use_cache": False}
    )
    with torch.device("cuda"):
        model = _gpt(asked) if name == "gpt" else _llama(asked)
    model = te_transform.convert(
        model.bfloat16().train(), inputs, recipe=asked.recipe, verify=False, inplace=True, **MODES[mode]
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(schedule: LayerDropping | None = None) -> None:
        out = model(**inputs)
        (out[1] if name == "gpt" else out.loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()

    return {"model": name, "mode": mode, **_times(model, step, asked.steps)}


def _times(model: nn.Module, step: Callable[..., None], steps: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {name: [] for name in ("plain", "pieces", "dropping", "none")}
    thetas = {"pieces": 1 - 1e-12, "dropping": 0.5, "none": 1e-12}
    kept: list[float] = []
    began = 0
    for number in range(ROUNDS + 1):
        for name, found in times.items():
            schedule = None if name == "plain" else _schedule(model, thetas[name], began)
            if name == "none":
                schedule.factor = lambda path: None
            if name == "dropping":
                kept += _shares(schedule, steps)
            found.append(measure.in_a_row(lambda schedule=schedule: step(schedule), steps))
            if schedule is not None:
                schedule.remove()
        began += steps
        if number == 0:  # captures, compilations, first scales
            for found in (*times.values(), kept):
                found.clear()
    plain, pieces, dropping, none = (statistics.median(found) for found in times.values())
    share = statistics.mean(kept)
    return {
        "plain_ms": round(plain * 1e3, 3),
        "pieces": round(pieces / plain, 4),
        "dropping": round(dropping / plain, 4),
        "kept": round(share, 4),
        "ideal": round((none + share * (plain - none)) / plain, 4),
    }


def _schedule(model: nn.Module, theta: float, began: int) -> LayerDropping:
    """Return a schedule whose theta(t) has reached its limit."""
    schedule = drop_layers(model, 100, theta)
    schedule.load_state_dict({**schedule.state_dict(), "steps": 100_000 + began})
    return schedule


def _shares(schedule: LayerDropping, steps: int) -> list[float]:
    """Return the share of layers that each of the next steps keeps."""
    state, found = schedule.state_dict(), []
    for _ in range(steps):
        found.append(1 - len(schedule.dropped()) / len(schedule.layers))
        schedule.step()
    schedule.load_state_dict(state)
    return found


def _gpt(asked: argparse.Namespace) -> nn.Module:
    config = GPTConfig(
        block_size=asked.length,
        vocab_size=asked.vocab,
        n_layer=asked.layers,
        n_head=asked.width // 64,
        n_embd=asked.width,
        dropout=0.0,
    )
    return GPT(config)


def _llama(asked: argparse.Namespace) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=asked.vocab,
        hidden_size=asked.width,
        intermediate_size=asked.width * 11 // 4,
        num_hidden_layers=asked.layers,
        num_attention_heads=asked.width // 64,
        max_position_embeddings=asked.length,
    )
    return LlamaForCausalLM(config)


if __name__ == "__main__":
    main()
