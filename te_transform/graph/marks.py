"""Marks for the begin and end of a layer in a captured graph: calls that return their first argument.

A runner may skip the nodes between the two marks of a layer and pass the residual stream through.
"""

from __future__ import annotations

from torch import Tensor, fx


def layer_begins(x: Tensor, number: int) -> Tensor:
    """Return the residual stream before layer `number`."""
    return x


def layer_ends(y: Tensor, x: Tensor, number: int) -> Tensor:
    """Return the residual stream after layer `number`; `x` is the stream before the layer."""
    return y


def is_mark(node: fx.Node) -> bool:
    """Return True if the node begins or ends a layer."""
    return node.target in (layer_begins, layer_ends)


def marked(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """Return the begin and end mark of each layer, in order."""
    ends = (node for node in graph.nodes if node.target is layer_ends)
    return [(node.args[1], node) for node in ends]
