"""Find experts that compute every token, although each token chooses only some of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from math import prod

from torch import Tensor

from te_transform.profile.analysis import Analysis, alike
from te_transform.profile.tree import FACTORED, Op, factor_shapes
from te_transform.profile.trials import EVENT_DTYPES, Replacement, Suspect
from te_transform.profile.watch import Choice, Line

_ASK_CHOSEN = (
    "compute each expert only for the tokens that choose it: a model of transformers does with "
    'experts_implementation="grouped_mm"'
)


def dense_experts(analysis: Analysis) -> Iterator[Suspect]:
    """Yield the products of all tokens with all experts, at the path of a router or next to it."""
    for line, choice in _choices(analysis):
        path = analysis.labels[line.label].path
        for around in dict.fromkeys((path, path.rpartition(".")[0] or path)):
            if products := _of_all_tokens(analysis, around, choice):
                yield _suspect(analysis, around, products, line, choice)
                break


def _suspect(analysis: Analysis, around: str, products: list[Op], line: Line, choice: Choice) -> Suspect:
    """Return the products of one module with experts as a slow operation of this module."""
    taken = sum(analysis.by_outer[op.outer] for op in products)
    most = taken - taken * choice.chosen // choice.among
    label = next((n for n, label in enumerate(analysis.labels) if n and label.path == around), line.label)
    evidence = (
        f"each of {choice.among} experts computes all {choice.rows} tokens, which choose {choice.chosen} at "
        f"{line.place}"
    )
    trial = _fewer_rows(analysis, max(products, key=analysis.within), choice)
    return Suspect("dense experts", label, evidence, _ASK_CHOSEN, taken, trial, most)


def _choices(analysis: Analysis) -> Iterator[tuple[Line, Choice]]:
    """Yield the choice of each router among the most values: some choose groups of experts first."""
    seen: set[int] = set()
    for line, choice in sorted(analysis.watch.choices.items(), key=lambda each: -each[1].among):
        if choice.chosen < choice.among and line.label not in seen:
            seen.add(line.label)
            yield line, choice


def _of_all_tokens(analysis: Analysis, path: str, choice: Choice) -> list[Op]:
    inside = analysis.under(path)
    products = [op for op in analysis.forward() if op.label in inside and op.name in FACTORED]
    kinds = [(alike(analysis.labels[op.label]), *factor_shapes(op)) for op in products]
    counts = Counter(kinds)
    return [
        op for op, kind in zip(products, kinds, strict=True)
        if kind[1][:-1] == (choice.among, choice.rows)
        or (kind[1][:-1] == (choice.rows,) and counts[kind] >= choice.among)
        or _is_einsum_of_experts(analysis, op, choice)
    ]  # fmt: skip


def _is_einsum_of_experts(analysis: Analysis, product: Op, choice: Choice) -> bool:
    """Return True if an einsum multiplies all tokens by the weights of all experts, joined in one matrix."""
    tokens, weights = factor_shapes(product)
    if product.parent is None or product.parent.event.name != "aten::einsum":
        return False
    joined = (
        prod(shape) for shape in analysis.watch.einsums.get(product.label, ())
        if len(shape) > 2 and choice.among in shape
    )  # fmt: skip
    return tokens[:-1] == (1, choice.rows) and prod(weights) in joined


def _fewer_rows(analysis: Analysis, product: Op, choice: Choice) -> Replacement | None:
    """Return the same product with as many rows as tokens choose on average, or None in an unknown dtype."""
    shapes, dtype = factor_shapes(product), EVENT_DTYPES.get(product.event.dtypes[-1])
    kept = max(1, choice.rows * choice.chosen // choice.among)
    after, is_training = partial(_product, rows=kept), analysis.recording.is_training
    return dtype and Replacement(shapes, dtype, _product, after, is_training, f"product of {kept} rows")


def _product(tokens: Tensor, weights: Tensor, rows: int | None = None) -> Tensor:
    return tokens[..., :rows, :] @ weights
