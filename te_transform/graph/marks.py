"""Where a layer of a captured graph begins and ends: calls that return what they are given.

A runner may leave out what stands between the two marks of a layer, and let the stream pass.
"""

from __future__ import annotations

from torch import Tensor, fx


def layer_begins(x: Tensor, number: int) -> Tensor:
    """Return the stream in front of layer `number` of the graph."""
    return x


def layer_ends(y: Tensor, x: Tensor, number: int) -> Tensor:
    """Return the stream behind layer `number` of the graph; `x` is the stream in front of it."""
    return y


def marked(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """Return the two marks of each layer, in order."""
    ends = (node for node in graph.nodes if node.target is layer_ends)
    return [(node.args[1], node) for node in ends]
