"""Read sizes from the earliest tensor that has them, so that no value is needed only for its shape."""

from __future__ import annotations

import torch
from torch import fx

from te_transform.graph import edit
from te_transform.graph.nodes import (
    called,
    is_model_tensor,
    is_tensor_node,
    same_shape,
    shape_of,
    size_of,
    writes,
)


def read_sizes_early(graph: fx.Graph) -> None:
    """Make each size read the earliest tensor of the same shape from which its tensor is computed.

    Replace a symbolic size by a number if the code specialized it to that number.
    """
    for node in graph.nodes:
        size = size_of(node)
        if isinstance(size, torch.SymInt) and (number := size.node.maybe_as_int()) is not None:
            for reader in [reader for reader in node.users if reader.op != "output"]:
                edit.read_instead(reader, node, number)
        if node.op == "call_method" and called(node) == "size" and is_tensor_node(node.args[0]):
            earliest = node.args[0]
            while (earlier := _of_the_same_shape(earliest)) is not None:
                earliest = earlier
            edit.read_instead(node, node.args[0], earliest)


def _of_the_same_shape(node: fx.Node) -> fx.Node | None:
    """Return an input of the node with the same shape, except the model's own tensors, or None."""
    if node.op not in ("call_function", "call_method") or writes(node):
        return None
    tensors = [n for n in node.all_input_nodes if is_tensor_node(n) and not is_model_tensor(n)]
    return next((tensor for tensor in tensors if same_shape(shape_of(tensor), shape_of(node))), None)
