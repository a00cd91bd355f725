"""Rewrite other forms of matrix products: einsum and tensordot of two tensors, and products that also add."""

from __future__ import annotations

import math
import string
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from te_transform.canonicalize.linears import is_model_weight
from te_transform.canonicalize.moves import reshape_sizes
from te_transform.canonicalize.table import permuted
from te_transform.graph import edit
from te_transform.graph.nodes import is_model_tensor, same_shape, shape_of, writes


@dataclass(frozen=True)
class _EinsumProduct:
    """A matmul in einsum letters: left [batch, rows, inner] @ right [batch, inner, columns].

    The result is [batch, rows, columns]. Several letters of `inner` or `columns` become one dimension.
    `shared` are row letters that act as batch dimensions; the right operand is broadcast over them.
    """

    batch: str
    rows: str
    inner: str
    columns: str
    shared: str


def spell_products(graph: fx.Graph) -> None:
    """Rewrite torch.einsum and torch.tensordot as a matmul if one matmul computes the call.

    Rewrite torch.baddbmm as bmm, mul and add, torch.addcmul without a factor as mul and add, and a
    torch.addmm that scales a stored weight as a linear with a computed weight.
    """
    for node in list(graph.nodes):
        if node.target is torch.einsum and isinstance(node.args[0], str):  # not numbers for dimensions
            _spell_einsum(node)
        elif node.target is torch.tensordot and not writes(node):
            _spell_tensordot(node, *node.args)
        elif node.target is torch.baddbmm and not writes(node):
            _spell_baddbmm(node, *node.args, **node.kwargs)
        elif node.target is torch.addmm and node.kwargs and not writes(node):
            _spell_scaled_linear(node, *node.args, **node.kwargs)
        elif node.target is torch.addcmul and not writes(node):
            x, *factors = node.args
            edit.set_target(node, torch.add, (edit.insert([node], torch.mul, tuple(factors)), x))


def _spell_baddbmm(
    node: fx.Node, x: fx.Node, left: fx.Node, right: fx.Node, beta: float, alpha: float
) -> None:
    product = _by_factor(node, edit.insert([node], torch.bmm, (left, right)), alpha)
    if beta == 0:  # baddbmm does not read x, which may be uninitialized
        edit.bypass(node, product)
        return
    edit.set_target(node, torch.add, (product, _by_factor(node, x, beta)))


def _by_factor(node: fx.Node, x: fx.Node, factor: float) -> fx.Node:
    return x if factor == 1 else edit.insert([node], torch.mul, (x, factor))


def _spell_scaled_linear(
    node: fx.Node, bias: fx.Node, x: fx.Node, weight: fx.Node, beta: float, alpha: float
) -> None:
    if not is_model_weight(2)(weight):
        return
    weight = edit.insert([node], torch.t, (_by_factor(node, weight, alpha),))
    added = _by_factor(node, bias, beta) if beta else None  # addmm does not read 0 * bias
    edit.set_target(node, F.linear, (x, weight, added))


def _spell_tensordot(node: fx.Node, left: fx.Node, right: fx.Node, dims: Any) -> None:
    letters = string.ascii_letters
    first, second = [*letters[: len(shape_of(left))]], [*letters[26 : 26 + len(shape_of(right))]]
    inner = (range(-dims, 0), range(dims)) if isinstance(dims, int) else dims
    for at, beside in zip(*inner, strict=True):
        second[beside] = first[at]
    result = [letter for letter in (*first, *second) if (letter in first) is not (letter in second)]
    _spell_product(node, [left, right], ["".join(first), "".join(second)], "".join(result))


def _spell_einsum(node: fx.Node) -> None:
    equation, *operands = node.args
    operands = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    terms, _, result = equation.replace(" ", "").partition("->")
    *terms, result = _in_letters(terms.split(","), result, operands)
    if len(operands) == 2:
        _spell_product(node, operands, terms, result)


def _spell_product(node: fx.Node, operands: list[fx.Node], terms: list[str], result: str) -> None:
    if is_model_tensor(operands[0]) and not is_model_tensor(operands[1]):  # in a linear, the weight is second
        operands, terms = operands[::-1], terms[::-1]
    product = _as_product(terms, result)
    if product is not None and _sizes_fit(operands, terms, product):
        _rewrite(node, operands, terms, result, product)


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


