"""Attention, written out or called by name, becomes one attention core."""

from collections.abc import Iterator

import torch
from torch import Tensor, fx, nn

from te_transform.graph import ops
from te_transform.graph.nodes import is_bias
from te_transform.graph.pattern import Call, OneOf
from te_transform.plan import scores
from te_transform.plan.rule import Operation, Rule

_ARGUMENTS = ("query", "key", "value", "mask", "dropout_p", "is_causal", "scale", "enable_gqa", "sinks")


def refuse(
    backend, attention: Operation | None = None, softmax: fx.Node | None = None
) -> Iterator[str | None]:
    """Every reason why there is no core for it; None where it calls the core that there is already."""
    if attention is None:  # no spelling fitted: the softmax of something else, or attention of its own kind
        yield from [*scores.obstacles(softmax)] or [None]
        return
    if attention.sinks is not None and not backend.HAS_KERNELS:
        yield (
            "the attention has a score more for each query, its sink, and PyTorch's "
            "scaled_dot_product_attention has none: TE's kernels are needed, backend='te'"
        )
    called, mask = "scaled_dot_product_attention" in attention.spelled, attention.mask
    if called and mask is None and not backend.HAS_KERNELS:
        yield None
    is_learned = mask is not None and mask.requires_grad
    # a gradient needs the scores that were written out, and what is added to them
    is_trained = mask is not None and is_bias(mask) and attention.query.requires_grad
    if not backend.HAS_BIAS and (is_learned if called else is_trained):
        yield "the attention adds a bias to its scores, TE's fast cores have none"


def build(backend, attention: Operation) -> nn.Module:
    """The attention core; masks, lengths and dropout are arguments of its call."""
    called = "scaled_dot_product_attention" in attention.spelled
    return backend.DotProductAttention(written_out=not called, wide_scores=bool(attention.wide_scores))


class Example(nn.Module):
    """Attention that is written out, and a projection."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 8)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.out(torch.softmax(q @ k.transpose(-2, -1) * 8**-0.5, dim=-1) @ v)


RULE = Rule(
    name="attention",
    pattern=OneOf(Call(ops.sdpa, role="attention"), Call(torch.softmax, role="softmax")),
    refuse=refuse,
    build=build,
    reads=tuple(f"attention.{name}" for name in _ARGUMENTS),
    example=lambda: (Example(), tuple(torch.zeros(1, 2, 4, 8) for _ in "qkv")),
)
"""Saves the [batch, heads, length, length] scores and probabilities, which the fused kernels never write.

A mask that is found to be the causal one becomes the causal flag, so that the kernel skips the upper half.
"""
