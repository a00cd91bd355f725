"""Write docs/scaling.md: predict time and memory of training per GPU, from one host to 512 hosts.

    python docs/scaling.py

| number | source |
| --- | --- |
| memory | predicted by te_transform.inspect() from one block on fake tensors |
| communication | bytes over bandwidth |
| products | measured in a step on one H100 |

The page says which numbers are measured, and which are assumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM

import te_transform

TOKENS = 8192  # tokens of one sequence, the batch of a GPU
GPU_MEMORY = 80e9 * 0.9  # bytes; allocators and NCCL take the rest
HOST = 8  # GPUs of a host
NVLINK = 329e9  # bytes per second and GPU; bus bandwidth of an all-reduce of 1 GiB on 2 H100s
NETWORK = 40e9  # bytes per second and GPU; assumed: a 400 Gb/s adapter per GPU
PRODUCTS = 810e12  # operations per second; 8 layers of the 8B shape in FP8 on one H100: 98.8e12 in 121 ms
STATE = 16  # bytes per parameter: weight, gradient and AdamW's two moments, in fp32
IN_FLIGHT = 2  # bytes of a gathered or reduced number: bf16

PAGE = Path(__file__).with_name("scaling.md")
BEGIN, END = "<!-- written by docs/scaling.py -->\n", "<!-- until here -->\n"


@dataclass(frozen=True)
class Model:
    """The sizes of a Llama 3."""

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int = 8
    vocabulary: int = 128256

    @property
    def block(self) -> int:
        """The number of parameters of one block."""
        width = self.hidden // self.heads
        attention = self.hidden * width * (2 * self.heads + 2 * self.groups)
        return attention + 3 * self.hidden * self.ffn + 2 * self.hidden

    @property
    def around(self) -> int:
        """The number of parameters of embedding, last norm and head."""
        return 2 * self.vocabulary * self.hidden + self.hidden

    @property
    def parameters(self) -> int:
        """The number of all parameters."""
        return self.layers * self.block + self.around


MODELS = (
    Model("8B", 32, 4096, 14336, 32),
    Model("70B", 80, 8192, 28672, 64),
    Model("405B", 126, 16384, 53248, 128),
)
GPUS = (8, 64, 512, 4096)


@dataclass(frozen=True)
class Mesh:
    """Replicas of shards of tensor-parallel groups: HSDP, or FSDP with one replica."""

    replicas: int
    shards: int
    tensor: int = 1

    def __str__(self) -> str:
        return f"{self.replicas} x {self.shards} x {self.tensor}"


@contextmanager
def in_bf16() -> Iterator[None]:
    """Create new tensors in bf16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@cache
def one_block(model: Model) -> int:
    """Return the bytes of an FP8 step of the model with one block, without weights and their gradients."""
    config = LlamaConfig(
        hidden_size=model.hidden,
        intermediate_size=model.ffn,
        num_attention_heads=model.heads,
        num_key_value_heads=model.groups,
        num_hidden_layers=1,
        vocab_size=model.vocabulary,
        max_position_embeddings=TOKENS,
        use_cache=False,
    )
    with FakeTensorMode(), in_bf16():
        made = LlamaForCausalLM(config)
        ids = torch.zeros(1, TOKENS, dtype=torch.long)
        inputs = {"input_ids": ids, "labels": ids}
        memory = te_transform.inspect(made, inputs, backend="te", recipe="fp8-delayed").memory
    return memory.peak - memory.gradients


def state(model: Model, mesh: Mesh) -> float:
    """Return the bytes per GPU of weights, gradients and moments."""
    return STATE * model.parameters / mesh.shards / mesh.tensor


def passing(model: Model, mesh: Mesh) -> float:
    """Return the bytes per GPU of temporary tensors, which a tensor-parallel group shares.

    Temporary tensors are:

    - the inputs of blocks, which the backward recomputes,
    - one block with head and loss,
    - gathered weights: those around the blocks, two blocks, and the gradients of one block.
    """
    inputs = (model.layers - 1) * TOKENS * model.hidden * 2
    whole = IN_FLIGHT * (2 * model.around + 3 * model.block)
    return (inputs + one_block(model) + whole) / mesh.tensor


