"""Give each operation one target, with positional arguments and dimensions counted from the end.

A torch function, a Tensor method, an operator and its in-place form are captured under different names.
table.py has the canonical call for all of them. Targets that are not in the table stay as captured.
"""

from __future__ import annotations

import builtins
import inspect
import operator
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from te_transform.canonicalize.moves import MOVES, columns_of_rows, columns_of_split, spread_index
from te_transform.canonicalize.table import METHODS, SPELLINGS
from te_transform.graph import edit, nodes

_OF_PYTHON = ("_operator", "builtins")
_AS_IN_NUMPY = {"axis": "dim", "keepdims": "keepdim"}  # names that PyTorch takes too


def spell(graph: fx.Graph, stay: Collection[fx.Node]) -> None:
    """Rewrite every call in the table; an in-place write becomes a new value unless it is in `stay`.

    A torch function whose call has no form in the table gets another target: readers of canonical calls know
    what each position means, and would not see `alpha=2`.
    """
    for node in graph.nodes:
        if not _is_tensor_call(node) or node in stay:
            continue
        call = _canonical(node)
        if call is not None:
            edit.set_target(node, *call)
        elif node.op == "call_function" and node.target in _functions_of_torch():
            edit.set_target(node, _under_another_target(node.target), node.args, dict(node.kwargs))


def spell_pieces(graph: fx.Graph) -> None:
    """Rewrite the pieces of a split, a chunk or rows of the last dimension as columns.

    Rewrite the pieces of var_mean as var and mean.
    """
    for node in graph.nodes:
        if node.target is operator.getitem and nodes.is_tensor_node(node):
            call = columns_of_split(node) or columns_of_rows(node) or _of_var_mean(node)
            if call is not None:
                edit.set_target(node, *call)


def _of_var_mean(part: fx.Node) -> tuple | None:
    pair, index = part.args
    if pair.target is not torch.var_mean or len(pair.args) < 4:  # not rewritten: a correction of 2, say
        return None
    x, dim, _, keepdim = pair.args
    return (torch.mean, (x, dim, keepdim)) if index % 2 else (torch.var, pair.args)


def spell_indices(graph: fx.Graph) -> None:
    """Rewrite an index that adds dimensions, such as x[None, :n, None], as slices and unsqueezes."""
    for node in [node for node in graph.nodes if node.target is operator.getitem]:
        x, index = node.args
        parts = index if isinstance(index, tuple) else (index,)
        plain = all(part is None or part is Ellipsis or isinstance(part, slice) for part in parts)
        if plain and None in parts and nodes.is_tensor_node(x):
            _insert_dims(node, x, parts)


def _insert_dims(node: fx.Node, x: fx.Node, parts: tuple) -> None:
    rest = tuple(part for part in parts if part is not None)
    if any(isinstance(part, slice) and part != slice(None) for part in rest):
        x = edit.insert([node], operator.getitem, (x, rest))
    behind = nodes.shape_of(node)
    dims = [at for at, part in enumerate(spread_index(parts, len(nodes.shape_of(x)))) if part is None]
    for at in dims[:-1]:
        x = edit.insert([node], torch.unsqueeze, (x, at - len(nodes.shape_of(x)) - 1))
    edit.set_target(node, torch.unsqueeze, (x, dims[-1] - len(behind)))


def _is_tensor_call(node: fx.Node) -> bool:
    """Return True if the node's value is a tensor or a sequence of tensors, not a size."""
    result = nodes.value(node)
    several = isinstance(result, (tuple, list)) and bool(result) and isinstance(result[0], torch.Tensor)
    return node.op in ("call_function", "call_method") and (several or isinstance(result, torch.Tensor))


def _canonical(node: fx.Node) -> tuple | None:
    method = node.op == "call_method"
    name = (_method_names() if method else _functions()).get(node.target)
    if name is None:
        return None
    if name in MOVES:
        return MOVES[name](node)
    spelling = METHODS.get(name, SPELLINGS[name]) if method else SPELLINGS[name]
    kwargs = {_AS_IN_NUMPY.get(name, name): given for name, given in node.kwargs.items()}
    try:
        bound = _signature(spelling).bind(*node.args, **kwargs)
    except TypeError:  # a form that is not in the table, for example with out=
        return None
    return spelling(*bound.args, **bound.kwargs)


@cache
def _under_another_target(function: Callable) -> Callable:
    """Return a function that computes the same and has the same name and signature."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__name__ = call.__qualname__ = function.__name__
    call.__wrapped__ = function
    return call


@cache
def _signature(spelling: Callable) -> inspect.Signature:
    return inspect.signature(spelling)


@cache
def _functions() -> dict[Any, str]:
    """Return the torch and Python functions in the table, with their names in the table."""
    homes = (torch, F, torch._C._nn, torch._C._linalg, torch._C._special, operator, torch.Tensor)
    names: dict[Any, str] = {}
    for name in (*SPELLINGS, *MOVES):
        for home in homes:
            for spelled in _spellings_of(name):
                if callable(function := getattr(home, spelled, None)):
                    names.setdefault(function, name)
    return names | {builtins.getattr: "getattr"}


@cache
def _functions_of_torch() -> frozenset[Any]:
    """Return the functions in the table that are PyTorch's, without those that only move elements."""
    return frozenset(
        function
        for function, name in _functions().items()
        if name not in MOVES and getattr(function, "__module__", None) not in _OF_PYTHON
    )


@cache
def _method_names() -> dict[str, str]:
    """Return the Tensor method names in the table, with their names in the table."""
    return {
        spelled: name
        for name in (*SPELLINGS, *MOVES)
        for spelled in _spellings_of(name)
        if hasattr(torch.Tensor, spelled)
    }


def _spellings_of(name: str) -> tuple[str, ...]:
    return name, f"{name}_", f"__{name}__", f"i{name}", f"__i{name}__", f"special_{name}"
