"""Merge linears that read the same tensor into one linear."""

from collections.abc import Iterator

import torch
from torch import Tensor, fx, nn

from te_transform.graph import ops
from te_transform.graph.nodes import is_number, is_parameter, value
from te_transform.graph.pattern import Siblings
from te_transform.plan.rule import Operation, Rule, reshaped, stored_in

MULTIPLE = 16  # FP8 kernels need a multiple of this number of rows


def refuse(linears: tuple[Operation, ...]) -> Iterator[str]:
    """Yield every reason why the linears cannot share one product."""
    if not all(linear.weight.shape[0] for linear in linears):
        yield "one of the linears has no rows, but each needs at least one: remove it from the model"
    mixed = len({linear.bias is None for linear in linears}) > 1
    narrow = [linear.weight.shape[0] for linear in linears if linear.weight.shape[0] % MULTIPLE]
    if mixed and narrow:
        yield (
            f"some linears have a bias or an added parameter, and one has {narrow[0]} rows, but kernels for "
            f"the merged linear need a multiple of {MULTIPLE}: give it a multiple of {MULTIPLE} rows"
        )
    if len({linear.sources("weight") for linear in linears}) < len(linears):
        yield (
            "some of the linears have the same weight, but a merged linear has each row once: compute their "
            "product once"
        )
    biases = [bias for linear in linears for bias in linear.sources("bias")]
    if not all(map(is_parameter, biases)):
        yield (
            "the linear's bias is computed at every call, but it must be a parameter: compute it once and "
            "store it, if you can retrain"
        )
    weights = [linear.node.args[1] for linear in linears]
    if any(weight.target is not torch.t and reshaped(weight) is not weight for weight in weights):
        yield (
            "a weight is a view of a parameter in another shape, but merging needs consecutive rows: store "
            "it as [outputs, inputs], as nn.Linear does"
        )
    if any(stored_in(weight) != (weight,) and weight.target is torch.t for weight in weights):
        yield (
            "a weight is stored transposed, but merging needs consecutive rows: store it as [outputs, "
            "inputs], as nn.Linear does"
        )


# the calls between a linear and the product of a gate
_KEPT = (*ops.ACTIVATION_OPS, ops.columns, torch.clamp)


def group(linear: fx.Node) -> fx.Node | tuple[bool, bool]:
    """Return the key of the group that a linear can be merged with.

    A merged linear computes gradients for all of its rows or for none, and all of its outputs have a gradient
    or none. LoRA's linears therefore stay apart from frozen linears, and gate and up of an MLP form a group.
    """
    return gated_product(linear) or (value(linear.args[1]).requires_grad, value(linear).requires_grad)


def gated_product(linear: fx.Node) -> fx.Node | None:
    """Return the multiplication of gate and up in an MLP, one of them activated, or None.

    If attention reads the same norm as the MLP (Cohere), gate and up are merged on their own for
    LayerNormMLP.
    """
    (product, *others) = {*_readers_through_views(linear)} or (None,)
    if others or product is None or product.target is not torch.mul or linear.args[0].target not in ops.NORMS:
        return None
    factors = product.all_input_nodes
    is_gated = len(factors) == 2 and any(factor.target in ops.ACTIVATION_OPS for factor in factors)
    sources = map(_before_views, factors)
    alike = all(node.target is ops.linear and node.args[0] is linear.args[0] for node in sources)
    return product if is_gated and alike else None


def _readers_through_views(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if _is_kept(user):
            yield from _readers_through_views(user)
        else:
            yield user


def _before_views(node: fx.Node) -> fx.Node:
    while _is_kept(node):
        node = node.args[0]
    return node


def _is_kept(node: fx.Node) -> bool:
    """Return True for a call between a linear and the product of a gate, of one tensor."""
    return node.target in _KEPT or (node.target is torch.add and is_number(node.args[1]))


class Example(nn.Module):
    """The query and key projections of one tensor."""

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

If some of the linears have a bias and some have none (the keys of Whisper), zeros replace the missing biases.

The result is exact except for the order of sums: the input's gradient is one product instead of a sum of
several. The parameters stay separate. convert() makes them adjacent in memory, so that the product reads all
of them at once.
"""
