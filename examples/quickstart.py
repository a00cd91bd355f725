"""Train a small GPT-2, convert it in the middle of training, and see that nothing changes.

    python examples/quickstart.py

Everything is real but small: Hugging Face's GPT-2 class with random weights, bytes as tokens, and for text
the sources of Python's standard library on this machine. It takes less than two minutes on two CPU cores,
and needs no GPU, no Transformer Engine and no network.
"""

import copy
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, fx, nn
from torch.optim import AdamW, Optimizer
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel
from transformers.utils import logging

import te_transform

BATCH, LENGTH = 16, 64
BEFORE, AFTER, SHOWN = 100, 100, 20  # steps before and after the conversion, and between two printed losses
ULP = torch.finfo(torch.float32).eps

Batch = dict[str, Tensor]
console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)


def main() -> int:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # more threads hardly speed up a small model, and change the last digits
    torch.manual_seed(0)
    batches = read_batches()

    console.rule("1. An ordinary model, trained for a while")
    model = GPT2LMHeadModel(small_gpt2())
    optimizer = AdamW(model.parameters(), lr=7e-4)
    losses = [train_step(model, optimizer, batch) for batch in progress(islice(batches, BEFORE), BEFORE)]
    console.print(f"loss: {', '.join(f'{loss:.2f}' for loss in [*losses[::SHOWN], losses[-1]])}")

    console.rule("2. Converted; the parameters are the same, so the optimizer's state loads as it is")
    example = {name: tensor[:2] for name, tensor in next(batches).items()}
    converted = te_transform.convert(model, example)
    converted_optimizer = optimizer_like(optimizer, converted)
    report = te_transform.report(converted)
    traced, rewritten = operations(report.before), operations(report.after)
    console.print(f"{traced} operations captured, {rewritten} after the rewrite")
    console.print(report)

    console.rule("3. Verified: outputs and every gradient, against the original in fp64")
    verification = te_transform.verify(model, converted, example)
    console.print(in_short(verification))

    console.rule("4. Both go on training, on the same batches")
    runs = [(model, optimizer), (converted, converted_optimizer), rounded_otherwise(model, optimizer)]
    agree = train_side_by_side(runs, progress(islice(batches, AFTER), AFTER))

    console.rule("5. Saved, and loaded into the class as Hugging Face wrote it")
    home = comes_home(converted, model)

    console.rule()
    if verification and agree and home:
        console.print("OK: verified, the losses agree, and the checkpoint loads bitwise.", style="green")
        return 0
    found = f"verified: {bool(verification)}, losses agree: {agree}, checkpoint loads bitwise: {home}"
    console.print(f"FAILED: {found}", style="red")
    return 1


def read_batches() -> Iterator[Batch]:
    """Yield random pieces of the standard library's sources. Hugging Face's models shift the labels."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray().join(file.read_bytes() for file in sorted(folder.glob("*.py")))
    console.print(f"{len(text) / 1e6:.1f} MB of text from {folder}")
    tokens, generator = torch.frombuffer(text, dtype=torch.uint8), torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(tokens) - LENGTH, (BATCH,), generator=generator)
        pieces = torch.stack([tokens[start : start + LENGTH] for start in starts]).long()
        yield {"input_ids": pieces, "labels": pieces}


def small_gpt2() -> GPT2Config:
    """Return the config of a GPT-2 with four layers and no dropout.

    Two runs agree only if they draw the same random masks, and a fused attention kernel may draw its own.
    """
    config = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    config.bos_token_id = config.eos_token_id = 0
    return config


def train_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> float:
    """Take one step of the optimizer; return the loss before it."""
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def rounded_otherwise(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    """Return the yardstick: a copy with every weight off by at most one rounding, and its optimizer.

    A converted model adds the same numbers in another order. The copy shows how much rounding alone changes
    the losses.
    """
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1 + ULP * torch.randint(-1, 2, parameter.shape))
    return twin, optimizer_like(optimizer, twin)


def optimizer_like(optimizer: Optimizer, model: nn.Module) -> Optimizer:
    """Return an optimizer for a copy of the model, with a copy of the state."""
    twin = AdamW(model.parameters(), lr=optimizer.defaults["lr"])
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return twin


def operations(graph: fx.Graph) -> int:
    return sum(node.op.startswith("call") for node in graph.nodes)


def train_side_by_side(runs: list[tuple[nn.Module, Optimizer]], batches: Iterable[Batch]) -> bool:
    """Train original, converted and yardstick. Return True if the converted losses are the original's."""
    history = [[train_step(*run, batch) for run in runs] for batch in batches]
    table = Table("step", "original", "converted", "difference", "rounding alone", box=box.SIMPLE_HEAD)
    for step in [*range(0, AFTER, SHOWN), AFTER - 1]:
        original, converted, twin = history[step]
        differences = [f"{loss - original:+.1e}" for loss in (converted, twin)]
        table.add_row(str(BEFORE + step + 1), f"{original:.6f}", f"{converted:.6f}", *differences)
    console.print(table)
    difference = max(abs(converted - original) for original, converted, _ in history)
    rounding = max(max(abs(twin - original), ULP * original) for original, _, twin in history)
    console.print(f"largest difference of {AFTER} steps: {difference:.1e}; by rounding alone: {rounding:.1e}")
    return difference <= 10 * rounding  # the same kind of noise: 10 is room for luck


def comes_home(converted: PreTrainedModel, model: PreTrainedModel) -> bool:
    """Return True if a checkpoint of `converted` has `model`'s names and loads into its class bitwise."""
    with tempfile.TemporaryDirectory() as folder:
        converted.save_pretrained(folder)
        loaded = type(model).from_pretrained(folder).state_dict()
    saved = converted.state_dict()
    named = list(loaded) == list(saved) == list(model.state_dict())
    same = named and all(torch.equal(loaded[name], saved[name]) for name in loaded)
    said = "under their original names, bitwise" if same else "that are NOT the same"
    console.print(f"{len(loaded)} tensors {said}")
    return same


def progress(batches: Iterable[Batch], total: int) -> Iterable[Batch]:
    """Show a bar on a terminal, and nothing elsewhere."""
    watched = console.is_terminal
    return track(batches, "training", total=total, console=console, transient=True, disable=not watched)


def in_short(verification: te_transform.Verification) -> Table:
    """Return a line for each set of inputs, with its closest call. print(verification) shows more."""
    columns = ("inputs", "passed", "closest call", "error", "original's", "allowed")
    table = Table(*columns, box=box.SIMPLE_HEAD, title=verification.title, title_justify="left")
    for inputs, group in groupby(verification.rows, key=lambda row: row.inputs.partition(", ")[0]):
        rows = list(group)
        close = max(rows, key=lambda row: row.times if row.dtype or row.reason else 0.0)
        errors = [f"{error:.1e}" for error in (close.converted, close.original, close.allowed)]
        passed = f"{sum(row.ok for row in rows)} of {len(rows)}"
        table.add_row(inputs, passed, *([close.name, *errors] if close.dtype else ["bitwise", "", "", ""]))
    return table


if __name__ == "__main__":
    sys.exit(main())
