"""Replace each linear that no other rule fused by the backend's Linear."""

from collections.abc import Iterator

import torch
from torch import fx, nn

from te_transform.graph import ops
from te_transform.graph.nodes import called, dtype_of, is_parameter, is_tensor_node, may_be_view, shape_of
from te_transform.graph.pattern import Call, Linear, OneOf
from te_transform.graph.written_out import is_normalized
from te_transform.plan.rule import Operation, Rule

_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
_SELECTIONS = {"embedding", "gather", "index_select", "take_along_dim"}
_PRODUCTS = (torch.matmul, torch.bmm, torch.einsum, *_CONVOLUTIONS)


def refuse(linear: Operation | None = None, product: fx.Node | None = None) -> Iterator[str | None]:
    """Yield the reason for another product with a parameter, or None; the op covers every linear."""
    if linear is None:
        yield from [*_of_product(product)] or [None]


def _of_product(product: fx.Node) -> Iterator[str]:
    factors = product.all_input_nodes[:2]
    stored = [factor for factor in map(_stored_factor, factors) if is_parameter(factor)]
    is_of_norm = product.target is not torch.einsum and is_normalized(factors[0])
    if len(stored) != 1:
        if is_of_norm:
            yield (
                f"the {called(product)} multiplies a norm by a computed matrix, but the fused linear needs a "
                "parameter: compute the matrix once and store it, if you can retrain"
            )
        return
    shape = [*shape_of(stored[0])]
    if product.target in _CONVOLUTIONS:
        is_grouped = shape[1] != shape_of(factors[0])[1 - len(shape)]
        if not is_grouped and set(shape[2:]) == {1}:
            yield (
                "the convolution has a kernel of one element, but the fused linear reads channels from the "
                "last dimension: call F.linear on [..., length, channels] with weight.flatten(1)"
            )
        elif not is_grouped and is_of_norm:
            yield (
                f"the {called(product)} of a norm has a kernel of several elements, but the fused linear "
                "multiplies single rows: no kernel supports several"
            )
    elif len(shape) > 2:
        if product.target is not torch.einsum or _is_matrix_product(product):
            yield (
                f"the product has a stack of matrices {shape}, one for each head, group or token, but the "
                "fused linear has one matrix: no kernel supports several"
            )
    elif stored[0] is _stored_factor(factors[0]) and product.target is not torch.einsum:
        yield (
            "the product has its parameter on the left, but the fused linear needs it on the right: call "
            "F.linear(x.mT, weight).mT"
        )


def _is_matrix_product(einsum: fx.Node) -> bool:
    """Return True if an einsum of two tensors sums over a dimension of both and keeps one of the second."""
    terms, _, result = str(einsum.args[0]).replace(".", "").partition("->")
    first, *others = map(set, terms.split(","))
    return (
        len(others) == 1 and bool((first & others[0]) - {*result}) and bool((others[0] - first) & {*result})
    )


def _stored_factor(factor: fx.Node) -> fx.Node:
    """Return the tensor of which a factor is a view, a cast or a selection."""
    while is_tensor_node(factor):
        if called(factor) in _SELECTIONS:
            factor = max(factor.all_input_nodes, key=lambda node: dtype_of(node).is_floating_point)
        elif may_be_view(factor) or factor.target is ops.cast:
            factor = factor.args[0]
        else:
            break
    return factor


def build(backend, linear: Operation) -> nn.Module:
    """Return the backend's linear."""
    return backend.Linear()


RULE = Rule(
    name="linear",
    pattern=OneOf(Linear(), Call(_PRODUCTS, role="product")),
    refuse=refuse,
    build=build,
    reads=("linear.x", "linear.weight", "linear.bias"),
    example=lambda: (nn.Linear(16, 32), torch.zeros(4, 16)),
)
"""Saves time only in FP8: the product runs in the recipe's precision. In plain PyTorch nothing changes."""
