"""The sizes that symbols of a captured graph have in a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor

from te_transform.graph.nodes import value


def symbols_of(placeholders: Sequence[fx.Node]) -> dict[int, Any]:
    """Return the sympy symbols that are arguments of a graph, by the index of the argument."""
    sizes = {index: value(node) for index, node in enumerate(placeholders)}
    return {index: size.node.expr for index, size in sizes.items() if isinstance(size, torch.SymInt)}


def expression_of(size: int | torch.SymInt) -> Any:
    """Return a number, or the sympy expression of a symbolic size."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def size_in_call(expression: Any, known: dict[Any, int]) -> int | None:
    """Return the value of an expression, or None if it depends on the data of the call."""
    if isinstance(expression, int):
        return expression
    return int(expression.xreplace(known)) if expression.free_symbols <= known.keys() else None


def tensor_in_call(node: fx.Node, known: dict[Any, int]) -> Tensor | None:
    """Return a fake tensor like a node's in a call.

    Args:
        node: of a captured graph.
        known: the values of the symbols.

    Returns:
        None if a size depends on the data of the call, or if the tensor is of another class.
    """
    tensor = value(node)
    if type(tensor) is not FakeTensor:
        return None
    sizes = [size_in_call(expression_of(size), known) for size in tensor.shape]
    return None if None in sizes else tensor.new_empty(sizes)
