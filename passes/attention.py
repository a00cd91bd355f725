"""Attention written out, or called by name, becomes one attention core."""

from collections.abc import Iterator

from torch import nn

from te_transform import vocabulary
from te_transform.pattern import Call
from te_transform.rule import Operation, Rule


def refuse(backend, attention: Operation) -> Iterator[str]:
    """Every reason why there is nothing to gain or no core for it."""
    if backend.NAME == "torch" and "scaled_dot_product_attention" in attention.spelled:
        yield "the model calls scaled_dot_product_attention already, the torch backend has no faster core"
    if backend.NAME == "te" and "scaled_dot_product_attention" in attention.spelled and attention.has_bias:
        yield "the attention adds a bias to its scores, TE's fast cores have none"


def build(backend, attention: Operation) -> nn.Module:
    """The attention core; masks, lengths and dropout are arguments of its call."""
    return backend.DotProductAttention()


RULE = Rule(
    name="attention",
    pattern=Call(vocabulary.sdpa, role="attention"),
    refuse=refuse,
    build=build,
)
"""Saves the [batch, heads, length, length] scores and probabilities, which the fused kernels never write.

A mask proved to be causal becomes the causal flag, so that the kernel skips the upper half.
"""
