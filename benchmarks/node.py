"""Train on the available GPUs, and compare te_transform with other tools.

    torchrun --nproc-per-node 8 benchmarks/node.py --config llama3-8b [--layers 16] [--json rows.jsonl]
    python benchmarks/node.py --config gpt2 --tokens 12288                       # one GPU
    python benchmarks/node.py --config llama3-8b --pretend-ranks 4               # one of four, see below
    torchrun --nproc-per-node 2 benchmarks/node.py --config tiny --device cpu    # try it without a GPU

The model is any causal language model of transformers. Weights, gradients and fused AdamW are in bf16. The
weights are random, and a Markov chain makes the batches. Contenders take turns, each in new processes with
empty compile caches, on the same weights and batches: losses can be compared. If a contender fails on a
rank, it ends on all ranks, and its line has the reason. The model must fit one GPU before it is sharded.
Each line is printed once it is measured. Nothing is asserted.

| column | meaning |
| --- | --- |
| tokens/s/GPU | of the median step of the second half of the steps, on the slowest rank |
| peak memory | of tensors, in all steps |
| 40 + 12 s | time to the end of the first step, and the compile and recording time of later steps |
| MFU | 6 FLOPs per token and parameter without embeddings, and for causal attention, see below |
| loss | of the last step |

Attention counts 12 * layers * width * length / 2 FLOPs. MFU is relative to the bf16 peak of the GPU, also in
FP8. Work that activation checkpoints repeat does not count.

With --pretend-ranks, one GPU is a rank of a group whose other ranks do not exist. Gathers and reductions are
copies: peak memory is that of a rank, a step has no traffic, and no loss is measured.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import multiprocessing
import os
import sys
import tempfile
from dataclasses import asdict
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from command_line import output_file, positive
from node_contenders import CONTENDERS, Contender, with_options
from node_job import TOLD, Row, store_of, tell, work
from torch.distributed.elastic.multiprocessing.errors import record


@record  # reports to torchrun which rank failed first
def main() -> None:
    """Run the contenders one after the other, on all ranks at once."""
    asked = arguments()
    own = hosted_store()  # noqa: F841  as long as this function runs
    ranks, is_first = int(os.environ["WORLD_SIZE"]), os.environ["RANK"] == "0"
    if asked.pretend_ranks:
        ranks = pretended(asked.pretend_ranks, ranks, asked.parallel)
    asked.parallel = asked.parallel or ("fsdp2" if ranks > 1 else "none")
    check(asked.parallel, ranks)
    if is_first:
        print(f"{asked.config}, {ranks} x {asked.tokens:,} tokens a step, {asked.parallel}", flush=True)
    rows = []
    for name, contender in chosen(asked).items():
        rows.append(turn(asked, name, contender))
        if is_first:
            write(rows[-1], asked)
    ran = sorted((row for row in rows if not row.why), key=lambda row: row.tokens_per_second)
    if is_first and ran:
        print(f"{ran[0].parameters:,} parameters, {ran[0].device}, PyTorch {torch.__version__}")
        if asked.plot:
            plot(ran, asked)


def arguments(told: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--config", default="llama3-8b", help="tiny, llama3-8b, a config.json, a model type or a hub's model")
    add("--layers", type=positive, help="number of layers instead of the config's")
    add("--set", type=setting, nargs="+", default=[], metavar="KEY=VALUE", help="other changes of the config")
    add("--tokens", type=positive, default=8192, help="tokens per GPU and step")
    add("--length", type=positive, help="tokens of a sequence; all, if the model takes so many")
    add("--steps", type=positive, default=20, help="steps; the first half warms up")
    add("--learning-rate", type=float, default=1e-4)
    add("--parallel", help="fsdp2, ddp, hsdp:2x4 (replicas x shards) or none; fsdp2 on several GPUs")
    add("--reshard", type=setting_value, default=True, help="fully_shard's: True, False or a number of ranks")
    add("--pretend-ranks", type=positive, help="be one rank of so many, without the others")
    add("--checkpoint", action="store_true", help="activation checkpoints around each layer")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--only", default="", help="comma-separated parts of contenders' names")
    add(
        "--convert", type=settings, action="append", default=[], metavar="KEY=VALUE,...",
        help="one more contender: te_transform with these options of convert()",
    )  # fmt: skip
    add("--json", type=output_file, help="add each row to this file, a line each")
    add("--plot", type=output_file, help="draw the rows into this file, if matplotlib is installed")
    asked = parser.parse_args(told)
    if asked.steps < 3:
        parser.error(f"expected --steps of at least 3, got {asked.steps}; the first half warms up")
    return asked


def setting(text: str) -> tuple[str, Any]:
    """Return the key and the value of "key=value"."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected key=value, got {text}")
    return key, setting_value(value)


