"""A linear that nothing else fused becomes the backend's Linear."""

from collections.abc import Iterator

import torch
from torch import nn

from te_transform.graph.pattern import Linear
from te_transform.plan.rule import Operation, Rule


def refuse(linear: Operation) -> Iterator[str]:
    """No reason of its own: every linear is one."""
    yield from ()


def build(backend, linear: Operation) -> nn.Module:
    """The same linear."""
    return backend.Linear()


RULE = Rule(
    name="linear",
    pattern=Linear(),
    refuse=refuse,
    build=build,
    reads=("linear.x", "linear.weight", "linear.bias"),
    example=lambda: (nn.Linear(16, 32), torch.zeros(4, 16)),
)
"""Saves what FP8 saves: the product runs in the recipe's precision. In plain PyTorch nothing changes."""
