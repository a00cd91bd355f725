"""Count the floating-point operations and memory traffic of captured and canonical graphs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from te_transform.graph import ops
from te_transform.graph.nodes import (
    argument,
    bytes_of,
    called,
    is_model_tensor,
    is_tensor_node,
    may_be_view,
    numel_of,
    reached,
    shape_of,
)

_MULTIPLIED = {"matmul", "bmm", "mm", "grouped_mm", "_grouped_mm"}
_COUNTED_PRODUCTS = {*_MULTIPLIED, "linear", "addmm", "sdpa", "scaled_dot_product_attention"}


@dataclass(frozen=True)
class Work:
    """The work of a call."""

    products: float = 0.0  # floating-point operations in 16-bit products
    odd_products: float = 0.0  # the same for weights with many rows, not a multiple of 8
    in_fp8: float = 0.0  # the same for FP8 products
    attention: float = 0.0  # floating-point operations
    quantized: float = 0.0  # elements in the operands of FP8 products
    bytes: float = 0.0  # read and written by all other operations
    operations: float = 0.0
    in_fp8_calls: float = 0.0
    forwards: float = 0.0
    backwards: float = 0.0

    def times(self, factor: float) -> Work:
        """Return the work of `factor` such calls."""
        return Work(*(factor * each for each in vars(self).values()))

    def __add__(self, other: Work) -> Work:
        return Work(*map(sum, zip(vars(self).values(), vars(other).values(), strict=True)))


def computed(node: fx.Node) -> Work:
    """Return the products that an operation of a canonical graph computes, in its own dtype."""
    if node.target is ops.linear:
        return Work(products=2.0 * numel_of(node) * sizes_of(node.args[1])[-1])
    if node.target is ops.sdpa:
        causal = argument(node, "is_causal") or argument(node, "mask") is not None
        return Work(attention=4.0 * numel_of(node) * sizes_of(node.args[1])[-2] / (2 if causal else 1))
    if called(node) in _MULTIPLIED:
        return Work(products=2.0 * numel_of(node) * sizes_of(node.args[0])[-1])
    return Work()


def moved_bytes(node: fx.Node) -> Work:
    """Return the memory traffic of an operation, if it is memory-bound."""
    if node.op in ("placeholder", "output", "get_attr") or not is_tensor_node(node) or may_be_view(node):
        return Work()
    if called(node) in _COUNTED_PRODUCTS:
        return Work(operations=1)
    data = [node, *(arg for arg in node.all_input_nodes if is_tensor_node(arg) and not is_model_tensor(arg))]
    return Work(bytes=sum(map(bytes_of, data)), operations=1)


def sizes_of(node: fx.Node) -> list[int]:
    """Return the shape, with symbolic sizes replaced by the sizes of the example inputs."""
    return [size.node.hint if isinstance(size, torch.SymInt) else size for size in shape_of(node)]


def replaced(captured: Mapping[str, fx.Node], nodes: Collection[fx.Node]) -> frozenset[str]:
    """Return the names of the captured operations that a match on the canonical graph replaces.

    They are the operations that serve only to compute the match's values from its inputs.
    """
    inside = {node.meta["origin"] for node in nodes if "origin" in node.meta}
    sources = {source for node in nodes for source in node.all_input_nodes} - {*nodes}
    read = origins(sources)
    waiting = [captured[name] for name in inside]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            is_ours = source.op != "placeholder" and all(user.name in inside for user in source.users)
            if is_ours and source.name not in inside | read:
                inside.add(source.name)
                waiting.append(source)
    return frozenset(inside)


def origins(nodes: Iterable[fx.Node]) -> set[str]:
    """Return the names of the captured nodes that canonical nodes replace or are computed from."""
    sources = reached(nodes, lambda node: () if "origin" in node.meta else node.all_input_nodes)
    return {node.meta["origin"] for node in sources if "origin" in node.meta}