def setting_value(text: str) -> Any:
    """Return a Python literal, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def settings(text: str) -> dict[str, Any]:
    """Return the settings in "key=value,key=value"."""
    return dict(map(setting, text.split(",")))


def pretended(ranks: int, started: int, parallel: str | None) -> int:
    """Return the number of ranks. Raise ValueError if one process cannot pretend to be one of them."""
    kind = (parallel or "fsdp2").partition(":")[0]
    if ranks < 2 or started > 1 or kind not in ("fsdp2", "hsdp"):
        raise ValueError(
            "expected --pretend-ranks of at least 2, in one process, with fsdp2 or hsdp, "
            f"got {ranks}, {started} and {kind}; leave it out"
        )
    return ranks


def check(parallel: str, ranks: int) -> None:
    """Raise ValueError unless --parallel is known and suits the number of ranks."""
    kind, _, sizes = parallel.partition(":")
    parts = sizes.split("x")
    is_hybrid = kind == "hsdp" and len(parts) == 2 and all(map(str.isdigit, parts))
    if not is_hybrid and parallel not in ("fsdp2", "ddp", "none"):
        raise ValueError(f"expected --parallel fsdp2, ddp, hsdp:2x4 or none, got {parallel}; pass one")
    needed = {"none": 1, "hsdp": math.prod(map(int, parts)) if is_hybrid else 0}.get(kind, ranks)
    if needed != ranks:
        raise ValueError(f"expected {needed} ranks for --parallel {parallel}, got {ranks}; start {needed}")


def chosen(asked: argparse.Namespace) -> dict[str, Contender]:
    """Return the contenders by name, ours first. Raise ValueError if there are none."""
    found = {}
    for options in asked.convert:
        found |= with_options(options)
    words = [word.strip() for word in asked.only.split(",")]
    found |= {name: each for name, each in CONTENDERS.items() if any(word in name for word in words)}
    if not found:
        raise ValueError(f"expected --only with words of {[*CONTENDERS]}, got {asked.only}; pass some")
    return found


def hosted_store() -> dist.Store | None:
    """Return a store for all ranks, which lives as long as its owner.

    Return None if torchrun's or rank 0's store is used. Without torchrun, set torchrun's variables for one
    process.
    """
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    elif os.environ["RANK"] != "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=True)
    os.environ["MASTER_PORT"] = str(store.port)
    return store


def turn(asked: argparse.Namespace, name: str, contender: Contender) -> Row:
    """Run a contender in a new process on each rank. Return its row once all have ended.

    A rank that fails writes its reason to the store. All other ranks read it there and end their processes,
    even if they wait in a collective.
    """
    absent = [package for package in contender.packages if find_spec(package) is None]
    if absent:
        return Row(name, why=f"{', '.join(absent)} is not installed")
    store, rank, ranks = store_of(name), os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
        process = multiprocessing.get_context("spawn").Process(target=work, args=(asked, name, contender))
        process.start()
        while process.is_alive() and not store.check(["failed"]):
            process.join(0.2)
        if process.is_alive():
            process.kill()
        elif process.exitcode not in (0, TOLD):
            tell(store, f"the process ended with exit code {process.exitcode}")
        process.join()
    store.set(f"ended/{rank}", "")
    store.wait([f"ended/{each}" for each in range(ranks)], timedelta(minutes=15))
    if store.check(["failed"]):
        return failed(name, store.get("failed").decode())
    return Row(**json.loads(store.get("row")))


def failed(name: str, told: str) -> Row:
    """Return the row of a contender from the messages of its ranks: JSON lines in the order of time.

    The row has the first error, the ranks with the same error, and the processes that ended without a
    message.
    """
    errors = [json.loads(each) for each in told.splitlines()]
    ranks: dict[str, list[str]] = {}
    for error in errors:
        if error["why"] == errors[0]["why"] or not error["traceback"]:
            ranks.setdefault(error["why"], []).append(error["rank"])
    why = "; ".join(f"rank {', '.join(sorted(of))}: {reason}" for reason, of in ranks.items())
    return Row(name, why=why, traceback=errors[0]["traceback"])


def line(row: Row) -> str:
    """Return the text of a row."""
    if row.why:
        return f"{row.name:40} did not run: {row.why}"
    mfu = f"{row.mfu:6.1%}" if row.mfu else "     -"
    peak = f"{row.peak:5.1f} GiB" if row.peak else "    - GiB"
    later = f" + {row.later:.0f}" if row.later >= 1 else ""
    loss = f"{row.loss:.4f}" if row.loss else "-"
    return (
        f"{row.name:40} {row.tokens_per_second:9,.0f} tokens/s/GPU  MFU {mfu}  {peak}  "
        f"first step after {row.first:.0f}{later} s  loss {loss}"
    )


def write(row: Row, asked: argparse.Namespace) -> None:
    """Print a row, and add it to the file."""
    print(line(row), flush=True)
    if asked.json:
        with open(asked.json, "a", encoding="utf-8") as file:
            told = {**vars(asked), "ranks": int(os.environ["WORLD_SIZE"]), "torch": torch.__version__}
            file.write(json.dumps({**told, **asdict(row)}) + "\n")


def plot(rows: list[Row], asked: argparse.Namespace) -> None:
    """Draw a bar for each row, with its quartiles."""
    if find_spec("matplotlib") is None:
        print(f"{asked.plot} is not drawn: matplotlib is not installed", file=sys.stderr)
        return
    import matplotlib.pyplot as plt
    from plot_speed import bars

    figure, panel = plt.subplots(figsize=(8, 4.5))
    values = [(row.low, row.tokens_per_second, row.high) for row in rows]
    bars(panel, [row.name for row in rows], values)
    panel.set_title(f"{asked.config}, {os.environ['WORLD_SIZE']} x {rows[0].device}, {asked.parallel}")
    panel.set_xlabel("tokens/s/GPU")
    figure.tight_layout()
    figure.savefig(Path(asked.plot))


if __name__ == "__main__":
    main()
