"""BERT, whose norms the residuals read too, on a Hopper GPU: with these norms in fused ops that return them,
and with norms of their own, in FP8.

    python benchmarks/returned_norms.py [--widths 1024 2048] [--tokens 16384 32768] [--recipes fp8-delayed]

Six layers of transformers' BERT without its head, bf16, rows of 512 tokens without padding, no dropout. All
products run in the recipe, also those of calls that are too small for it by default. ms of a step, each of
several in a row, by turns in one process; ratios are to the original's. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import measure
import torch
import transformer_engine.pytorch  # noqa: F401  before PyTorch loads a cuDNN of its own
from rich.console import Console
from rich.table import Table
from torch import nn

import te_transform

LAYERS, LENGTH, HEAD = 6, 512, 64
ROUNDS, STEPS = 7, 5
APART = tuple(replace(rule, shares=()) for rule in te_transform.PIPELINE)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--widths", nargs="+", type=int, default=(1024, 2048))
    parser.add_argument("--tokens", nargs="+", type=int, default=(16384, 32768), help="in a step")
    parser.add_argument("--recipes", nargs="+", default=("fp8-delayed", "fp8-current"))
    asked = parser.parse_args()
    table = Table(title=f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for column in ("recipe", "width", "tokens", "mode", "original, ms", "norms apart", "norms returned"):
        table.add_column(column)
    for recipe, width, tokens in itertools.product(asked.recipes, asked.widths, asked.tokens):
        for mode, (before, *ours) in milliseconds(recipe, width, tokens).items():
            ratios = (f"{ms:.2f}, {ms / before:.3f}" for ms in ours)
            table.add_row(recipe, str(width), str(tokens), mode, f"{before:.2f}", *ratios)
    Console(width=110).print(table)


def milliseconds(recipe: str, width: int, tokens: int) -> dict[str, list[float]]:
    """Of the original, of the one with norms apart, and with norms returned, by mode."""
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    ids = torch.randint(0, 30000, (tokens // LENGTH, LENGTH), device="cuda")
    models = [bert(width) for _ in range(3)]
    plan = te_transform.PrecisionPlan(recipe, small_calls=True)
    for model, rules in zip(models[1:], (APART, te_transform.PIPELINE), strict=True):
        te_transform.convert(model, ids, backend="te", recipe=plan, passes=rules, verify=False, inplace=True)
    return {
        "training": timed([training_step(model.train(), ids) for model in models]),
        "inference": timed([inference_step(model.eval(), ids) for model in models]),
    }


def bert(width: int) -> nn.Module:
    """Random weights, in bf16."""
    import transformers

    config = transformers.BertConfig(
        hidden_size=width,
        num_hidden_layers=LAYERS,
        num_attention_heads=width // HEAD,
        intermediate_size=4 * width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    with torch.device("cuda"):
        return transformers.BertModel(config, add_pooling_layer=False).bfloat16()


def training_step(model: nn.Module, ids: torch.Tensor) -> Callable[[], Any]:
    """Forward and backward."""

    def step() -> None:
        out = model(ids).last_hidden_state
        out.backward(out.detach())
        model.zero_grad()

    return step


def inference_step(model: nn.Module, ids: torch.Tensor) -> Callable[[], Any]:
    """A forward without gradients."""

    def step() -> None:
        with torch.no_grad():
            model(ids)

    return step


def timed(steps: list[Callable[[], Any]]) -> list[float]:
    """The medians, by turns."""
    samples: list[list[float]] = [[] for _ in steps]
    for step in steps:
        measure.in_a_row(step, STEPS)
    for _ in range(ROUNDS):
        for step, found in zip(steps, samples, strict=True):
            found.append(1e3 * measure.in_a_row(step, STEPS))
    return [statistics.median(found) for found in samples]


if __name__ == "__main__":
    main()
