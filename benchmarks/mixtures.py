"""Mixture models of the shapes that are trained: converted against the original, bf16, on a GPU.

    python benchmarks/mixtures.py [NAME ...] [--recipe fp8-delayed] [--json PATH]

Layers of Mixtral 8x7B, Qwen3 30B-A3B and DeepSeek V2 Lite, 2 sequences of 4,096 tokens: a training step
without optimizer and a forward without gradients, by turns in one process, with the time of the kernels of
one call of each, and what that takes of the GPU's memory beside the model. Compiled, the original is by
torch.compile. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch  # noqa: F401  before PyTorch loads a cuDNN of its own
from families import TOKENS, VOCABULARY, built, compared
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import te_transform

BATCH, LENGTH = 2, 4096
# the class, the config's, and what it is told
MIXTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Mixtral": (
        "MixtralForCausalLM", "MixtralConfig",
        {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 1,
            "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        },
    ),
    "Qwen3": (
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig",
        {
            "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 4,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
            "num_experts": 128, "num_experts_per_tok": 8,
        },
    ),
    "DeepSeek": (
        "DeepseekV3ForCausalLM", "DeepseekV3Config",
        {
            "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
            "num_hidden_layers": 3, "first_k_dense_replace": 1, "num_attention_heads": 16,
            "num_key_value_heads": 16, "n_routed_experts": 64, "num_experts_per_tok": 6,
            "n_shared_experts": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": None, "kv_lora_rank": 512,
        },
    ),
}  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*MIXTURES, []], help="of mixtures; all if none is given")
    parser.add_argument("--recipe", default=None, help="measured too")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each line")
    parser.add_argument("--json", default="", help="write the rows to this file too")
    asked = parser.parse_args()
    table = Table(title=f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for column in (
        "mixture",
        "way",
        "call",
        "original, ms",
        "converted",
        "ratio",
        "kernels, ms",
        "ours",
        "peak, MiB",
        "ours",
    ):
        table.add_column(column)
    rows = []
    for name in asked.names or MIXTURES:
        torch._dynamo.reset()
        for row in _rows(name, asked.recipe, asked.seconds):
            print(json.dumps(row), file=sys.stderr, flush=True)
            rows.append(row)
            table.add_row(
                name, row["way"], row["call"], f"{1e3 * row['one']:.2f}", f"{1e3 * row['other']:.2f}",
                f"{row['ratio']:.3f}", *(f"{each:.2f}" for each in row["kernels"]),
                *(f"{each:,.0f}" for each in row["peak"]),
            )  # fmt: skip
    Console().print(table)
    if asked.json:
        Path(asked.json).write_text("".join(json.dumps(row) + "\n" for row in rows))


def _rows(name: str, recipe: str | None, seconds: float) -> Iterator[dict[str, Any]]:
    model, batch = _mixture(name)
    ways = {"te_transform": {}, "te_transform, compiled": {"compile": True}}
    if recipe is not None:
        ways[f"te_transform {recipe}"] = {"recipe": recipe}
    for way, options in ways.items():
        original = torch.compile(model) if "compile" in options else model
        converted = te_transform.convert(model, batch, **options)
        for row in compared(original, converted, batch, seconds):
            yield {"mixture": name, "way": way} | row


def _mixture(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    kind, config, told = MIXTURES[name]
    model = built(kind, config, TOKENS | told)
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), device="cuda")
    return model.train(), {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


if __name__ == "__main__":
    main()
