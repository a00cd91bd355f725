"""Train a GPT-2 on real text, with conversion, FP8 and the techniques of te_transform.training as flags.

    python examples/train_gpt.py --steps 1000 --json plain.json
    python examples/train_gpt.py --steps 1000 --curriculum --json curriculum.json
    torchrun --nproc-per-node 2 examples/train_gpt.py --fp8 --drop-layers
    python examples/train_gpt.py --read plain.json curriculum.json --plot losses.svg

The text is the Python standard library's sources, byte by byte; every twentieth file is for evaluation. The
budget is the tokens of `--steps` full batches: a run with shorter sequences takes more steps for them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loss_plot import draw
from options import output_file, positive, usable
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import te_transform
from te_transform import training

GPU = torch.cuda.is_available()


def main(given: list[str] | None = None) -> None:
    """Train, then print, write and draw the losses; with --read, only print and draw them."""
    logging.set_verbosity_error()
    asked = arguments(given)
    runs = dict(asked.read)
    if not runs:
        alone = {} if "RANK" in os.environ else {"rank": 0, "world_size": 1, "store": dist.HashStore()}
        if GPU:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        dist.init_process_group("nccl" if GPU else "gloo", **alone)
        history = Run(asked, rank := dist.get_rank(), dist.get_world_size()).train()
        dist.destroy_process_group()
        if rank > 0:
            return
        runs = {Path(asked.json).stem: history}
        Path(asked.json).write_text(json.dumps(history))
    for name, run in runs.items():
        loss, step, tokens, seconds = (run["eval"][-1][key] for key in ("loss", "step", "tokens", "seconds"))
        print(f"{name}: {loss:.4f} nats per byte after {step} steps, {tokens} tokens, {seconds:.1f} s")
    draw({name: run["eval"] for name, run in runs.items()}, asked.plot)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    for flag, what in (
        ("convert", "convert the model"), ("fp8", "convert, with FP8 products"), ("one-bit", "1-bit Adam"),
        ("compile", "convert and compile"), ("drop-layers", "progressive layer dropping"),
        ("curriculum", "short sequences first"), ("reshape", "with --curriculum: drop no tokens"),
    ):  # fmt: skip
        parser.add_argument(f"--{flag}", action="store_true", help=what)
    for flag, value, what in (
        ("lr", 6e-4, "highest learning rate"), ("seed", 0, "seed of weights and data"),
    ):  # fmt: skip
        parser.add_argument(f"--{flag}", type=type(value), default=value, help=f"{what} ({value})")
    for flag, count, what in (
        ("steps", 1000, "full batches whose tokens are the budget"), ("batch", 16, "rows of all processes"),
        ("length", 1024, "bytes of a full sequence"), ("layers", 12, "blocks"), ("width", 768, "of blocks"),
        ("warmup", 100, "steps of the learning rate's warm-up"), ("every", 50, "steps between evaluations"),
        ("curriculum-steps", 300, "steps until sequences are full"),
    ):  # fmt: skip
        parser.add_argument(f"--{flag}", type=positive, default=count, help=f"{what} ({count})")
    for flag, file, what in (("json", "loss.json", "losses"), ("plot", "loss.svg", "curves")):
        parser.add_argument(f"--{flag}", type=output_file, default=file, help=f"file for the {what} ({file})")
    parser.add_argument("--read", type=run_in, nargs="+", default=[], help="draw these files, train nothing")
    asked = parser.parse_args(given)
    ranks, heads = int(os.environ.get("WORLD_SIZE", 1)), heads_of(asked.width)
    if asked.batch % ranks:
        parser.error(f"expected a --batch that {ranks} processes can share equally, got {asked.batch}")
    if asked.width % heads:
        parser.error(f"expected a --width that is a multiple of {heads} heads, got {asked.width}")
    if asked.reshape and not asked.curriculum:
        parser.error("expected --curriculum with --reshape, got --reshape alone; add --curriculum")
    return asked


def run_in(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the losses of a run that --json wrote."""
    try:
        run = json.loads(Path(text).read_text())
        draw({text: run["eval"]}, os.devnull)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise argparse.ArgumentTypeError(
            f"expected a file that --json wrote after a run, got {text} ({type(error).__name__}: {error})"
        ) from error
    return Path(text).stem, run


