"""Linears that read one tensor become one linear."""

from collections.abc import Iterator

from torch import nn

from te_transform import vocabulary
from te_transform.pattern import Siblings
from te_transform.rule import Operation, Rule
from te_transform.weights import Concat


def refuse(linears: tuple[Operation, ...]) -> Iterator[str]:
    """Every reason why the projections cannot share one weight."""
    if len({linear.bias is None for linear in linears}) > 1:
        yield (
            "some of the linears have a bias and some have none, a merged linear has one for all its rows or "
            "none"
        )
    if len({linear.weight.requires_grad for linear in linears}) > 1:
        yield "some of the weights are frozen, a merged weight is trained as a whole or not at all"
    if len({linear.bias.requires_grad for linear in linears if linear.bias is not None}) > 1:
        yield "some of the biases are frozen, a merged bias is trained as a whole or not at all"
    if any(linear.viewed_as_if_contiguous(_rows(linears)) for linear in linears):
        yield (
            "an output is taken apart by view() across its last dimension, a column of a merged output needs "
            "reshape()"
        )


def _rows(linears: tuple[Operation, ...]) -> int:
    return sum(linear.weight.shape[0] for linear in linears)


def build(backend, linears: tuple[Operation, ...]) -> nn.Module:
    """One linear with the rows of all."""
    first = linears[0]
    return backend.Linear(
        first.weight.shape[1],
        _rows(linears),
        bias=first.bias is not None,
        params_dtype=first.weight.dtype,
        device="meta",
    )


RULE = Rule(
    name="merge_siblings",
    pattern=Siblings(vocabulary.linear, role="linears"),
    refuse=refuse,
    build=build,
    weights=(Concat("linears.weight", "fused.weight"), Concat("linears.bias", "fused.bias")),
)
"""q, k and v, or gate and up: one matrix product and one read of the input instead of two or three.

Exact but for the order of sums: the input's gradient is one product instead of a sum of several.
"""
