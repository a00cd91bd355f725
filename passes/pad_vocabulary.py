"""The head of a language model whose vocabulary is no multiple of 8: a product with rows of zeros added."""

from collections.abc import Iterator

import torch
from torch import nn

from te_transform.backends.limits import ALIGNED, MIN_PADDED_ROWS
from te_transform.graph.pattern import Linear
from te_transform.plan.rule import Operation, Rule


def refuse(linear: Operation, pad_vocabulary: bool, compile: bool | str) -> Iterator[str | None]:
    """Whether it would help, and is wanted."""
    rows = linear.weight.shape[0]
    is_input = not isinstance(rows, int)  # a weight that the caller brings, with as many rows as they like
    if is_input or rows % ALIGNED == 0 or rows < MIN_PADDED_ROWS or compile:  # inductor pads by itself
        yield None
    elif not pad_vocabulary:
        yield (
            f"a product with {rows:,} rows, no multiple of {ALIGNED}, takes a GPU three times as long as one "
            "that is padded with zeros: allow pad_vocabulary=True"
        )


def build(backend, linear: Operation) -> nn.Module:
    """The same linear, which pads."""
    return backend.PaddedLinear()


RULE = Rule(
    name="pad_vocabulary",
    pattern=Linear(),
    refuse=refuse,
    build=build,
    reads=("linear.x", "linear.weight", "linear.bias"),
    example=lambda: (nn.Linear(16, MIN_PADDED_ROWS + 1), torch.zeros(4, 16)),
)
"""Saves two thirds of the product's time on a GPU.

Only what is computed is padded: parameters, logits and checkpoints have the rows that they have.
"""
