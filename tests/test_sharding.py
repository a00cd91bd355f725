"""Captured graphs on shards: the numbers of the whole ones, for every model of the test list."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from te_transform.parallel.collectives import Ranks, Redistribution, Shards, redistributed
from te_transform.parallel.layout import ShardLayout, lay_out
from te_transform.parallel.sharded import on_shards
from te_transform.parallel.sharding import Refusal, step
from tests.captures import FORMS, Captured, canonicalize, capture, executable
from tests.conversions import each
from tests.threads import in_threads
from tests.zoo import CASES, EXTRA, Case, tensors, zero_dropout

ALL = {**CASES, **EXTRA}


def sample_of(case: Case) -> dict[str, Any]:
    sample = case.sample(batch=2, seq=12)
    return (
        sample | {"labels": sample["input_ids"], "use_cache": False} if case.causal_lm and case.hf else sample
    )


def loss_of(outputs: Any) -> Tensor:
    """A number that each output has a part in."""
    found = [t.double() for t in tensors(outputs) if t.requires_grad]
    return sum((t * torch.linspace(0.5, 1, t.numel()).view(t.shape)).sum() for t in found)


def gradients(run: Any, arguments: Sequence[Any]) -> tuple[list[Tensor], list[Tensor | None]]:
    """The outputs of a graph, and the gradients of its arguments."""
    leaves = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in arguments]
    outputs = run(*leaves)
    if any(output.requires_grad for output in tensors(outputs)):
        loss_of(outputs).backward()
    return [*tensors(outputs)], [leaf.grad for leaf in leaves if isinstance(leaf, Tensor)]


def on_one_rank(captured: Captured, layout: ShardLayout, sequence: bool, ranks: Ranks) -> Any:
    """A function that does the same on shards, with whole gradients."""
    nodes = [node for node in captured.module.graph.nodes if node.op == "placeholder"]
    shards = {node.name: held for node, held in layout.shards.items()}
    made = on_shards(captured.module, shards, ranks, sequence, FORMS)

    def run(*leaves: Any) -> Any:
        given = []
        for node, leaf in zip(nodes, leaves, strict=True):
            part = share(leaf, shards.get(node.name), ranks) if isinstance(leaf, Tensor) else leaf
            given.append(made.moves[node.name](part) if node.name in made.moves else part)
        return made.module(*given)

    return partial(gradients, run, captured.inputs)


def share(whole: Tensor, shards: Shards | None, ranks: Ranks) -> Tensor:
    """A rank's share of a parameter, whose gradient is gathered."""
    return whole if shards is None else redistributed(whole, Redistribution.SHARE, ranks, shards)


def close(found: Tensor, exact: Tensor, scale: float) -> bool:
    return (found - exact).norm().item() <= 1e-6 * max(scale, exact.norm().item())


def compare(case: Case, count: int) -> list[ShardLayout]:
    """In fp64, where only a wrong sum is off by more than rounding, some of which is in fp32 by the models'
    own casts."""
    sample = {
        k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in sample_of(case).items()
    }
    layouts = []
    for captured in capture(zero_dropout(case.build()).double().train(), sample, dynamic=False):
        layouts.append(lay_out(canonicalize(captured.module.graph), count))
        check(captured, layouts[-1], count)
    return layouts


def check(captured: Captured, layout: ShardLayout, count: int) -> None:
    """Each rank has the outputs and gradients of the whole graph, in sequence parallelism and without it."""
    whole = executable(captured, canonicalize(captured.module.graph))
    outputs, exact = gradients(whole, captured.inputs)
    scale = max((grad.norm().item() for grad in exact if grad is not None), default=0.0)
    for sequence in (False, True):
        for found, grads in in_threads(count, partial(on_one_rank, captured, layout, sequence)):
            assert all(map(partial(close, scale=0.0), found, outputs)), f"{sequence=}"
            for grad, expected in zip(grads, exact, strict=True):
                assert (grad is None) == (expected is None), f"{sequence=}"
                assert grad is None or close(grad, expected, scale), f"{sequence=}"


_ONE_HEAD = (
    "attention has 1 key/value head, which 2 ranks do not divide, and keys and values have no linears of "
    "their own"
)
_NORM = "the layer_norm reads whole rows, but the columns are sharded"
_LABELS = (
    "2 columns leave the model, but a linear must read them, or they must be more than the 64 input columns"
)
_PARTS = "the weight of a linear is computed, but only parameters can be divided"
_LEAVES = _LABELS.replace("2 columns", "64 columns")
_STACKED = "a grouped product reads a stack of weights, but only linears can be divided"
_ROUTER = "a softmax reads a whole dimension, but this dimension is sharded"

# What of the models of the test list stays whole on each of two ranks, and why; all else is divided.
WHOLE: dict[str, dict[str, str]] = {
    **{name: {"attention": _ONE_HEAD} for name in ("gemma3_text", "falcon")},
    **{name: {"linear": _NORM} for name in ("bert", "distilbert", "roberta")},
    "vit": {"linear": _LABELS},
    "mixtral": {"linear": _ROUTER, "experts": _STACKED},
}