def heads_of(width: int) -> int:
    """Return the number of attention heads: 64 columns each."""
    return max(1, width // 64)


def read(files: list[Path]) -> Tensor:
    """Return the bytes of all files."""
    return torch.frombuffer(bytearray().join(file.read_bytes() for file in files), dtype=torch.uint8)


def sampled(text: Tensor, count: int, length: int, seed: int) -> Tensor:
    """Return `count` rows of `length` bytes, from places of the text that `seed` decides."""
    starts = torch.randint(len(text) - length, (count,), generator=torch.Generator().manual_seed(seed))
    return text.unfold(0, length, 1)[starts]


def collated(rows: list[Tensor]) -> dict[str, Tensor]:
    """Return a batch of token ids [batch, length], and the same as labels, which GPT2LMHeadModel shifts."""
    ids = torch.stack(rows).long()
    return {"input_ids": ids, "labels": ids}


class Run:
    """A model with its data and optimizer, the same on each rank but for the rows."""

    def __init__(self, asked: argparse.Namespace, rank: int, ranks: int) -> None:
        self.asked, self.rank, self.ranks, rows = asked, rank, ranks, asked.batch // ranks
        stdlib = Path(sysconfig.get_paths()["stdlib"])
        files = sorted([*stdlib.glob("*.py"), *stdlib.glob("[!s]*/*.py")])  # without site-packages
        text, held_out = read([file for i, file in enumerate(files) if i % 20]), read(files[::20])
        tests = sampled(held_out, 4 * rows, asked.length, seed=rank)
        self.tests = [collated([*part]) for part in tests.split(rows)]
        count = rows * (asked.steps + asked.curriculum * asked.curriculum_steps)  # short steps take less
        data: Any = sampled(text, count, asked.length, seed=asked.seed * ranks + rank)
        self.loader: Any = DataLoader(data, rows, collate_fn=collated, num_workers=2 * GPU, pin_memory=GPU)
        if asked.curriculum:
            lengths = {"max_length": asked.length, "total_steps": asked.curriculum_steps}
            self.loader = training.SequenceCurriculum(self.loader, **lengths, reshape=asked.reshape)
        self.device = torch.device("cuda", torch.cuda.current_device()) if GPU else torch.device("cpu")
        self.autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=GPU)
        self.model: nn.Module = self.built()
        self.drops = training.drop_layers(self.model, asked.steps) if asked.drop_layers else None
        self.runner: Any = self.model
        if ranks > 1 or asked.one_bit:
            self.runner = DistributedDataParallel(self.model)
        adam: Any = training.OneBitAdam if asked.one_bit else torch.optim.AdamW
        options = {"freeze_step": max(1, asked.steps // 5)} if asked.one_bit else {}
        self.optimizer = adam(self.model.parameters(), lr=asked.lr, weight_decay=0.1, **options)
        if asked.one_bit:
            self.optimizer.register(self.runner)

    def built(self) -> nn.Module:
        """Return a GPT-2 with random weights, converted if asked for."""
        asked = self.asked
        torch.manual_seed(asked.seed)
        sizes = {"n_positions": asked.length, "n_embd": asked.width, "n_layer": asked.layers}
        sizes |= {"n_head": heads_of(asked.width), "vocab_size": 256}
        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "bos_token_id", "eos_token_id"), 0)
        config = GPT2Config(**sizes, **off, use_cache=False)
        model = GPT2LMHeadModel(config).train()
        model.to(self.device)  # pyright: ignore  # transformers annotates no self
        if asked.convert or asked.fp8 or asked.compile or asked.drop_layers:
            options = {"recipe": "fp8-delayed" if asked.fp8 else None, "compile": asked.compile}
            with self.autocast, usable():
                model = te_transform.convert(model, self.moved(self.tests[0]), **options, inplace=True)
        return model

    def train(self) -> dict[str, Any]:
        """Train for the budget of tokens; return each step's loss, and evaluations with their seconds."""
        losses, evaluations, tokens, seconds = [], [], 0, 0.0
        full, budget = (n * self.asked.batch * self.asked.length for n in (1, self.asked.steps))
        cosine = CosineAnnealingLR(self.optimizer, self.asked.steps, eta_min=self.asked.lr / 10)
        schedule = training.TokenSchedule(cosine, full, warmup_steps=self.asked.warmup)
        with Progress(disable=self.rank > 0 or not sys.stdout.isatty(), transient=True) as bar:
            task, start = bar.add_task("training", total=budget), time.perf_counter()
            for step, batch in enumerate(self.loader, 1):
                loss, new = self.step(batch), batch["input_ids"].numel() * self.ranks
                schedule.step(new)
                tokens += new
                losses.append((step, tokens, batch["input_ids"].shape[1], loss))
                bar.update(task, completed=tokens)
                if step % self.asked.every == 0 or tokens >= budget:
                    if GPU:
                        torch.cuda.synchronize()
                    seconds += time.perf_counter() - start
                    found = self.evaluated()
                    evaluations.append({"step": step, "tokens": tokens, "seconds": seconds, "loss": found})
                    start = time.perf_counter()
                if tokens >= budget:
                    break
        steps = [{"step": a, "tokens": b, "length": c, "loss": float(d)} for a, b, c, d in losses]
        return {"asked": vars(self.asked), "ranks": self.ranks, "train": steps, "eval": evaluations}

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        """Take one step of the optimizer; return the loss before it."""
        with self.autocast:
            loss = self.runner(**self.moved(batch)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.drops:
            self.drops.step()
        return loss.detach()

    @torch.no_grad()
    def evaluated(self) -> float:
        """Return the mean loss of all ranks on full sequences, the same at each call, in nats per byte."""
        self.model.eval()
        with self.autocast:
            losses = [self.model(**self.moved(batch)).loss.double() for batch in self.tests]
        self.model.train()
        dist.all_reduce(total := torch.stack(losses).sum())
        return total.item() / len(self.tests) / self.ranks

    def moved(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the batch on the device of the model."""
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}


if __name__ == "__main__":
    main()
