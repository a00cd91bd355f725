"""Compare calls with few tokens, in which the CPU is the bottleneck, in bf16, on a Hopper GPU.

    python benchmarks/few_tokens.py [--seconds 1.0] [--json PATH]

The model is a Llama of 4 layers (ffn 3.5 x width). The calls are an evaluation without gradients, a training
step, and decoding with generate(). Original and converted model take turns in one process. Each line has the
median ratio of neighboring calls. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import measure
import torch
import with_te  # noqa: F401
from command_line import on_gpu, output_file
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import te_transform

CALLS = {
    1024: ((1, 1), (1, 512), (1, 4096), (4, 4096)),
    4096: ((1, 1), (1, 512), (1, 1024), (1, 2048), (2, 2048)),
}
CONVERSIONS: dict[str, dict[str, Any]] = {
    "plain PyTorch": {"backend": "torch"},
    "TE bf16": {"backend": "te"},
    "fp8-delayed": {"backend": "te", "recipe": "fp8-delayed"},
    "fp8-current": {"backend": "te", "recipe": "fp8-current"},
}
LAYERS, VOCABULARY, NEW_TOKENS = 4, 1024, 32  # a small head, to measure the layers


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds for each line")
    parser.add_argument("--json", type=output_file, help="also write the rows to this file")
    asked = on_gpu(parser, "transformer_engine")
    table = Table(title=f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for column in ("width", "call", "tokens", "original, ms", *CONVERSIONS):
        table.add_column(column)
    rows = []
    for width in CALLS:
        original = _llama(width)
        converted = {
            name: te_transform.convert(original, _ids(2, 128), verify=False, **options)
            for name, options in CONVERSIONS.items()
        }
        for what, call, shape in _lines(width):
            ratios = {
                name: measure.interleaved(
                    functools.partial(call, original, _ids(*shape)),
                    functools.partial(call, model, _ids(*shape)),
                    seconds=asked.seconds,
                )
                for name, model in converted.items()
            }
            own = 1e3 * next(iter(ratios.values())).one / (NEW_TOKENS if call is decoding else 1)
            found = [f"{ratio.ratio:.2f}" for ratio in ratios.values()]
            print(width, what, shape, f"{own:.2f} ms", *found, file=sys.stderr, flush=True)
            row = {"width": width, "call": what, "shape": shape}
            rows += [{**row, "how": name, **asdict(ratio)} for name, ratio in ratios.items()]
            table.add_row(str(width), what, " x ".join(map(str, shape)), f"{own:.2f}", *found)
            if asked.json:  # after each line, to keep the lines of an interrupted script
                Path(asked.json).write_text(json.dumps(rows, indent=1))
    Console(width=130).print(table)


def _lines(width: int) -> list[tuple[str, Callable, tuple[int, int]]]:
    found = [(name, call, shape) for name, call in (("evaluation", evaluation), ("training", training))
             for shape in CALLS[width]]  # fmt: skip
    return [*found, ("decoding", decoding, (1, 16)), ("decoding", decoding, (16, 16))]


def _llama(width: int) -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=7 * width // 2,
        num_hidden_layers=LAYERS,
        num_attention_heads=width // 128,
        num_key_value_heads=width // 512,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        return LlamaForCausalLM(config).bfloat16()


@functools.cache
def _ids(rows: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length), device="cuda")


def _put_in_mode(model: nn.Module, training: bool) -> None:
    if model.training != training:  # each train() of a converted model frees its quantized weights
        model.train(training)


def evaluation(model: nn.Module, ids: Tensor) -> None:
    """Run a forward without gradients and without a cache."""
    _put_in_mode(model, training=False)
    with torch.no_grad():
        model(ids, use_cache=False)
    torch.cuda.synchronize()


def training(model: nn.Module, ids: Tensor) -> None:
    """Run a forward and its backward."""
    _put_in_mode(model, training=True)
    model(ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad()
    torch.cuda.synchronize()


def decoding(model: nn.Module, ids: Tensor) -> None:
    """Generate tokens one by one."""
    _put_in_mode(model, training=False)
    model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, eos_token_id=None,
        min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS,
    )  # fmt: skip
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
