"""Measure convert(model) without options on published models of base size, in bf16, on a GPU.

    python benchmarks/base_sizes.py [NAME ...] [--json PATH]

Inputs are 8 sequences of 128 tokens, or 8 images of 224 x 224. The calls are a training step without an
optimizer, and a forward without gradients. Original and converted model take turns in one process. Times
are milliseconds of consecutive steps; the first step of each turn is dropped. The column "runs" has the code
that te_transform/execution/trials.py chose for the call. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import measure
import torch
import transformers as hf
import with_te  # noqa: F401
from command_line import on_gpu, output_file
from grid import step_of
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import te_transform
from te_transform.execution.attach import runner_of

BATCH, LENGTH, SIDE, VOCABULARY, CLASSES = 8, 128, 224, 8192, 1000
WARM_UPS, ROUNDS, STEPS = 30, 12, 6
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": VOCABULARY}
OFF = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
NONE = {"dropout": 0.0}
USUAL = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
BART = {"encoder_layers": 6, "decoder_layers": 6, "d_model": 768, "decoder_start_token_id": 0}
DISENTANGLED = {
    "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 256,
    "share_att_key": True,
}  # fmt: skip
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
# the common prefix of the classes, the task, and the arguments of the config
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "BERT": ("Bert", "MaskedLM", OFF),
    "RoBERTa": ("Roberta", "MaskedLM", OFF),
    "DistilBERT": ("DistilBert", "MaskedLM", NONE | {"attention_dropout": 0.0}),
    "ELECTRA": ("Electra", "MaskedLM", OFF),
    "DeBERTa v3": ("DebertaV2", "MaskedLM", USUAL | OFF | DISENTANGLED),
    "ViT": ("ViT", "ImageClassification", OFF),
    "DeiT": ("DeiT", "ImageClassification", OFF),
    "BEiT": ("Beit", "ImageClassification", OFF | {"drop_path_rate": 0.0}),
    "DINOv2": ("Dinov2", "ImageClassification", OFF | {"image_size": SIDE}),
    "Swin": ("Swin", "ImageClassification", OFF | {"drop_path_rate": 0.0}),
    "GPT-2": ("GPT2", "CausalLM", NO_DROPOUT),
    "OPT": ("OPT", "CausalLM", NONE),
    "GPT-NeoX": ("GPTNeoX", "CausalLM", USUAL),
    "Llama": ("Llama", "CausalLM", USUAL | {"intermediate_size": 2048}),
    "BART": ("Bart", "ConditionalGeneration", NONE | BART),
    "T5": ("T5", "ConditionalGeneration", {"dropout_rate": 0.0, "decoder_start_token_id": 0}),
    "Whisper": ("Whisper", "ConditionalGeneration", {"max_source_positions": 500, "num_mel_bins": 80}),
}
HEADS = {"GPT2": "GPT2LMHeadModel"}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*MODELS, []], help="names of models (default: all)")
    parser.add_argument("--json", type=output_file, help="also write the rows to this file")
    asked = on_gpu(parser, "transformer_engine")
    table = Table(title=f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for column in ("model", "call", "original, ms", "converted", "ratio", "runs"):
        table.add_column(column)
    rows = []
    for name in asked.names or MODELS:
        for training in (False, True):
            row = _row(name, training)
            print(row, file=sys.stderr, flush=True)
            rows.append(row)
            one, other = row["original"], row["converted"]
            table.add_row(name, row["call"], f"{one:.2f}", f"{other:.2f}", f"{other / one:.3f}", row["runs"])
    Console().print(table)
    if asked.json:
        Path(asked.json).write_text("".join(json.dumps(row) + "\n" for row in rows))


def _row(name: str, training: bool) -> dict[str, Any]:
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    model, batch = _model(name, training)
    converted = te_transform.convert(model.train(training), batch, verify=False)
    call = "training" if training else "inference"
    steps = [step_of({"mode": call}, each, batch, nullcontext) for each in (model, converted)]
    for step in steps:
        measure.in_a_row(step, WARM_UPS)
    taken: list[list[float]] = [[], []]
    for number in range(ROUNDS):
        for step, seconds in [*zip(steps, taken, strict=True)][:: 1 if number % 2 else -1]:
            measure.in_a_row(step, 1)
            seconds.append(measure.in_a_row(step, STEPS))
    one, other = (1e3 * statistics.median(seconds) for seconds in taken)
    own = [trial.own for trial in runner_of(converted).user_code.trials.trials.values() if trial.left]
    runs = {(True,): "own code", (False,): "captured"}.get(tuple(own), "by turns")
    return {"model": name, "call": call, "original": one, "converted": other, "runs": runs}


def _model(name: str, training: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    kind, task, told = MODELS[name]
    torch.manual_seed(0)
    ids = torch.randint(5, VOCABULARY, (BATCH, LENGTH))
    if task == "ImageClassification":
        config = {"num_labels": CLASSES}
        batch = {"pixel_values": torch.randn(BATCH, 3, SIDE, SIDE, dtype=torch.bfloat16)}
        labels = torch.randint(CLASSES, (BATCH,))
    elif kind == "Whisper":
        config, labels = TOKENS | {"decoder_start_token_id": 1}, ids
        batch = {"input_features": torch.randn(BATCH, 80, 1000, dtype=torch.bfloat16)}
    else:
        config, labels = TOKENS, ids
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if training or task == "ConditionalGeneration":
        batch["labels"] = labels
    made = getattr(hf, HEADS.get(kind, f"{kind}For{task}"))(getattr(hf, f"{kind}Config")(**config, **told))
    return made.to("cuda", torch.bfloat16), {name: each.cuda() for name, each in batch.items()}


if __name__ == "__main__":
    main()
