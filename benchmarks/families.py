"""Families of transformers beside Llama, GPT-2, BERT and ViT: converted models against the original, bf16, on
a GPU.

    python benchmarks/families.py [NAME ...] [--compile] [--json PATH]

Models of 4 layers and width 1024, 8 sequences of 512 tokens of which every second one is padded: a training
step without optimizer and a forward without gradients, by turns in one process, and the time of the kernels
of one call of each. With --compile both are compiled, the original by torch.compile. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import measure
import torch
import transformer_engine.pytorch  # noqa: F401  before PyTorch loads a cuDNN of its own
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import te_transform

WIDTH, LAYERS, HEADS, VOCABULARY = 1024, 4, 16, 8192
BATCH, LENGTH, PADDING = 8, 512, 40
TOKENS = {"bos_token_id": 1, "pad_token_id": 0, "eos_token_id": 2, "vocab_size": VOCABULARY}
USUAL = {
    **TOKENS, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "intermediate_size": 4 * WIDTH,
}  # fmt: skip
OFF = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
# the class, the config's, and what it is told
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "BLOOM": ("BloomForCausalLM", "BloomConfig", USUAL | {"n_layer": LAYERS, "n_head": HEADS}),
    "MPT": (
        "MptForCausalLM", "MptConfig", TOKENS | {"d_model": WIDTH, "n_heads": HEADS, "n_layers": LAYERS}
    ),
    "Falcon, ALiBi": (
        "FalconForCausalLM", "FalconConfig", USUAL | {"alibi": True, "new_decoder_architecture": False}
    ),
    "GPT-Neo": (
        "GPTNeoForCausalLM", "GPTNeoConfig",
        TOKENS | {
            "hidden_size": WIDTH, "num_layers": LAYERS, "num_heads": HEADS,
            "attention_types": [[["global", "local"], LAYERS // 2]],
            "resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0,
        },
    ),
    "GPT-J": (
        "GPTJForCausalLM", "GPTJConfig",
        TOKENS | {
            "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "rotary_dim": 64,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        },
    ),
    "Gemma 2": (
        "Gemma2ForCausalLM", "Gemma2Config", USUAL | {"num_key_value_heads": HEADS // 2, "head_dim": 64}
    ),
    "DeBERTa v2": (
        "DebertaV2ForMaskedLM", "DebertaV2Config",
        USUAL | OFF | {
            "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 256,
            "share_att_key": True,
        },
    ),
    "OPT": (
        "OPTForCausalLM", "OPTConfig",
        USUAL | {"ffn_dim": 4 * WIDTH, "word_embed_proj_dim": WIDTH, "dropout": 0.0},
    ),
    "T5": (
        "T5ForConditionalGeneration", "T5Config",
        TOKENS | {
            "d_model": WIDTH, "d_kv": 64, "d_ff": 4 * WIDTH, "num_layers": LAYERS, "num_heads": HEADS,
            "dropout_rate": 0.0, "decoder_start_token_id": 0,
        },
    ),
    "BART": (
        "BartForConditionalGeneration", "BartConfig",
        TOKENS | {
            "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS,
            "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS,
            "encoder_ffn_dim": 4 * WIDTH, "decoder_ffn_dim": 4 * WIDTH, "dropout": 0.0,
        },
    ),
}  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*FAMILIES, []], help="of families; all if none is given")
    parser.add_argument("--compile", action="store_true", help="both, the original by torch.compile")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each line")
    parser.add_argument("--json", default="", help="write the rows to this file too")
    asked = parser.parse_args()
    table = Table(title=f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for column in (
        "family",
        "call",
        "original, ms",
        "converted",
        "ratio",
        "quartiles",
        "kernels, ms",
        "ours",
    ):
        table.add_column(column)
    rows = []
    for name in asked.names or FAMILIES:
        torch._dynamo.reset()
        for row in _rows(name, asked.compile, asked.seconds):
            print(name, row["call"], f"{row['ratio']:.3f}", file=sys.stderr, flush=True)
            rows.append(row)
            table.add_row(
                name, row["call"], f"{1e3 * row['one']:.1f}", f"{1e3 * row['other']:.1f}",
                f"{row['ratio']:.3f}", f"{row['low']:.3f} to {row['high']:.3f}",
                *(f"{kernels:.1f}" for kernels in row["kernels"]),
            )  # fmt: skip
    Console().print(table)
    if asked.json:
        Path(asked.json).write_text("".join(json.dumps(row) + "\n" for row in rows))


def _rows(name: str, compile: bool, seconds: float) -> list[dict[str, Any]]:
    model, batch = _family(name)
    converted = te_transform.convert(model, batch, compile=compile)
    original = torch.compile(model) if compile else model
    found = compared(original, converted, batch, seconds)
    return [{"family": name, "compile": compile} | row for row in found]


def compared(
    original: nn.Module, converted: nn.Module, batch: dict[str, Tensor], seconds: float
) -> Iterator[dict[str, Any]]:
    """A training step and a forward of both, with the milliseconds of their kernels and what each takes of
    the GPU's memory beside the model, in MiB."""
    for what, call, training in (("training", step, True), ("forward", forward, False)):
        calls = [partial(call, each.train(training), batch) for each in (original, converted)]
        row = {"call": what} | asdict(measure.interleaved(*calls, seconds=seconds))
        yield row | {"kernels": [*map(_milliseconds_of_kernels, calls)], "peak": [*map(_peak, calls)]}


def _family(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    model = built(*FAMILIES[name])
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), device="cuda")
    mask = torch.ones_like(ids)
    mask[::2, LENGTH - PADDING :] = 0
    return model.train(), {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def built(kind: str, config: str, told: dict[str, Any]) -> nn.Module:
    """A model of transformers of random weights, in bf16 on the GPU."""
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**told)).to("cuda", torch.bfloat16)


def step(model: nn.Module, batch: dict[str, Tensor]) -> None:
    """A training step without optimizer."""
    model(**batch).loss.backward()
    model.zero_grad()
    torch.cuda.synchronize()


def forward(model: nn.Module, batch: dict[str, Tensor]) -> None:
    """A forward without gradients."""
    with torch.no_grad():
        model(**batch)
    torch.cuda.synchronize()


def _peak(call: Callable[[], None]) -> float:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _milliseconds_of_kernels(call: Callable[[], None]) -> float:
    call()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
    return sum(event.self_device_time_total for event in found.key_averages()) / 1e3


if __name__ == "__main__":
    main()