def _sizes_fit(operands: list[fx.Node], terms: list[str], product: _EinsumProduct) -> bool:
    """Return True if a matmul can have these sizes.

    An einsum may broadcast a summed dimension; a matmul cannot. Dimensions that become one are numbers.
    """
    left, right = (dict(zip(term, shape_of(x), strict=True)) for term, x in zip(terms, operands, strict=True))
    merged = "".join(group for group in (product.inner, product.columns) if len(group) > 1)
    are_numbers = all(isinstance(right[c], int) for c in merged)
    return are_numbers and all(same_shape((left[c],), (right[c],)) for c in product.inner)


def _as_product(terms: list[str], result: str) -> _EinsumProduct | None:
    left, right = map(set, terms)
    if any(len(set(t)) != len(t) or not t.isalpha() for t in (*terms, result)):  # a diagonal, or `...`
        return None
    batch = "".join(c for c in result if c in left & right)
    inner = "".join(c for c in terms[1] if c in left and c not in result)
    columns = "".join(c for c in terms[1] if c not in left)
    rows = "".join(c for c in result if c in left - right)
    is_sum = set(rows) == left - right and set(result) == (left | right) - set(inner)
    if not inner or not columns or not is_sum:
        return None
    if batch and (len(inner + columns) > 2 or not rows):  # matmul multiplies a vector by one matrix only
        return None
    kept = terms[0][len(batch) : -len(inner)]
    if terms[0] == batch + kept + inner:  # keep the left operand's order of rows
        rows = kept
    shared = rows[:-1] if batch else ""  # without a batch, matmul takes several row dimensions and one matrix
    return _EinsumProduct(batch, rows, inner, columns, shared)


def _rewrite(
    node: fx.Node,
    operands: list[fx.Node],
    terms: list[str],
    result: str,
    product: _EinsumProduct,
) -> None:
    rows, columns = product.batch + product.rows, product.columns
    left = _arranged(node, operands[0], terms[0], rows + product.inner)
    left = _flatten_groups(node, left, len(product.inner))
    call = torch.matmul, (left, _right(node, operands[1], terms[1], product))
    if len(columns) > 1:
        sizes = dict(zip(terms[1], shape_of(operands[1]), strict=True))
        matmul = edit.insert([node], *call)
        shape = (*shape_of(matmul)[:-1], *(sizes[letter] for letter in columns))
        call = torch.reshape, (matmul, reshape_sizes(matmul, shape))
    if result != rows + columns:
        computed = edit.insert([node], *call)
        call = permuted(computed, *((rows + columns).index(letter) for letter in result))
    edit.set_target(node, *call)


def _right(node: fx.Node, x: fx.Node, term: str, product: _EinsumProduct) -> fx.Node:
    """Return the right operand as [batch, shared, inner, columns].

    A transpose comes after merging, so that the weight of a linear is a view of its parameter.
    """
    inner, columns = product.inner, product.columns
    if term == columns + inner:
        return edit.insert([node], torch.t, (_flatten_groups(node, x, len(columns), len(inner)),))
    for _ in product.shared:  # add leading dimensions of size 1
        x = edit.insert([node], torch.unsqueeze, (x, -1 - len(shape_of(x))))
    wanted = product.batch + product.shared + inner + columns
    x = _arranged(node, x, product.shared + term, wanted)
    return _flatten_groups(node, x, len(inner), len(columns))


def _flatten_groups(node: fx.Node, x: fx.Node, *counts: int) -> fx.Node:
    """Merge the last dimensions of `x`: each count is the number of dimensions that become one."""
    shape = [*shape_of(x)]
    for at, count in enumerate(counts, len(shape) - sum(counts)):
        shape[at : at + count] = [math.prod(shape[at : at + count])]
    is_merged = len(shape) == len(shape_of(x))
    return x if is_merged else edit.insert([node], torch.reshape, (x, tuple(shape)))


def _arranged(node: fx.Node, x: fx.Node, now: str, wanted: str) -> fx.Node:
    if now == wanted:
        return x
    order = [now.index(c) for c in wanted]
    return edit.insert([node], *permuted(x, *order))
