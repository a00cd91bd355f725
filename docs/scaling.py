"""Write docs/scaling.md: what training takes per GPU, on paper, from one host to 512 of them.

    python docs/scaling.py

Memory is the prediction that te_transform.inspect() makes, of one block on fake tensors; what traffic takes
is bytes over bandwidths; what the products take is what a step on one H100 took. The page says what of that
was measured and what is assumed.
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

TOKENS = 8192  # of one sequence, a GPU's batch
GPU_MEMORY = 80e9 * 0.9  # bytes; the rest is what allocators and NCCL take
HOST = 8  # GPUs
NVLINK = 329e9  # bytes a second and GPU; bus bandwidth of an all-reduce of 1 GiB on 2 H100s
NETWORK = 40e9  # bytes a second and GPU; assumed, of a 400 Gb/s adapter for each
PRODUCTS = 810e12  # operations a second; 8 layers of the 8B shape in FP8 on one H100: 98.8e12 in 121 ms
STATE = 16  # bytes a parameter: weight, gradient and AdamW's two moments, in fp32
IN_FLIGHT = 2  # bytes a number that is gathered, or reduced: bf16

PAGE = Path(__file__).with_name("scaling.md")
BEGIN, END = "<!-- written by docs/scaling.py -->\n", "<!-- until here -->\n"


@dataclass(frozen=True)
class Model:
    """A Llama 3 by its sizes."""

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int = 8
    vocabulary: int = 128256

    @property
    def block(self) -> int:
        """The parameters of one block."""
        width = self.hidden // self.heads
        attention = self.hidden * width * (2 * self.heads + 2 * self.groups)
        return attention + 3 * self.hidden * self.ffn + 2 * self.hidden

    @property
    def around(self) -> int:
        """The parameters of embedding, last norm and head."""
        return 2 * self.vocabulary * self.hidden + self.hidden

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.layers * self.block + self.around


MODELS = (
    Model("8B", 32, 4096, 14336, 32),
    Model("70B", 80, 8192, 28672, 64),
    Model("405B", 126, 16384, 53248, 128),
)
GPUS = (8, 64, 512, 4096)


@dataclass(frozen=True)
class Mesh:
    """Replicas of shards of tensor-parallel groups: HSDP, or FSDP where there is one replica."""

    replicas: int
    shards: int
    tensor: int = 1

    def __str__(self) -> str:
        return f"{self.replicas} x {self.shards} x {self.tensor}"


@contextmanager
def in_bf16() -> Iterator[None]:
    """New tensors are."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@cache
def one_block(model: Model) -> int:
    """Bytes that a step of the model with one block takes beside weights and their gradients, in FP8."""
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
    """Bytes a GPU of weights, gradients and moments that are there all the time."""
    return STATE * model.parameters / mesh.shards / mesh.tensor


def passing(model: Model, mesh: Mesh) -> float:
    """Bytes a GPU of what comes and goes, of which a tensor-parallel group has a part each.

    The inputs of blocks, which are run again in the backward; one block with the head and the loss; and what
    is whole of the weights: those around the blocks, two blocks' and the gradients of one.
    """
    inputs = (model.layers - 1) * TOKENS * model.hidden * 2
    whole = IN_FLIGHT * (2 * model.around + 3 * model.block)
    return (inputs + one_block(model) + whole) / mesh.tensor


def meshes(gpus: int) -> Iterator[Mesh]:
    """Those of so many GPUs, from the one with the least traffic on: the fewest shards, of whole hosts, and
    then with a tensor-parallel group on each host."""
    hosts = gpus // HOST
    powers = [2**power for power in range(hosts.bit_length())]
    yield from (Mesh(hosts // power, HOST * power) for power in powers)
    yield from (Mesh(hosts // power, power, HOST) for power in powers)


def mesh_of(model: Model, gpus: int) -> Mesh | None:
    """The first mesh that fits; None where none does."""
    found = meshes(gpus)
    return next((m for m in found if state(model, m) + passing(model, m) <= GPU_MEMORY), None)


def traffic(model: Model, mesh: Mesh) -> tuple[float, float]:
    """Bytes a GPU and step that arrive over NVLink, and over the network.

    Weights are gathered twice, gradients reduced and scattered once: each time all shards but the own one
    arrive. Of shards on several hosts a host's adapters share what comes from the others, and NVLink has the
    rest; with tensor parallelism the shards of a weight are all on other hosts. Replicas then add up their
    shards, which a ring moves twice. A tensor-parallel block gathers its tokens twice and scatters them
    twice, forward, again for the backward, and in it.
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
    """What a step takes of NVLink, of the network, and of the products, each by itself.

    Products: 2 operations a parameter and token forward, again for the backward, and 4 in it; a causal
    attention has 2 a layer, token, number of the hidden size and token of the sequence, and as often again.
    """
    nvlink, network = traffic(model, mesh)
    weights = model.parameters - model.vocabulary * model.hidden  # but for the embedding, which is looked up
    attention = model.layers * model.hidden * TOKENS
    products = 8 * TOKENS * (weights + attention) / mesh.tensor
    return nvlink / NVLINK, network / NETWORK, products / PRODUCTS


def rows() -> Iterator[list[str]]:
    """The cells of the table."""
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
    """In Markdown."""
    lines = [HEAD, ["---", *["---:"] * (len(HEAD) - 1)], *rows()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def on_two_gpus() -> str:
    """What arrives at a GPU in a step of benchmarks/two_gpus.py, in a sentence."""
    model = Model("", 8, 4096, 14336, 32, vocabulary=32000)
    fsdp, _ = traffic(model, Mesh(1, 2))
    ddp = 2 * IN_FLIGHT * model.parameters / 2
    moved = (f"{size / 1e9:.1f} GB and {size / NVLINK * 1e3:.0f} ms of NVLink" for size in (fsdp, ddp))
    told = "On two GPUs, 8 layers of the 8B shape, vocabulary 32,000: {} under FSDP2, {} under DDP.\n"
    return told.format(*moved)


def page() -> str:
    """The page, with the table as it is computed now."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + on_two_gpus() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