# a gated decoder, packed projections behind a mask with a finite fill, and PyTorch's attention
@each(ALL, later={*ALL} - {"llama", "quickstart_mask", "torch_mha", "torch_mha_bare"})
def test_two_ranks_compute_what_one_does(name: str) -> None:
    places = [place for layout in compare(ALL[name], 2) for place in layout.places]
    whole = {(place.what, *place.reasons) for place in places if place.reasons}
    if name == "torch_mha_bare":  # its query, key and value are one tensor, of which dynamo knows
        assert whole == {("linear", _PARTS), ("linear", _LEAVES)}
        return
    assert whole == set(WHOLE.get(name, {}).items())
    assert {place.what for place in places if not place.reasons} >= {"attention", "mlp"} - {
        *WHOLE.get(name, {}),
        *({"mlp"} if name in ("torch_mha", "mixtral") else ()),
        *({"attention"} if name in ("llama_eager", "bloom") else ()),  # in fp64 their softmax rounds to fp32
    }


def test_four_ranks_with_a_mask() -> None:
    """Padded, and with heads that four ranks divide, of a vocabulary of 99: 25, 25, 25 and 24 words."""
    sample = CASES["gpt2"].sample(batch=4, seq=12, padded=True)
    (captured,) = capture(zero_dropout(CASES["gpt2"].build()).double().eval(), sample, dynamic=False)
    layout = lay_out(canonicalize(captured.module.graph), 4)
    assert {"head", "embedding", "attention", "mlp"} == {place.what for place in layout.places}
    check(captured, layout, 4)


# as LLAMA, whose keys have two heads
GROUPS = {
    "llama": (4, {}),
    "llama_8": (8, {"num_attention_heads": 8}),
    "qwen3": (4, {}),
    "gemma": (2, {}),
    "gemma2": (2, {}),
}


@each(GROUPS, later=GROUPS)
def test_fewer_heads_of_keys_than_ranks(name: str) -> None:
    """Ranks that read the same heads have copies of them."""
    count, others = GROUPS[name]
    case = ALL[name.removesuffix("_8")]
    for layout in compare(replace(case, build=partial(case.build, **others)), count):
        assert not [place for place in layout.places if place.what == "attention" and place.reasons]
        assert any(shards.copies > 1 for shards in layout.shards.values())


def test_in_place_writes_are_not_put_on_shards() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x)
            hidden[:, 0] = 0
            return self.down(hidden)

    (captured,) = capture(Writing(), (torch.randn(4, 8),), dynamic=False)
    up = lay_out(canonicalize(captured.module.graph), 2).places[0]
    assert up.reasons == ("the model writes in place to them, but their values must stay",)


def reshaped(before: Sequence[int], after: Sequence[int], shards: Shards, ranks: int) -> Shards | str:
    """The shards after a reshape, or why there are none."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.reshape, (x, tuple(after)))
    for held, shape in ((x, before), (node, after)):
        held.meta["example_value"] = torch.empty(*shape, device="meta")
    try:
        return step(node, {x: shards}, ranks).shards
    except Refusal as refusal:
        return refusal.reason


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("before", "after", "shards"),
    [
        ((3, 24), (3, 4, 6), Shards(-1, (24,))),
        ((3, 4, 6), (3, 24), Shards(-2, (4,))),
        ((3, 24), (3, 2, 4, 3), Shards(-1, (12, 12))),
        ((3, 6, 4), (3, 24), Shards(-2, (6,))),
        ((3, 6, 4), (3, 8, 3), Shards(-2, (6,))),
        ((2, 2), (4,), Shards(-2, (2,))),
        ((3, 5), (1, 3, 5), Shards(-1, (5,))),
    ],
)
def test_a_reshape_keeps_each_ranks_numbers(
    before: Sequence[int], after: Sequence[int], shards: Shards, ranks: int
) -> None:
    """Also if the ranks divide the dimension after the reshape, but not the one before it."""
    found = reshaped(before, after, shards, ranks)
    if isinstance(found, str):
        assert found.endswith(f"{ranks} ranks do not divide it")
        return
    numbers = torch.arange(math.prod(before))
    for rank in range(ranks):
        own, expected = (
            torch.cat([numbers.view(*shape).narrow(each.dim, at, end - at)
                       for at, end in each.bounds(rank, ranks)], each.dim).flatten()
            for shape, each in ((before, shards), (after, found))
        )  # fmt: skip
        assert torch.equal(own, expected)


class Heads(nn.Module):
    """A block and a head, with the reshapes that models have."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.qkv, self.out = nn.Embedding(12, 8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 12)

    def forward(self, ids: Tensor) -> Tensor:
        x, (batch, length) = self.table(ids), ids.shape
        q, k, v = (t.reshape(batch, length, 2, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        x = x + self.out(mixed.reshape(batch, 2, length, 4).transpose(1, 2).reshape(batch, length, 8))
        hidden = torch.relu(self.up(x)).reshape(batch * length, 16)
        x = x + self.down(hidden).reshape(batch, length, 8)
        return F.cross_entropy(self.head(x).reshape(-1, 12), ids.reshape(-1), reduction="sum")


def test_empty_batches_and_sequences() -> None:
    """With the shards that parameters got from an example that was not empty."""
    model = Heads().double()
    (example,) = capture(model, (torch.arange(12).view(2, 6),), dynamic=False)
    layout = lay_out(canonicalize(example.module.graph), 2)
    shards = {node.name: held for node, held in layout.shards.items()}
    assert len(shards) == 9
    for batch, length in ((0, 6), (2, 0), (0, 0), (1, 1)):
        ids = torch.arange(batch * length).view(batch, length)
        (captured,) = capture(model, (ids,), dynamic=False)
        nodes = [node for node in captured.module.graph.nodes if node.name in shards]
        check(captured, replace(layout, shards={node: shards[node.name] for node in nodes}), 2)
