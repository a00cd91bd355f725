"""Train a small Llama with FSDP2 on several GPUs or on a CPU, and resume a killed run from its checkpoint.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nproc-per-node 2 --max-restarts 3 examples/train_fsdp.py --steps 100 --folder checkpoints

Without the variable, torchrun keeps one store across restarts (PyTorch 2.13). A restarted process may then
read the address of an ended process, and fail (pytorch/pytorch#135712).

The text is the Python standard library's sources, byte by byte. Every few steps, the script writes a
checkpoint: the sharded model and optimizer, the step and FP8's scales. Data and random numbers depend on the
step alone. Run the script again with any number of processes: it continues from the last whole checkpoint.
"""

from __future__ import annotations

import argparse
import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from options import positive, usable
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import te_transform

HEADS = 8
BATCH, LENGTH = 8, 128  # of all ranks together: the losses do not depend on their number
GPU = torch.cuda.is_available()


@record  # torchrun then says which rank failed first, and of what
def main() -> None:
    """Train in this process, one of the ranks."""
    asked = arguments()
    # longer than any step or checkpoint: if a rank has ended, the others stop waiting after this time
    dist.init_process_group("nccl" if GPU else "gloo", timeout=timedelta(seconds=50))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if GPU else torch.device("cpu")
    if GPU:
        torch.cuda.set_device(device)
    model, optimizer = made(asked, device)
    text, first = standard_library(), load(asked.folder, model, optimizer)
    for step in range(first, asked.steps):
        torch.manual_seed(step * BATCH + rank)  # of dropouts, if there were any
        rows = batch(text, step)[rank * BATCH // ranks : (rank + 1) * BATCH // ranks].to(device)
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.17g}", flush=True)
        if (step + 1) % asked.every == 0 or step + 1 == asked.steps:
            save(asked.folder, model, optimizer, step + 1)
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--recipe", help='"fp8-delayed", "fp8-current" and others, which need a GPU')
    parser.add_argument("--steps", type=positive, default=100)
    parser.add_argument("--every", type=positive, default=10, help="steps from one checkpoint to the next")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--width", type=positive, default=256)
    asked = parser.parse_args()
    if asked.width % (2 * HEADS):
        parser.error(f"expected a --width that is a multiple of {2 * HEADS}, got {asked.width}")
    if "RANK" not in os.environ:
        parser.error(
            "expected torchrun to start this script, got python; call torchrun examples/train_fsdp.py"
        )
    return asked


def made(asked: argparse.Namespace, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model, converted and then sharded, and its optimizer: the same in each process."""
    ranks = dist.get_world_size()
    if BATCH % ranks:
        raise ValueError(f"expected a number of processes that divides a batch of {BATCH}, got {ranks}")
    torch.manual_seed(0)
    sizes = {"hidden_size": asked.width, "intermediate_size": 2 * asked.width, "num_attention_heads": HEADS}
    config = LlamaConfig(
        vocab_size=256, num_hidden_layers=asked.layers, num_key_value_heads=4, **sizes, use_cache=False
    )
    model = LlamaForCausalLM(config)
    dtype = torch.bfloat16 if GPU else torch.float32
    model.to(device, dtype)  # pyright: ignore  # transformers annotates no self
    example = torch.zeros(BATCH // ranks, LENGTH, dtype=torch.long, device=device)
    inputs = {"input_ids": example, "labels": example}
    # as small as this model is, its products would gain nothing from FP8, and stay out of it
    with usable():
        recipe = te_transform.PrecisionPlan(asked.recipe, small_calls=True) if asked.recipe else None
        model = te_transform.convert(model, inputs, recipe=recipe, inplace=True)
    mesh = init_device_mesh(device.type, (ranks,))
    te_transform.check_ranks(model, mesh)  # an error, where ranks that differ would wait for each other
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model.train(), torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """Return the contents of a checkpoint: shards that any number of ranks can load, and FP8's scales."""
    weights, moments = get_state_dict(model, optimizer)
    scales = te_transform.scaling_state(model)
    return {"model": weights, "optimizer": moments, "scales": scales, "step": torch.tensor(step)}


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write a checkpoint under another name, and rename it when every rank has written its part."""
    unfinished, whole = folder / f"unfinished-{step}", folder / f"step-{step:08d}"
    dcp.save(state_of(model, optimizer, step), checkpoint_id=unfinished)
    if dist.get_rank() == 0:
        shutil.rmtree(whole, ignore_errors=True)
        unfinished.rename(whole)  # which happens as a whole or not at all
    dist.barrier()


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the last whole checkpoint, if there is one. Return the step to continue with."""
    found: list[str | None] = [max((str(path) for path in folder.glob("step-*")), default=None)]
    if dist.get_rank() == 0:
        for left in folder.glob("unfinished-*"):  # by a run that was killed while it wrote
            shutil.rmtree(left)
    dist.broadcast_object_list(found)  # ranks may not see a shared folder's news at the same time
    if found[0] is None:
        return 0
    state = state_of(model, optimizer, 0)
    dcp.load(state, checkpoint_id=found[0])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    te_transform.load_scaling_state(model, state["scales"])
    return int(state["step"])


def standard_library() -> Tensor:
    """Return the bytes of Python's own sources, in the order of their names."""
    sources = [file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("*.py"))]
    return torch.frombuffer(bytearray(b"".join(sources)), dtype=torch.uint8).long()


def batch(text: Tensor, step: int) -> Tensor:
    """Return token ids [BATCH, LENGTH]. They depend on the step alone, so no order is saved."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=generator).tolist()
    return torch.stack([text[start : start + LENGTH] for start in starts])


if __name__ == "__main__":
    main()
