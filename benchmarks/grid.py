"""Compare converted models of all sizes with the best of the other tools, on a Hopper GPU.

    python benchmarks/grid.py grid.jsonl [--models llama bert] [--widths 256 4096] [--tokens 1024 8192]
                              [--modes training inference] [--recipe fp8-delayed] [--jobs 8] [--minutes 9]
    python benchmarks/grid.py grid.jsonl --table
    python benchmarks/grid.py grid.jsonl --plot docs/grid.svg

Four transformers models are converted with each combination of options that compile="auto" tries.

| precision | other contenders |
| --- | --- |
| bf16 | the original: eager, compiled, and compiled without a mask as CUDA graphs |
| bf16, Llama alone | the hand port on TE's layers, without and with TE's CUDA graphs |
| FP8 | torchao, compiled |

The script adds a JSON line for each point, with the milliseconds of each contender. It skips points that
the file contains: call it again until no point is left. Each point is prepared in a process of its own.
--jobs points are prepared at once, then timed one after the other. Times are of consecutive steps. Nothing
is asserted.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import measure
from command_line import json_lines, output_file, positive

VOCABULARY = 32000
LENGTH = 512  # tokens of a row; an image has 197 patches
WIDTHS = (256, 512, 1024, 2048, 4096, 8192)
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
MODELS = ("llama", "gpt2", "bert", "vit")
MODES = ("training", "inference")
MEMORY = 72e9  # the maximum bytes of the points that are prepared at once
ROUNDS, SAMPLE = 15, 0.03  # the number of samples of each contender, and the seconds of a sample


def main() -> None:
    """Measure the points that the file lacks, or show the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("file", type=output_file, help="file of JSON lines to add to")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--widths", nargs="+", type=positive, default=WIDTHS)
    parser.add_argument("--tokens", nargs="+", type=positive, default=TOKENS, help="tokens of a step")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--recipe", default=None, help="an additional recipe")
    parser.add_argument("--jobs", type=positive, default=8, help="number of points to prepare at once")
    parser.add_argument("--minutes", type=float, default=9.0, help="time until the last point starts")
    parser.add_argument("--table", action="store_true", help="print the file as a table")
    parser.add_argument("--plot", type=output_file, help="draw the file")
    parser.add_argument("--point", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.point:
        _measure(json.loads(asked.point))
        return
    known = _read(asked.file)
    if asked.table or asked.plot:
        print("\n".join(_table(known)))
        if asked.plot:
            _draw(known, asked.plot)
        return
    wanted = itertools.product(asked.models, asked.modes, asked.widths, asked.tokens)
    keys = {_key(point) for point in known}
    points = [dict(zip(("model", "mode", "width", "tokens"), each, strict=True)) for each in wanted]
    points = [point | {"recipe": asked.recipe} for point in points]
    points = [point for point in points if _key(point) not in keys]
    end = time.monotonic() + 60 * asked.minutes
    for batch in _batches(points, asked.jobs):
        if time.monotonic() > end:
            break
        for row in _measured(batch):
            print(json.dumps(row), flush=True)
            if len(batch) > 1 and any("OutOfMemory" in error for error in row.get("errors", {}).values()):
                continue  # other points took the memory: the next call measures this point again
            with open(asked.file, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def _read(file: str) -> list[dict[str, Any]]:
    return json_lines(file) if Path(file).exists() else []


def _key(point: dict[str, Any]) -> tuple:
    return tuple(point[name] for name in ("model", "mode", "width", "tokens", "recipe"))


def _batches(points: Sequence[dict[str, Any]], jobs: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the points in order, in batches of at most `jobs` that fit into the GPU's memory."""
    batch: list[dict[str, Any]] = []
    for point in points:
        if batch and (len(batch) == jobs or sum(map(_bytes, [*batch, point])) > MEMORY):
            yield batch
            batch = []
        batch.append(point)
    if batch:
        yield batch


def _bytes(point: dict[str, Any]) -> float:
    """Return an estimate of the memory of all contenders: weights, gradients, and logits in CUDA graphs."""
    width, layers = point["width"], _layers(point["width"])
    training, recipes = point["mode"] == "training", 2 if point["recipe"] else 1
    ported = recipes if point["model"] == "llama" else 0
    weights = 12 * layers * width**2 + (2 if point["model"] == "llama" else 1) * VOCABULARY * width
    contenders = 3 + (recipes - 1) + 2 * ported + 3 * recipes  # the original, torchao, the hand port, ours
    in_graphs = 1 + ported + recipes
    logits = 10 if training else 4  # bytes per logit, with temporary tensors
    return (
        1e9
        + contenders * weights * (4 if training else 2)
        + in_graphs * point["tokens"] * (VOCABULARY * logits + layers * width * (60 if training else 8))
    )


def _layers(width: int) -> int:
    return 4 if width < 4096 else 2 if width < 8192 else 1


def _measured(points: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Prepare these points at once, then time them one by one."""
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "-", "--point", json.dumps(point)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for point in points
    ]
    waiting = [worker for worker in workers if "ready\n" in iter(worker.stdout.readline, "")]
    for point, worker in zip(points, workers, strict=True):
        if worker not in waiting:
            yield point | {"error": "the process ended"}
            continue
        found, _ = worker.communicate("go\n")
        lines = [line for line in found.splitlines() if line.startswith("{")]
        yield json.loads(lines[-1]) if lines else point | {"error": "the process ended"}


def _measure(point: dict[str, Any]) -> None:
    """Measure one point, in a process of its own."""
    import torch
    import transformer_engine.pytorch  # noqa: F401

    steps, errors, notes = {}, {}, []
    for name, make in _contenders(point, notes).items():
        try:
            step = make()
            for _ in range(6):
                step()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # for the other points, which are being prepared
            steps[name] = step
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"[:200]
    print("ready", flush=True)
    sys.stdin.readline()
    times = {name: measure.in_a_row(step, 2) for name, step in steps.items()}
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            samples[name].append(measure.in_a_row(step, max(2, round(SAMPLE / times[name]))))
    found = {name: round(1e3 * statistics.median(each), 4) for name, each in samples.items()}
    gpu = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps(point | {"ms": found, "errors": errors, "notes": notes} | gpu), flush=True)


def _contenders(point: dict[str, Any], notes: list[str]) -> dict[str, Callable[[], Callable[[], None]]]:
    """Return a function that makes each contender's step, by name. Ours begin with te_transform."""
    import torch

    import te_transform

    def original(mode: str | None, masked: bool = True) -> Callable[[], None]:
        with torch.device("cuda"):
            model, inputs = model_of(point)
        if mode is not None:
            model.compile(mode=mode)
        return step_of(point, model, inputs, contextlib.nullcontext if masked else _no_mask)

    def converted(**options: Any) -> Callable[[], None]:
        with torch.device("cuda"):
            model, inputs = model_of(point)
        made = te_transform.convert(model, inputs, backend="te", verify=False, inplace=True, **options)
        step = step_of(point, made, inputs, contextlib.nullcontext)
        for _ in range(6):
            step()
        without = (
            note for note in te_transform.report(made).notes if "without" in note or "uncompiled" in note
        )
        notes.extend(f"{options}: {note}" for note in without)
        return step

    def ported(recipe: str | None, graphs: bool) -> Callable[[], None]:
        import hand_port

        way = hand_port.RECIPES[recipe or "bf16"]
        with torch.device("cuda"):
            model, inputs = model_of(point)
        model = hand_port.llama(model)
        if graphs:
            hand_port.graphed(model, *inputs["input_ids"].shape, way)
        return step_of(point, model, inputs, hand_port.within(way))

    def torchao() -> Callable[[], None]:
        import hand_port

        with torch.device("cuda"):
            model, inputs = model_of(point)
        return step_of(point, hand_port.torchao(model), inputs, contextlib.nullcontext)

    found: dict[str, Callable[[], Callable[[], None]]] = {
        "eager": lambda: original(None),
        "compile": lambda: original("default"),
        "compile, no mask, CUDA graphs": lambda: original("reduce-overhead", masked=False),
    }
    chosen = dict.fromkeys((None, point["recipe"]))
    if point["model"] == "llama":
        for recipe, graphs in itertools.product(chosen, (False, True)):
            words = f"hand port {recipe or 'bf16'}{', CUDA graphs' if graphs else ''}"
            found[words] = lambda recipe=recipe, graphs=graphs: ported(recipe, graphs)
    if point["recipe"]:
        found["torchao float8, compile"] = torchao
    for recipe in chosen:
        words = f"te_transform {recipe or 'bf16'}"
        found[words] = lambda recipe=recipe: converted(recipe=recipe)
        found[f"{words}, compiled"] = lambda recipe=recipe: converted(recipe=recipe, compile=True)
        found[f"{words}, compiled, CUDA graphs"] = lambda recipe=recipe: converted(
            recipe=recipe, compile=True, graphs=True
        )
    return found


def model_of(point: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a model of a point on the current device, with weights in bf16.

    The number of layers is 4, from width 4096 on 2, at width 8192 1, unless the point has another number.
    """
    import torch
    import transformers as hf

    width, tokens = point["width"], point["tokens"]
    layers, heads = point.get("layers") or _layers(width), max(4, width // 128)
    rows, length = max(1, tokens // LENGTH), min(tokens, LENGTH)
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    if point["model"] == "vit":
        model = hf.ViTForImageClassification(
            hf.ViTConfig(**sizes, **none, intermediate_size=4 * width, num_labels=1000)
        )
        rows = max(1, tokens // 197)
        images = torch.randn(rows, 3, 224, 224, dtype=torch.bfloat16)
        inputs = {"pixel_values": images, "labels": torch.randint(1000, (rows,))}
    elif point["model"] == "bert":
        model = hf.BertForMaskedLM(
            hf.BertConfig(**sizes, **none, intermediate_size=4 * width, vocab_size=VOCABULARY)
        )
    elif point["model"] == "gpt2":
        sizes = {"n_embd": width, "n_layer": layers, "n_head": heads}
        none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        model = hf.GPT2LMHeadModel(
            hf.GPT2Config(
                **sizes, **none, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, use_cache=False
            )
        )
    else:
        ffn = 256 * round(width * 8 / 3 / 256)
        model = hf.LlamaForCausalLM(
            hf.LlamaConfig(**sizes, intermediate_size=ffn, vocab_size=VOCABULARY, use_cache=False)
        )
    if point["model"] != "vit":
        ids = torch.randint(VOCABULARY, (rows, length))
        inputs = {"input_ids": ids, "labels": ids}
    if point["mode"] == "inference":
        del inputs["labels"]
    return model.bfloat16().train(point["mode"] == "training"), inputs


def step_of(
    point: dict[str, Any], model: Any, inputs: dict[str, Any], around: Callable[[], Any]
) -> Callable[[], None]:
    """Return a training step without an optimizer, or a forward without gradients."""
    import torch

    def training() -> None:
        model.zero_grad(set_to_none=True)
        with around():
            model(**inputs).loss.backward()

    def inference() -> None:
        with torch.no_grad(), around():
            model(**inputs)

    return training if point["mode"] == "training" else inference


@contextlib.contextmanager
def _no_mask() -> Iterator[None]:
    """Patch transformers to create no masks."""
    from transformers.models.bert import modeling_bert
    from transformers.models.gpt2 import modeling_gpt2
    from transformers.models.llama import modeling_llama

    with contextlib.ExitStack() as stack:
        for module in (modeling_llama, modeling_gpt2, modeling_bert):
            for name in ("create_causal_mask", "create_bidirectional_mask"):
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, lambda *_, **__: None))
        yield


def _complete(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the points at which the original and one of ours ran."""
    needed = ("eager", "te_transform bf16")
    return [row for row in rows if all(name in row.get("ms", {}) for name in needed)]


def _best(row: dict[str, Any]) -> tuple[str, float, str, float]:
    """Return the fastest of the others and the fastest of ours, each with its milliseconds."""
    ours = {name: ms for name, ms in row["ms"].items() if name.startswith("te_transform")}
    theirs = {name: ms for name, ms in row["ms"].items() if name not in ours}
    one, other = min(theirs, key=theirs.get), min(ours, key=ours.get)
    return one, theirs[one], other, ours[other]


def _table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a Markdown table of our ratios to the best of the others, by model, mode and width."""
    measured = _complete(rows)
    tokens = sorted({row["tokens"] for row in measured})
    yield (
        "| "
        + " | ".join(("model", "mode", "recipe", "width", *(f"{each:,} tokens" for each in tokens)))
        + " |"
    )
    yield "| --- | --- | --- | ---: |" + " ---: |" * len(tokens)
    lines: dict[tuple, dict[int, str]] = {}
    for row in measured:
        _, theirs, _, ours = _best(row)
        key = row["model"], row["mode"], row["recipe"] or "", row["width"]
        lines.setdefault(key, {})[row["tokens"]] = f"{theirs:.2f} -> {ours:.2f}, {ours / theirs:.2f}"
    for key, found in sorted(lines.items()):
        yield "| " + " | ".join(map(str, (*key, *(found.get(each, "") for each in tokens)))) + " |"


def _draw(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Draw a square for each point, by width and tokens, in the color of its ratio."""
    import matplotlib.pyplot as plt

    measured = _complete(rows)
    panels = sorted({(row["model"], row["mode"], row["recipe"] or "bf16") for row in measured})
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(3.6 * columns, 3.2 * lines), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, panel in zip(axes.flat, panels, strict=False):
        here = [row for row in measured if (row["model"], row["mode"], row["recipe"] or "bf16") == panel]
        widths, tokens = (sorted({row[name] for row in here}) for name in ("width", "tokens"))
        ratios = [[float("nan")] * len(tokens) for _ in widths]
        for row in here:
            _, theirs, _, ours = _best(row)
            place = widths.index(row["width"]), tokens.index(row["tokens"])
            ratios[place[0]][place[1]] = ours / theirs
            axis.text(place[1], place[0], f"{ours / theirs:.2f}", ha="center", va="center", fontsize=8)
        axis.imshow(ratios, cmap="RdYlGn_r", vmin=0.6, vmax=1.4, aspect="auto")
        axis.set_xticks(range(len(tokens)), map(str, tokens))
        axis.set_yticks(range(len(widths)), map(str, widths))
        axis.set_title(", ".join(panel), fontsize=9)
    figure.suptitle("ms of te_transform / ms of the best of the others, by width and tokens")
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
