"""Compare serving of a Hugging Face Llama on a Hopper GPU, in bf16, in FP8, and with FP8-only weights.

    python benchmarks/serving.py [--only prefill token generate] [--batches 1 16] [--layers 8] [--json PATH]

The calls are a prefill, single tokens with a static cache, and generate(). Layers have the 8B shape, with a
vocabulary of 32,000. The contenders of a line take turns in one process. Times are of consecutive calls;
each line also has the time of a call that is waited for. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
import torch
import with_te  # noqa: F401
from command_line import on_gpu, output_file, positive
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import te_transform

VOCABULARY, WIDTH, FFN, HEADS, GROUPS = 32000, 4096, 14336, 32, 8
PREFILL = (2, 4096)
PROMPT, NEW_TOKENS = 128, 64  # tokens of generate(); the cache also has room for the timed tokens
CACHE = 1024
ROUNDS, IN_A_ROW = 9, 32

FP8 = {"backend": "te", "recipe": "fp8-current"}
WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "prefill": {
        "te_transform bf16": {"backend": "te"},
        "te_transform bf16, compiled": {"backend": "te", "compile": True},
        "te_transform FP8": FP8,
        "te_transform FP8, compiled": {**FP8, "compile": True},
        "te_transform FP8 weights alone": {**FP8, "alone": True},
    },
    "token": {
        "te_transform, CUDA graphs": {"graphs": True},
        "te_transform, compiled, CUDA graphs": {"compile": True, "graphs": True},
        "te_transform FP8 weights alone, CUDA graphs": {**FP8, "graphs": True, "alone": True},
        "te_transform FP8 weights alone, compiled, CUDA graphs": {
            **FP8, "compile": True, "graphs": True, "alone": True,
        },
    },
}  # fmt: skip
WAYS["generate"] = WAYS["token"]
Step = Callable[[], Any]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--only", nargs="+", default=[*WAYS], choices=WAYS)
    parser.add_argument(
        "--batches", nargs="+", type=positive, default=[1, 16], help="rows per token and generation"
    )
    parser.add_argument("--layers", type=positive, default=8)
    parser.add_argument("--json", type=output_file, help="also write the rows to this file")
    asked = on_gpu(parser, "transformer_engine")
    original, rows = _llama(asked.layers), []
    for what in asked.only:
        for batch in (PREFILL[0],) if what == "prefill" else asked.batches:
            rows += _lines(original, what, batch)
            if asked.json:
                Path(asked.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    Console(width=130).print(_table(rows))


def _llama(layers: int) -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=FFN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        max_position_embeddings=PREFILL[1],
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        return LlamaForCausalLM(config).bfloat16().eval().requires_grad_(False)


def _lines(original: nn.Module, what: str, batch: int) -> list[dict[str, Any]]:
    """Yield the rows of the contenders of one line, prepared one after the other and timed by turns."""
    torch._dynamo.reset()
    steps: dict[str, Step] = {}
    for name, make in _contenders(original, what, batch).items():
        begun = time.perf_counter()
        try:
            steps[name] = make()
            for _ in range(6):
                steps[name]()
            torch.cuda.synchronize()
        except Exception as error:
            steps.pop(name, None)
            print(what, batch, name, f"{type(error).__name__}: {error}"[:300], flush=True)
        print(what, batch, name, f"prepared in {time.perf_counter() - begun:.1f} s", flush=True)
    in_a_row: dict[str, list[float]] = {name: [] for name in steps}
    waited: dict[str, list[float]] = {name: [] for name in steps}
    calls = {"prefill": 4, "token": IN_A_ROW, "generate": 1}[what]
    for _ in range(ROUNDS):
        for name, step in steps.items():
            in_a_row[name].append(measure.in_a_row(step, calls))
            waited[name].append(measure.in_a_row(step, 1))
    tokens = NEW_TOKENS if what == "generate" else 1
    rows = []
    for name in steps:
        found = {"what": what, "batch": batch, "how": name}
        for key, times in (("ms", in_a_row), ("ms waited", waited)):
            found[key] = round(1e3 * statistics.median(times[name]) / tokens, 4)
        rows.append(found)
        print(found, flush=True)
    del steps
    gc.collect()
    torch.cuda.empty_cache()
    return rows


def _contenders(original: nn.Module, what: str, batch: int) -> dict[str, Callable[[], Step]]:
    """Return a function that makes each contender's step, by name. The first two are the original's."""
    step = {"prefill": _prefill, "token": _token, "generate": _generation}[what]
    if what == "prefill":
        compiled = {"torch.compile": lambda: step(torch.compile(copy.deepcopy(original)), batch)}
    elif what == "token":  # with the options of generate()
        compiled = {"transformers' compile": lambda: step(original, batch, original.get_compiled_call(None))}
    else:
        compiled = {"transformers' compile": lambda: step(original, batch, disable_compile=False)}
    ours = {
        name: functools.partial(_converted, original, step, batch, options)
        for name, options in WAYS[what].items()
    }
    return {"eager": lambda: step(original, batch), **compiled, **ours}


def _converted(original: nn.Module, step: Callable[..., Step], batch: int, options: dict[str, Any]) -> Step:
    asked = {key: value for key, value in options.items() if key != "alone"}
    ids = torch.randint(VOCABULARY, (2, 128), device="cuda")
    model = te_transform.convert(copy.deepcopy(original), ids, verify=False, inplace=True, **asked)
    if "alone" in options:
        with torch.no_grad():
            model(torch.randint(VOCABULARY, PREFILL, device="cuda"))  # finds the products that run in FP8
        held = te_transform.quantize_weights(model)
        print(f"{len(held.names)} weights in FP8 alone", flush=True)
    return step(model, batch)


def _prefill(model: nn.Module, batch: int) -> Step:
    ids = torch.randint(VOCABULARY, (batch, PREFILL[1]), device="cuda")

    @torch.no_grad()
    def step() -> None:
        model(ids, use_cache=False)

    return step


def _token(model: nn.Module, batch: int, call: Callable[..., Any] | None = None) -> Step:
    """Return a call of one token per sequence; the sequences grow until the cache is full."""
    cache = StaticCache(config=model.config, max_cache_len=CACHE)
    ids = torch.randint(VOCABULARY, (batch, PROMPT), device="cuda")
    given, call = ids[:, -1:].clone(), call or model
    length = PROMPT
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)

    @torch.no_grad()
    def step() -> Tensor:
        nonlocal length
        length += 1
        if length == CACHE:  # back to the prompt, which the cache still holds
            length = PROMPT
            for layer in cache.layers:
                layer.cumulative_length.fill_(PROMPT)
        return call(given, past_key_values=cache, use_cache=True, return_dict=True).logits

    return step


def _generation(model: nn.Module, batch: int, disable_compile: bool = True) -> Step:
    ids = torch.randint(VOCABULARY, (batch, PROMPT), device="cuda")
    asked = {
        "attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0, "eos_token_id": None,
        "min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS, "cache_implementation": "static",
        "disable_compile": disable_compile,
    }  # fmt: skip
    return lambda: model.generate(ids, **asked)


def _table(rows: list[dict[str, Any]]) -> Table:
    """Return a table with the ratios to the eager and the compiled original of the same line."""
    table = Table(title=f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for column in ("", "batch", "", "ms", "to eager", "to compiled", "ms, waited for"):
        table.add_column(column)
    for row in rows:
        line = [each for each in rows if (each["what"], each["batch"]) == (row["what"], row["batch"])]
        found = {each["how"]: each["ms"] for each in line}
        compiled = next((ms for how, ms in found.items() if how.endswith(" compile")), None)
        compiled = compiled or found.get("torch.compile")
        ratios = [row["ms"] / ms if ms else None for ms in (found.get("eager"), compiled)]
        shown = ("" if ratio is None else f"{ratio:.3f}" for ratio in ratios)
        table.add_row(row["what"], str(row["batch"]), row["how"], f"{row['ms']:.3f}", *shown,
                      f"{row['ms waited']:.3f}")  # fmt: skip
    return table


if __name__ == "__main__":
    main()
