"""Fuse attention, written out or called by name, into one attention core."""

from collections.abc import Iterator

import torch
from torch import Tensor, fx, nn

from te_transform.graph import ops
from te_transform.graph.nodes import (
    computed_from,
    dtype_of,
    has_gradient,
    is_bias,
    is_number,
    is_tensor_node,
    without_gradients,
)
from te_transform.graph.pattern import Call, OneOf
from te_transform.plan import scores, softmax_free
from te_transform.plan.rule import Operation, Rule

_ARGUMENTS = (
    "query", "key", "value", "mask", "dropout_p", "is_causal", "scale", "enable_gqa", "sinks", "fill",
    "hidden",
)  # fmt: skip


def refuse(
    backend,
    attention: Operation | None = None,
    softmax: fx.Node | None = None,
    product: fx.Node | None = None,
) -> Iterator[str | None]:
    """Yield every reason why no core computes this attention, or None if it already calls PyTorch's core."""
    if attention is None:  # no spelling matched: not attention, or attention in an unknown form
        reasons = softmax_free.missing_softmax(product) if softmax is None else scores.obstacles(softmax)
        yield from [*reasons] or [None]
        return
    if attention.sinks is not None and not backend.HAS_KERNELS:
        yield (
            "the attention has sinks, one extra score per query, but PyTorch's scaled_dot_product_attention "
            "does not support them: convert with backend='te', whose kernels do"
        )
    called, mask = "scaled_dot_product_attention" in attention.spelled, attention.mask
    if called and mask is None and not backend.HAS_KERNELS:
        yield None
    if is_number(attention.scale) and not attention.scale > 0:
        yield (
            f"the attention multiplies its scores by {attention.scale:g}, but kernels hide keys before they "
            "multiply, and need a positive number: negate the queries, and multiply by a positive number"
        )
    if mask is None or backend.HAS_BIAS:
        return
    is_trained = is_bias(mask) and attention.query.requires_grad
    if (called or is_trained) and _is_learned(attention.node.args[3]):
        yield (
            "the attention adds a learned bias to its scores, but TE's fast cores compute no gradient for "
            "it: freeze the bias, if you can retrain"
        )


def _is_learned(mask: fx.Node) -> bool:
    """Return True if a gradient flows back to a tensor that a mask is computed from.

    Gradients flow through floating point and complex values, not through indices, and not through what the
    model computes within torch.no_grad().
    """
    without = without_gradients(mask.graph)
    sources = computed_from([mask], lambda node: node in without or _stops_gradients(node))
    return any(map(has_gradient, sources))


def _stops_gradients(node: fx.Node) -> bool:
    dtype = dtype_of(node) if is_tensor_node(node) else torch.float32
    is_index = not (dtype.is_floating_point or dtype.is_complex)
    return is_index or node.target is torch.Tensor.detach


def build(backend, attention: Operation) -> nn.Module:
    """Return the attention core; masks, lengths and dropout are arguments of its call."""
    called = "scaled_dot_product_attention" in attention.spelled
    return backend.DotProductAttention(written_out=not called, wide_scores=bool(attention.wide_scores))


class Example(nn.Module):
    """A written-out attention and a projection."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 8)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.out(torch.softmax(q @ k.transpose(-2, -1) * 8**-0.5, dim=-1) @ v)


RULE = Rule(
    name="attention",
    pattern=OneOf(
        Call(ops.sdpa, role="attention"),
        Call(torch.softmax, role="softmax"),
        Call(softmax_free.LAST_PRODUCTS, role="product"),
    ),
    refuse=refuse,
    build=build,
    reads=tuple(f"attention.{name}" for name in _ARGUMENTS),
    example=lambda: (Example(), tuple(torch.zeros(1, 2, 4, 8) for _ in "qkv")),
)
"""Saves the [batch, heads, length, length] scores and probabilities, which the fused kernels never write.

A mask whose values are causal becomes the causal flag, so that the kernel skips the upper half.
"""
