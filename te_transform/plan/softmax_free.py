"""The reasons why attention without a softmax cannot be one fused kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import fx

from te_transform.canonicalize.attention import PRODUCTS
from te_transform.canonicalize.linears import TURNS
from te_transform.graph import ops
from te_transform.graph.nodes import (
    called,
    is_model_tensor,
    is_tensor_node,
    reads_of,
    same_shape,
    shape_of,
)
from te_transform.plan.scores import ENDS, PLAIN, towards

LAST_PRODUCTS = (*PRODUCTS, torch.einsum)
# exp() is the start of a softmax that is written out, and that is none if the sum of its row has a term more
_IN_PLACE_OF_SOFTMAX = {*ops.ACTIVATION_OPS, torch.exp, torch.clamp, torch.maximum}
_POINTWISE = {*PLAIN, torch.sub, F.normalize, *_IN_PLACE_OF_SOFTMAX} - {*PRODUCTS, torch.softmax}
_FEATURE_MAPS = {F.elu, ops.relu, ops.squared_relu, torch.softmax}
_AROUND_FEATURES = {*_POINTWISE, *TURNS} - _FEATURE_MAPS
_BETWEEN_PRODUCTS = {*_POINTWISE, *TURNS, torch.cumsum, "cumsum"}  # a sum over earlier keys is causal


def missing_softmax(product: fx.Node) -> Iterator[str]:
    """Yield why attention whose last product this is cannot be fused; yield nothing for other products."""
    if operations := _instead_of_softmax(product):
        yield (
            f"the attention has {operations} in place of the softmax, but fused attention needs a softmax "
            "over the keys: compile=True joins the operations between the products"
        )
    elif feature_map := _feature_map(product):
        yield (
            f"the attention multiplies {feature_map} of queries and keys (linear attention), but fused "
            "attention needs a softmax of their product: compile=True joins the operations "
            "around the products"
        )


def _instead_of_softmax(product: fx.Node) -> str:
    """Return the name of the function of scores if a product multiplies it by values, else "".

    The function is an activation, or else a product with a tensor, such as the decay of retention. Products
    with stored weights, such as those of experts, are not attention.
    """
    weights = product.args[0]
    if product.target not in PRODUCTS or weights.target not in _POINTWISE:
        return ""

    def is_between(node: fx.Node) -> bool:
        is_pointwise = node.target in _POINTWISE and same_shape(shape_of(node)[-2:], shape_of(weights)[-2:])
        return is_pointwise or node.target in PRODUCTS

    path = [*towards(weights, reads_of, False, is_between), weights]
    factors = [product.args[1], *(factor for node in path if node.target in PRODUCTS for factor in node.args)]
    activations = [called(node) for node in path if node.target in _IN_PLACE_OF_SOFTMAX]
    names = activations or ["a product with a tensor" for node in path if _multiplies_matrices(node)]
    is_attention = names and len(factors) > 1 and not any(map(_is_stored, factors))
    return names[0] if is_attention else ""


def _multiplies_matrices(node: fx.Node) -> bool:
    """Return True for a multiplication of two tensors whose last two dimensions are those of the result."""
    last = shape_of(node)[-2:]
    alike = (is_tensor_node(factor) and same_shape(shape_of(factor)[-2:], last) for factor in node.args)
    return node.target is torch.mul and all(alike)


def _is_stored(node: fx.Node) -> bool:
    """Return True for a tensor of the model, also cast, reshaped, indexed or stacked."""
    return is_model_tensor(_first_read(node, lambda target: target not in {*ENDS, *PRODUCTS}))


def _feature_map(product: fx.Node) -> str:
    """Return the name of the feature map if a product is the last one of linear attention, else "".

    The product reads another product. Together they multiply queries, keys and values, and one function maps
    two of these three.
    """
    read = product.all_input_nodes
    for inner in read:
        before = _first_read(inner, _BETWEEN_PRODUCTS.__contains__)
        if before.target in LAST_PRODUCTS:
            factors = [*before.all_input_nodes, *(node for node in read if node is not inner)]
            mapped = dict.fromkeys(_first_read(node, _AROUND_FEATURES.__contains__) for node in factors)
            names = [called(node) for node in mapped if node.target in _FEATURE_MAPS]
            if len(names) > len({*names}):
                return max(names, key=names.count)
    return ""


def _first_read(node: fx.Node, passes: Callable[[object], bool]) -> fx.Node:
    """Return the first node whose target does not pass, along the first tensors that the nodes read."""
    while node.all_input_nodes and passes(node.target):
        node = node.all_input_nodes[0]
    return node