def meshes(gpus: int) -> Iterator[Mesh]:
    """Yield the meshes of this many GPUs, starting with the least communication.

    The first have the fewest shards, of whole hosts. The others have a tensor-parallel group on each host.
    """
    hosts = gpus // HOST
    powers = [2**power for power in range(hosts.bit_length())]
    yield from (Mesh(hosts // power, HOST * power) for power in powers)
    yield from (Mesh(hosts // power, power, HOST) for power in powers)


def mesh_of(model: Model, gpus: int) -> Mesh | None:
    """Return the first mesh that fits, or None."""
    found = meshes(gpus)
    return next((m for m in found if state(model, m) + passing(model, m) <= GPU_MEMORY), None)


def traffic(model: Model, mesh: Mesh) -> tuple[float, float]:
    """Return the bytes per GPU and step that arrive over NVLink, and over the network.

    A step gathers weights twice, and reduces and scatters gradients once. Each time, all other shards arrive.
    If shards are on several hosts, the adapters of a host share the bytes of other hosts, and the rest
    arrives over NVLink. With tensor parallelism, all other shards of a weight are on other hosts.

    Replicas then sum their shards in a ring, which moves them twice. A tensor-parallel block gathers and
    scatters its tokens twice each in the forward, in the recomputed forward and in the backward.
    """
    part = IN_FLIGHT * model.parameters / mesh.tensor
    arriving = 3 * part * (mesh.shards - 1) / mesh.shards
    replicas = 2 * part / mesh.shards * (mesh.replicas - 1) / mesh.replicas
    if mesh.tensor > 1:
        tokens = 12 * model.layers * TOKENS * model.hidden * IN_FLIGHT
        return tokens * (mesh.tensor - 1) / mesh.tensor, arriving + replicas
    hosts = max(1, mesh.shards // HOST)
    return arriving, 3 * part * (hosts - 1) / hosts / HOST + replicas


def seconds(model: Model, mesh: Mesh) -> tuple[float, float, float]:
    """Return the seconds of a step over NVLink, over the network, and in products, each alone.

    Each parameter and token takes 2 operations in the forward, 2 in the recomputed forward and 4 in the
    backward. Causal attention takes 2 operations per layer, token, hidden column and token of the sequence in
    the forward, with the same multiples.
    """
    nvlink, network = traffic(model, mesh)
    weights = model.parameters - model.vocabulary * model.hidden  # without the embedding, which is a lookup
    attention = model.layers * model.hidden * TOKENS
    products = 8 * TOKENS * (weights + attention) / mesh.tensor
    return nvlink / NVLINK, network / NETWORK, products / PRODUCTS


def rows() -> Iterator[list[str]]:
    """Yield the cells of the table."""
    for model in MODELS:
        for gpus in GPUS:
            mesh = mesh_of(model, gpus)
            if mesh is None:
                least = min(state(model, m) + passing(model, m) for m in meshes(gpus))
                yield [model.name, f"{gpus:,}", "none fits", "", "", f"{least / 1e9:,.0f}", *[""] * 6]
                continue
            own, comes = state(model, mesh), passing(model, mesh)
            bytes_moved, times = traffic(model, mesh), seconds(model, mesh)
            piece = IN_FLIGHT * model.block / mesh.shards / mesh.tensor / 1e6
            yield [
                *(model.name, f"{gpus:,}", str(mesh)),
                *(f"{size / 1e9:.1f}" for size in (own, comes)),
                f"{(own + comes) / 1e9:.0f}",
                *(f"{moved / 1e9:.0f}" for moved in bytes_moved),
                *(f"{time:.2f}" for time in times),
                f"{piece:.2f}",
            ]


HEAD = [
    *("model", "GPUs", "replicas x shards x tensor", "state, GB", "comes and goes, GB", "in all, GB"),
    *("NVLink, GB", "network, GB", "NVLink, s", "network, s", "products, s", "piece, MB"),
]


def table() -> str:
    """Return a Markdown table."""
    lines = [HEAD, ["---", *["---:"] * (len(HEAD) - 1)], *rows()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def on_two_gpus() -> str:
    """Return a sentence on the bytes that arrive at a GPU in a step of benchmarks/two_gpus.py."""
    model = Model("", 8, 4096, 14336, 32, vocabulary=32000)
    fsdp, _ = traffic(model, Mesh(1, 2))
    ddp = 2 * IN_FLIGHT * model.parameters / 2
    moved = (f"{size / 1e9:.1f} GB and {size / NVLINK * 1e3:.0f} ms of NVLink" for size in (fsdp, ddp))
    told = "On two GPUs, 8 layers of the 8B shape, vocabulary 32,000: {} under FSDP2, {} under DDP.\n"
    return told.format(*moved)


def page() -> str:
    """Return the page with a new table."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + on_two_gpus() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
