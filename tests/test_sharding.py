"""Captured graphs on shards: the numbers of the whole ones, for every model of the test list."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from te_transform.backends.collectives import Ranks, Shards, Way, moved
from te_transform.canonicalize import canonicalize
from te_transform.plan.layout import Layout, lay_out
from te_transform.runtime.sharded import on_shards
from tests.captures import Captured, capture, executable
from tests.threads import in_threads
from tests.zoo import CASES, EXTRA, Case, tensors, zero_dropout

ALL = {**CASES, **EXTRA}
MULTI_QUERY = ("*self_attn", "*self_attention")  # one head of keys and values, which nothing divides


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


def on_one_rank(captured: Captured, layout: Layout, sequence: bool, ranks: Ranks) -> Any:
    """A function that does the same on shards, with whole gradients."""
    nodes = [node for node in captured.module.graph.nodes if node.op == "placeholder"]
    shards = {node.name: held for node, held in layout.shards.items()}
    made = on_shards(captured.module, shards, ranks, sequence)

    def run(*leaves: Any) -> Any:
        given = []
        for node, leaf in zip(nodes, leaves, strict=True):
            part = share(leaf, shards.get(node.name), ranks) if isinstance(leaf, Tensor) else leaf
            given.append(made.moves[node.name](part) if node.name in made.moves else part)
        return made.module(*given)

    return partial(gradients, run, captured.inputs)


def share(whole: Tensor, shards: Shards | None, ranks: Ranks) -> Tensor:
    """A rank's share of a parameter, whose gradient is gathered."""
    return whole if shards is None else moved(whole, Way.SHARE, ranks, shards)


def close(found: Tensor, exact: Tensor, scale: float) -> bool:
    return (found - exact).norm().item() <= 1e-6 * max(scale, exact.norm().item())


def compare(case: Case, count: int, sequence: bool, skip: tuple[str, ...] = ()) -> list[Layout]:
    """In fp64, where only a wrong sum is off by more than rounding, some of which is in fp32 by the models'
    own casts."""
    sample = {
        k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in sample_of(case).items()
    }
    layouts = []
    for captured in capture(zero_dropout(case.build()).double().train(), sample, dynamic=False):
        canonical = canonicalize(captured.module.graph)
        layout = lay_out(canonical, count, skip)
        outputs, exact = gradients(executable(captured, canonical), captured.inputs)
        scale = max((grad.norm().item() for grad in exact if grad is not None), default=0.0)
        for found, grads in in_threads(count, partial(on_one_rank, captured, layout, sequence)):
            assert all(map(partial(close, scale=0.0), found, outputs))
            for grad, expected in zip(grads, exact, strict=True):
                assert (grad is None) == (expected is None)
                assert grad is None or close(grad, expected, scale)
        layouts.append(layout)
    return layouts


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_two_ranks_compute_what_one_does(name: str, sequence: bool) -> None:
    layouts = compare(ALL[name], 2, sequence)
    print(name, [(p.what, p.path, p.reasons) for layout in layouts for p in layout.places])
