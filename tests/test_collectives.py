"""Collectives of ranks: placements, embeddings and cross entropy, in threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_transform.graph import ops
from te_transform.parallel.collectives import (
    Ranks,
    Redistribution,
    ShardedCrossEntropy,
    ShardedEmbedding,
    Shards,
    redistributed,
)
from tests.threads import in_threads

WORDS, WIDTH = 11, 3
UNEVEN = Shards(-1, (WORDS,))


def on(count: int, work: Callable[[Ranks], Any]) -> list[Any]:
    return in_threads(count, lambda ranks: partial(work, ranks))


@pytest.mark.parametrize("parts", [(8,), (4, 4), (8, 4), (5,), (5, 3)])
@pytest.mark.parametrize("dim", [-2, -1])
def test_a_share_is_gathered_again(parts: tuple[int, ...], dim: int) -> None:
    shards = Shards(dim, parts)
    shape = [2, 3, 3]
    shape[dim] = shards.size
    whole = torch.randn(shape)

    def work(ranks: Ranks) -> tuple[Tensor, Tensor]:
        own = redistributed(whole, Redistribution.SHARE, ranks, shards)
        assert own.shape == ranks.shape(whole.shape, shards)
        return redistributed(own, Redistribution.GATHER, ranks, shards), redistributed(
            own, Redistribution.GATHER_ENTER, ranks, shards
        )

    for found in on(2, work):
        assert all(torch.equal(each, whole) for each in found)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_cross_entropy_of_shards(reduction: str) -> None:
    logits, targets = torch.randn(2, 4, WORDS), torch.randint(WORDS, (2, 4))
    targets[0, :2] = -100

    def gradient(loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        leaf = logits.clone().requires_grad_()
        found = loss(leaf)
        found.square().sum().backward()
        return found.detach(), leaf.grad

    def work(ranks: Ranks) -> tuple[Tensor, Tensor]:
        op = ShardedCrossEntropy(ranks, UNEVEN)
        return gradient(
            lambda x: op(
                redistributed(x, Redistribution.SHARE, ranks, UNEVEN), targets, -100, reduction, torch.float32
            )
        )

    expected = gradient(lambda x: ops.cross_entropy(x, targets, -100, reduction, torch.float32))
    for found in on(4, work):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_an_embedding_of_shards() -> None:
    table, ids = torch.randn(WORDS, WIDTH), torch.randint(WORDS, (2, 5))
    ids[0, 0] = 7

    def gradient(look_up: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        leaf = table.clone().requires_grad_()
        found = look_up(leaf)
        found.square().sum().backward()
        return found.detach(), leaf.grad

    def work(ranks: Ranks) -> tuple[Tensor, Tensor]:
        rows = UNEVEN.on(-2)
        op = ShardedEmbedding(ranks, rows, 7)
        return gradient(
            lambda x: redistributed(
                op(ids, redistributed(x, Redistribution.SHARE, ranks, rows)), Redistribution.SUM, ranks
            )
        )

    expected = gradient(lambda x: F.embedding(ids, x, 7))
    for found in on(2, work):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("wrong", [-1, WORDS])
def test_words_that_there_are_not(wrong: int) -> None:
    def embedding(ranks: Ranks) -> Tensor:
        rows = UNEVEN.on(-2)
        return ShardedEmbedding(ranks, rows, None)(torch.tensor([wrong]), torch.randn(6, WIDTH))

    def loss(ranks: Ranks) -> Tensor:
        op = ShardedCrossEntropy(ranks, UNEVEN)
        logits = torch.randn(1, ranks.shape((WORDS,), UNEVEN)[0])
        return op(logits, torch.tensor([wrong]), -100, "mean", torch.float32)

    with pytest.raises(IndexError, match="expected ids from 0 to 10, got another one"):
        on(2, embedding)
    with pytest.raises(IndexError, match="expected targets from 0 to 10, got another one"):
        on(2, loss)
