"""Models and calls for the tests of executors."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_transform
from tests.attacks import Attends, Block, Pair


class Deep(nn.Module):
    """A block with attention and one without, with an auxiliary output and a buffer that counts calls."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Attends()])
        self.p = 0.0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        for block in self.blocks:
            x = F.dropout(block(x), self.p, self.training)
        return x, x.mean(-1) + self.calls


def loss(model: nn.Module, x: Tensor) -> Tensor:
    out, means = model(x)
    return out.square().sum() + means.sum()


def replayed(model: type[nn.Module] | nn.Module, **options: Any) -> Pair:
    """Return a pair whose next calls in training are replayed."""
    pair = Pair.of(model, graphs=True, **options)
    for _ in range(3):
        pair.agree()
    return pair


def notes(model: nn.Module, how: str = "without CUDA graphs") -> list[str]:
    """Return the sentences of the report on graphs that do not run as asked for."""
    return [note for note in te_transform.report(model).notes if how in note]
