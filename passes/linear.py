"""Replace each linear that no other rule fused by the backend's Linear."""

from collections.abc import Iterator

import torch
from torch import nn

from te_transform.graph.pattern import Linear
from te_transform.plan.rule import Operation, Rule


def refuse(linear: Operation) -> Iterator[str]:
    """Yield no reason: the op covers every linear."""
    yield from ()


def build(backend, linear: Operation) -> nn.Module:
    """Return the backend's linear."""
    return backend.Linear()


RULE = Rule(
    name="linear",
    pattern=Linear(),
    refuse=refuse,
    build=build,
    reads=("linear.x", "linear.weight", "linear.bias"),
    example=lambda: (nn.Linear(16, 32), torch.zeros(4, 16)),
)
"""Saves time only in FP8: the product runs in the recipe's precision. In plain PyTorch nothing changes."""
