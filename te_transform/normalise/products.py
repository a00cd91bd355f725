"""Matrix products under other names: an einsum of two tensors, and baddbmm, which scales and adds as well."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from te_transform import rewrite
from te_transform.normalise.spelling import permuted
from te_transform.pattern import shape_of
from te_transform.trace import Recording


@dataclass(frozen=True)
class _Product:
    """left [batch, rows, inner] @ right [batch, inner, column] = [batch, rows, column], by their letters."""

    left: str
    right: str
    result: str


def spell_products(recording: Recording) -> None:
    """Rewrite torch.einsum where one matmul computes it, torch.baddbmm as the bmm, mul and add that it is."""
    for node in recording.graph.nodes:
        if node.target is torch.einsum:
            _spell_einsum(recording, node)
        elif node.target is torch.baddbmm:
            _spell_baddbmm(recording, node, *node.args, **node.kwargs)


def _spell_baddbmm(
    recording: Recording,
    node: fx.Node,
    x: fx.Node,
    left: fx.Node,
    right: fx.Node,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> None:
    product = rewrite.insert(recording, [node], torch.bmm, (left, right), node)
    if alpha != 1:
        product = rewrite.insert(recording, [node], torch.mul, (product, alpha), product)
    if beta == 0:  # x is not read then, it may be uninitialised
        rewrite.bypass(recording, node, product)
        return
    if beta != 1:
        x = rewrite.insert(recording, [node], torch.mul, (x, beta), x)
    rewrite.respell(node, torch.add, (product, x))


def _spell_einsum(recording: Recording, node: fx.Node) -> None:
    equation, *operands = node.args
    operands = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    terms, _, result = equation.replace(" ", "").partition("->")
    product = _as_product(terms.split(","), result) if len(operands) == 2 else None
    if product is not None:
        _rewrite(recording, node, operands, terms.split(","), result, product)


def _as_product(terms: list[str], result: str) -> _Product | None:
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
    if len(rows) != 1 and batch:  # matmul has several rows only against one matrix
        return None
    (inner,), (column,) = inner, column
    return _Product(batch + rows + inner, batch + inner + column, batch + rows + column)


def _rewrite(
    recording: Recording,
    node: fx.Node,
    operands: list[fx.Node],
    terms: list[str],
    result: str,
    product: _Product,
) -> None:
    left = _arranged(recording, node, operands[0], terms[0], product.left)
    right = _arranged(recording, node, operands[1], terms[1], product.right)
    if product.result == result:
        rewrite.respell(node, torch.matmul, (left, right))
        return
    shape = [shape_of(node)[result.index(c)] for c in product.result]
    matmul = rewrite.insert(recording, [node], torch.matmul, (left, right), node, shape)
    rewrite.respell(node, *permuted(matmul, *(product.result.index(c) for c in result)))


def _arranged(recording: Recording, node: fx.Node, x: fx.Node, now: str, wanted: str) -> fx.Node:
    if now == wanted:
        return x
    order = [now.index(c) for c in wanted]
    return rewrite.insert(recording, [node], *permuted(x, *order), x, [shape_of(x)[i] for i in order])
