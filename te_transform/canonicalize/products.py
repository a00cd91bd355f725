"""Rewrite other forms of matrix products: einsum of two tensors, and baddbmm, which also scales and adds."""

from __future__ import annotations

import string
from dataclasses import dataclass

import torch
from torch import fx

from te_transform.canonicalize.table import permuted
from te_transform.graph import edit
from te_transform.graph.nodes import same_shape, shape_of, writes


@dataclass(frozen=True)
class _EinsumProduct:
    """A matmul in einsum letters: left [batch, rows, inner] @ right [batch, inner, column].

    The result is [batch, rows, column]. `shared` are row letters that act as batch dimensions; the right
    operand is broadcast over them.
    """

    left: str
    right: str
    result: str
    shared: str


def spell_products(graph: fx.Graph) -> None:
    """Rewrite torch.einsum as a matmul if one matmul computes it, and torch.baddbmm as bmm, mul and add."""
    for node in list(graph.nodes):
        if node.target is torch.einsum and isinstance(node.args[0], str):  # not numbers for dimensions
            _spell_einsum(graph, node)
        elif node.target is torch.baddbmm and not writes(node):
            _spell_baddbmm(graph, node, *node.args, **node.kwargs)


def _spell_baddbmm(
    graph: fx.Graph, node: fx.Node, x: fx.Node, left: fx.Node, right: fx.Node, beta: float, alpha: float
) -> None:
    product = edit.insert(graph, [node], torch.bmm, (left, right))
    if alpha != 1:
        product = edit.insert(graph, [node], torch.mul, (product, alpha))
    if beta == 0:  # baddbmm does not read x, which may be uninitialized
        edit.bypass(graph, node, product)
        return
    if beta != 1:
        x = edit.insert(graph, [node], torch.mul, (x, beta))
    edit.set_target(node, torch.add, (product, x))


def _spell_einsum(graph: fx.Graph, node: fx.Node) -> None:
    equation, *operands = node.args
    operands = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    terms, _, result = equation.replace(" ", "").partition("->")
    *terms, result = _in_letters(terms.split(","), result, operands)
    product = _as_product(terms, result) if len(operands) == 2 else None
    if product is not None and _sums_as_many(operands, terms, product):
        _rewrite(graph, node, operands, terms, result, product)


def _in_letters(terms: list[str], result: str, operands: list[fx.Node]) -> tuple[str, ...]:
    """Return the terms and the result with a letter for each dimension of `...`.

    The letters are aligned at the last of these dimensions, as in broadcasting.
    """
    unused = "".join(c for c in string.ascii_letters if c not in "".join((*terms, result)))
    ranks = [len(shape_of(x)) for x in operands]
    counts = [rank - len(t) + 3 if "..." in t else 0 for rank, t in zip(ranks, terms, strict=True)]
    if "..." not in result or max(counts) > len(unused):
        return *terms, result  # einsum sums over `...` if the result does not have it
    letters = [unused[max(counts) - count : max(counts)] for count in (*counts, max(counts))]
    return tuple(t.replace("...", c) for t, c in zip((*terms, result), letters, strict=True))


def _sums_as_many(operands: list[fx.Node], terms: list[str], product: _EinsumProduct) -> bool:
    """Return True if the summed dimension has the same length in both operands.

    An einsum may broadcast this dimension; a matmul cannot.
    """
    inner = product.left[-1]
    left, right = (shape_of(x)[term.index(inner)] for x, term in zip(operands, terms, strict=True))
    return same_shape((left,), (right,))


def _as_product(terms: list[str], result: str) -> _EinsumProduct | None:
    left, right = map(set, terms)
    if any(len(set(t)) != len(t) or not t.isalpha() for t in (*terms, result)):  # a diagonal, or `...`
        return None
    batch = "".join(c for c in result if c in left & right)
    inner, column = left & right - set(result), right - left
    rows = "".join(c for c in result if c in left - right)
    if (
        len(inner) != 1
        or len(column) != 1
        or set(rows) != left - right
        or set(result) != (left | right) - inner
    ):
        return None
    if not rows and batch:  # matmul multiplies a vector by one matrix only, not by a batch
        return None
    (inner,), (column,) = inner, column
    if terms[0] == batch + terms[0][len(batch) : -1] + inner:  # keep the left operand's order of rows
        rows = terms[0][len(batch) : -1]
    shared = rows[:-1] if batch else ""  # without a batch, matmul takes several row dimensions and one matrix
    return _EinsumProduct(
        batch + rows + inner, batch + shared + inner + column, batch + rows + column, shared
    )


def _rewrite(
    graph: fx.Graph,
    node: fx.Node,
    operands: list[fx.Node],
    terms: list[str],
    result: str,
    product: _EinsumProduct,
) -> None:
    left = _arranged(graph, node, operands[0], terms[0], product.left)
    right = operands[1]
    for _ in product.shared:  # add leading dimensions of size 1
        right = edit.insert(graph, [node], torch.unsqueeze, (right, -1 - len(shape_of(right))))
    right = _arranged(graph, node, right, product.shared + terms[1], product.right)
    if product.result == result:
        edit.set_target(node, torch.matmul, (left, right))
        return
    matmul = edit.insert(graph, [node], torch.matmul, (left, right))
    edit.set_target(node, *permuted(matmul, *(product.result.index(c) for c in result)))


def _arranged(graph: fx.Graph, node: fx.Node, x: fx.Node, now: str, wanted: str) -> fx.Node:
    if now == wanted:
        return x
    order = [now.index(c) for c in wanted]
    return edit.insert(graph, [node], *permuted(x, *order))
