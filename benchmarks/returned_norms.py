"""Compare fused ops that return their norm with separate modules, on a Hopper GPU.

    python benchmarks/returned_norms.py [BERT Cohere] [--widths 1024 2048] [--tokens 16384 32768]
                                        [--recipes bf16 fp8-delayed fp8-current]

In these models, the residual also reads the norm (BERT), or attention and MLP read the same norm (Cohere).
Without returned norms, Cohere's q, k, v, gate and up become one product, and the MLP is not fused.

BERT has six layers and rows of 512 tokens, Cohere four layers and rows of 2048. Both are transformers models
without head, padding and dropout, in bf16. All products run in the recipe, also in calls below the size
limit. Times are milliseconds of a step among consecutive steps, by turns in one process. Ratios are relative
to the original. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import measure
import torch
import with_te  # noqa: F401
from command_line import on_gpu, positive
from rich.console import Console
from rich.table import Table
from torch import nn

import te_transform
from te_transform.rules import Siblings

ROUNDS, STEPS = 7, 5


def apart(rule: te_transform.Rule) -> te_transform.Rule:
    """Return the rule without ops that return norms."""
    merges = isinstance(rule.pattern, Siblings)
    pattern = Siblings(rule.pattern.target, rule.pattern.role) if merges else rule.pattern
    return replace(rule, shares=(), pattern=pattern)


APART = tuple(map(apart, te_transform.PIPELINE))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], help="default: all")
    parser.add_argument("--widths", nargs="+", type=positive, default=(1024, 2048))
    parser.add_argument("--tokens", nargs="+", type=positive, default=(16384, 32768), help="tokens of a step")
    parser.add_argument("--recipes", nargs="+", default=("fp8-delayed", "fp8-current"))
    asked = on_gpu(parser, "transformer_engine")
    table = Table(title=f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for column in ("model", "recipe", "width", "tokens", "mode", "original, ms", "apart", "returned"):
        table.add_column(column)
    for point in itertools.product(asked.models or MODELS, asked.recipes, asked.widths, asked.tokens):
        for mode, (before, *ours) in milliseconds(*point).items():
            ratios = (f"{ms:.2f}, {ms / before:.3f}" for ms in ours)
            row = (*map(str, point), mode, f"{before:.2f}", *ratios)
            print(*row, file=sys.stderr, flush=True)
            table.add_row(*row)
    Console(width=110).print(table)


def milliseconds(name: str, recipe: str, width: int, tokens: int) -> dict[str, list[float]]:
    """Return the times of the original, with separate norms, and with returned norms, by mode."""
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    make, length = MODELS[name]
    ids = torch.randint(0, 30000, (tokens // length, length), device="cuda")
    with torch.device("cuda"):
        models = [make(width).bfloat16() for _ in range(3)]
    plan = None if recipe == "bf16" else te_transform.PrecisionPlan(recipe, small_calls=True)
    for model, rules in zip(models[1:], (APART, te_transform.PIPELINE), strict=True):
        te_transform.convert(model, ids, backend="te", recipe=plan, passes=rules, verify=False, inplace=True)
    return {
        "training": timed([training_step(model.train(), ids) for model in models]),
        "inference": timed([inference_step(model.eval(), ids) for model in models]),
    }


def bert(width: int) -> nn.Module:
    """Return six layers with random weights."""
    import transformers

    config = transformers.BertConfig(
        hidden_size=width,
        num_hidden_layers=6,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertModel(config, add_pooling_layer=False)


def cohere(width: int) -> nn.Module:
    """Return four layers with random weights."""
    import transformers

    config = transformers.CohereConfig(
        hidden_size=width,
        num_hidden_layers=4,
        num_attention_heads=width // 128,
        num_key_value_heads=width // 128,
        intermediate_size=7 * width // 2,
        vocab_size=32000,
        use_cache=False,
    )
    return transformers.CohereModel(config)


# the function that builds the model, and the tokens of a row
MODELS: dict[str, tuple[Callable[[int], nn.Module], int]] = {"BERT": (bert, 512), "Cohere": (cohere, 2048)}


def training_step(model: nn.Module, ids: torch.Tensor) -> Callable[[], Any]:
    """Run a forward and its backward."""

    def step() -> None:
        out = model(ids).last_hidden_state
        out.backward(out.detach())
        model.zero_grad()

    return step


def inference_step(model: nn.Module, ids: torch.Tensor) -> Callable[[], Any]:
    """Run a forward without gradients."""

    def step() -> None:
        with torch.no_grad():
            model(ids)

    return step


def timed(steps: list[Callable[[], Any]]) -> list[float]:
    """Return the median times, measured by turns."""
    samples: list[list[float]] = [[] for _ in steps]
    for step in steps:
        measure.in_a_row(step, STEPS)
    for _ in range(ROUNDS):
        for step, found in zip(steps, samples, strict=True):
            found.append(1e3 * measure.in_a_row(step, STEPS))
    return [statistics.median(found) for found in samples]


if __name__ == "__main__":
    main()
