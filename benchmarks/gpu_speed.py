"""Compare converted models with their originals on a GPU, in bf16, with the plain PyTorch backend.

    python benchmarks/gpu_speed.py [--only gpt2] [--json]

Both models take turns in one process. Each line has the median ratio of neighboring calls, with quartiles.
Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import measure
import torch
from command_line import on_gpu
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import te_transform
from tests.models.nanogpt import GPT, GPTConfig

SECONDS = 3.0  # for each line


@dataclass(frozen=True)
class Subject:
    """A causal language model, the sizes of a batch, and the mode of its calls."""

    name: str
    build: Callable[[], tuple[nn.Module, int]]  # the model and its vocabulary
    shape: tuple[int, int]
    compiled: tuple[bool, ...] = (False, True)


def gpt2() -> tuple[nn.Module, int]:
    return GPT2LMHeadModel(GPT2Config(vocab_size=50304, bos_token_id=0, eos_token_id=0)), 50304


def nanogpt() -> tuple[nn.Module, int]:
    config = GPTConfig(1024, 50304, n_layer=12, n_head=12, n_embd=768, dropout=0.0, flash=False)
    return GPT(config), 50304


def small_llama() -> tuple[nn.Module, int]:
    return _llama(12, 768, 2048, 12, 4), 32000


def large_llama() -> tuple[nn.Module, int]:
    return _llama(4, 4096, 14336, 32, 8), 32000


def _llama(layers: int, width: int, ffn: int, heads: int, groups: int) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32000,
            hidden_size=width,
            intermediate_size=ffn,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=groups,
        )
    )


SUBJECTS = (
    Subject("nanoGPT, GPT-2 size, attention written out", nanogpt, (8, 1024)),
    Subject("HF GPT-2", gpt2, (8, 1024)),
    Subject("HF GPT-2", gpt2, (1, 16)),
    Subject("HF Llama, 12 layers of width 768", small_llama, (8, 1024)),
    Subject("HF Llama, 12 layers of width 768", small_llama, (1, 16)),
    Subject("HF Llama, 4 layers of the 8B shape", large_llama, (2, 2048)),
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="a part of the names of functions")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    asked = on_gpu(parser)
    rows = []
    for subject in (s for s in SUBJECTS if asked.only in s.build.__name__):
        for compiled in subject.compiled:
            rows += measured(subject, compiled)
            print(rows[-2:], file=sys.stderr, flush=True)
    if asked.json:
        print(json.dumps(rows, indent=1))
    else:
        Console(width=150).print(_table(rows))


def measured(subject: Subject, compiled: bool) -> list[dict[str, Any]]:
    """Compare a forward in evaluation without gradients, and a forward with backward in training."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, vocabulary = subject.build()
    model.to("cuda", torch.bfloat16)
    ids = torch.randint(vocabulary, subject.shape, device="cuda")
    converted = te_transform.convert(
        model, _inputs(model, ids[:2, :64]), backend="torch", verify=False, compile=compiled
    )
    if compiled:
        model.compile()
    rows = []
    for backward in (False, True):
        calls = [_call(m.train(backward), ids, backward) for m in (model, converted)]
        ratio = measure.interleaved(*calls, seconds=SECONDS)
        rows.append(
            {"model": subject.name, "shape": subject.shape, "compiled": compiled, "backward": backward}
            | asdict(ratio)
        )
    return rows


def _inputs(model: nn.Module, ids: Tensor) -> dict[str, Any]:
    if isinstance(model, GPT):
        return {"idx": ids, "targets": ids}
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def _call(model: nn.Module, ids: Tensor, backward: bool) -> Callable[[], None]:
    inputs = _inputs(model, ids)

    def forward() -> None:
        with torch.no_grad():
            model(**inputs)
        torch.cuda.synchronize()

    def both() -> None:
        out = model(**inputs)
        (out[1] if isinstance(out, tuple) else out.loss).backward()
        model.zero_grad()
        torch.cuda.synchronize()

    return both if backward else forward


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"te_transform on {torch.cuda.get_device_name()}, torch {torch.__version__}")
    for column in ("model", "tokens", "how", "original, ms", "converted, ms", "ratio", "quartiles"):
        table.add_column(column)
    for row in rows:
        how = f"{'torch.compile' if row['compiled'] else 'eager'}, "
        how += "forward + backward" if row["backward"] else "forward"
        times = (f"{1e3 * row['one']:.3f}", f"{1e3 * row['other']:.3f}", f"{row['ratio']:.3f}")
        quartiles = f"{row['low']:.3f} to {row['high']:.3f}"
        table.add_row(row["model"], " x ".join(map(str, row["shape"])), how, *times, quartiles)
    return table


if __name__ == "__main__":
    main()
