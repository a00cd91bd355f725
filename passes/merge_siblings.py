"""Linears that read one tensor become one linear."""

from collections.abc import Iterator

import torch
from torch import Tensor, fx, nn

from te_transform.graph import ops
from te_transform.graph.nodes import is_parameter, value
from te_transform.graph.pattern import Siblings
from te_transform.plan.rule import Operation, Rule, reshaped, stored_in

ROWS = 16  # what FP8 kernels take a multiple of


def refuse(linears: tuple[Operation, ...]) -> Iterator[str]:
    """Every reason why the projections cannot share one product."""
    if not all(linear.weight.shape[0] for linear in linears):
        yield "one of the linears has no rows, each needs some: leave it out of the model"
    mixed = len({linear.bias is None for linear in linears}) > 1
    narrow = [linear.weight.shape[0] for linear in linears if linear.weight.shape[0] % ROWS]
    if mixed and narrow:
        yield (
            f"some of the linears have a bias and some have none, and one has {narrow[0]} rows, "
            f"which would cost the others their kernels: give it a multiple of {ROWS}"
        )
    if len({linear.sources("weight") for linear in linears}) < len(linears):
        yield (
            "some of the linears have the same weight, a merged linear has each row once: compute their "
            "product once"
        )
    biases = [bias for linear in linears for bias in linear.sources("bias")]
    if not all(map(is_parameter, biases)):
        yield (
            "the linear's bias is computed at every call, a parameter is needed: compute it once and store "
            "it, where training allows"
        )
    weights = [linear.node.args[1] for linear in linears]
    if any(weight.target is not torch.t and reshaped(weight) is not weight for weight in weights):
        yield (
            "a weight is a view of a parameter in another shape, rows that lie below each other are needed: "
            "store it as [outputs, inputs], as nn.Linear does"
        )
    if any(stored_in(weight) != (weight,) and weight.target is torch.t for weight in weights):
        yield (
            "a weight is stored transposed, rows that lie below each other are needed: store it as "
            "[outputs, inputs], as nn.Linear does"
        )


_KEPT = (*ops.ACTIVATIONS, ops.columns)  # what stands between a linear and the product of a gate


def group(linear: fx.Node) -> fx.Node | bool:
    """What siblings are alike in: a merged linear has the gradients of all its rows or of none, so LoRA's
    stay apart from the frozen ones beside them; gate and up of an MLP stay together."""
    return gated_product(linear) or value(linear.args[1]).requires_grad


def gated_product(linear: fx.Node) -> fx.Node | None:
    """What gate and up of an MLP meet in, one of them activated: where attention reads the norm that they
    read too (Cohere), they are a product by themselves, for LayerNormMLP."""
    (product, *others) = {*_readers(linear)} or (None,)
    if others or product is None or product.target is not torch.mul or linear.args[0].target not in ops.NORMS:
        return None
    factors = product.all_input_nodes
    is_gated = len(factors) == 2 and any(factor.target in ops.ACTIVATIONS for factor in factors)
    sources = map(_source, factors)
    alike = all(node.target is ops.linear and node.args[0] is linear.args[0] for node in sources)
    return product if is_gated and alike else None


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if user.target in _KEPT:
            yield from _readers(user)
        else:
            yield user


def _source(node: fx.Node) -> fx.Node:
    while node.target in _KEPT:
        node = node.args[0]
    return node


class Example(nn.Module):
    """Queries and keys of one tensor."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.q(x), self.k(x)


RULE = Rule(
    name="merge_siblings",
    pattern=Siblings(ops.linear, role="linears", meet=group),
    refuse=refuse,
    example=lambda: (Example(), torch.zeros(4, 16)),
)
"""Saves products and reads: q, k and v, or gate and up, are one matrix product and read their input once.

Where some have a bias and some have none, as the keys of Whisper, zeros stand for those that are missing.

Exact but for the order of sums: the input's gradient is one product instead of a sum of several. The
parameters stay apart; where they lie next to each other, which convert() sees to, the product reads all of
them at once.
"""
