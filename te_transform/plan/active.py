"""Find the fused sites that run unfused at the example's sizes, and the reasons."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import fx

from te_transform.backends import limits, plain
from te_transform.backends.chunked_loss import ChunkedLoss
from te_transform.graph.nodes import numel_of, shape_of, value
from te_transform.plan.assign import product_paths, runs_in_recipe
from te_transform.plan.match import Plan, Site
from te_transform.plan.options import Options
from te_transform.plan.precision_plan import PrecisionPlan
from te_transform.plan.product_sizes import size_of_product

AS_FAST = "uncompiled and in the weights' own dtype, fused products are faster only in gated MLPs"
_SINGLE_LINEAR = "in plain PyTorch, a linear by itself stays as it is"
_LEFT_TO_COMPILER = "left to the compiler, which fuses it by itself"
_BY_COMPILER = (
    plain.Linear, plain.LayerNormLinear, plain.WideLinear, plain.Rotary, plain.CrossEntropy, ChunkedLoss,
)  # fmt: skip


def why_inactive(path: str, plan: Plan, options: Options, precision: PrecisionPlan | None) -> Iterator[str]:
    """Yield for each outcome of the plan why it is inactive, or "" if it is active or not fused.

    At run time, execution/small_batch.py and the ops of the backends apply the same limits. A site counts as
    active if its sizes are unknown before the call.

    Args:
        path: The path of the captured module.
        precision: The products that run in FP8, or None without a recipe.
    """
    in_fp8 = {site for site, name in product_paths(plan).items() if runs_in_recipe(precision, path, name)}
    small_calls = precision is not None and precision.small_calls
    reasons = dict(
        _compiled(plan, in_fp8) if options.compile else _uncompiled(plan, options, in_fp8, small_calls)
    )
    # merged linears share the reason of the site that absorbed them
    absorbed = {rule: why for site, why in reasons.items() for rule in site.rules[:-1]}
    for outcome, site in plan.outcomes_with_sites():
        is_fused, rule = outcome.status == "fused", (outcome.rule, outcome.path)
        yield reasons.get(site, "") if site else absorbed.get(rule, "") if is_fused else ""


def _compiled(plan: Plan, in_fp8: set[Site]) -> Iterator[tuple[Site, str]]:
    for site in plan.sites:
        if isinstance(site.fused, _BY_COMPILER) and site not in in_fp8:
            yield site, _LEFT_TO_COMPILER


def _uncompiled(
    plan: Plan, options: Options, in_fp8: set[Site], small_calls: bool
) -> Iterator[tuple[Site, str]]:
    has_kernels, in_graphs = options.backend.HAS_KERNELS, options.in_cuda_graphs
    gaining = dict(_gaining_products(plan, in_fp8, in_graphs))
    gaining |= dict.fromkeys(in_fp8, None) if small_calls else {}
    # a graph in which no product gains in this call runs all of them unfused, for one reason
    has_products = any(site.is_product for site in plan.sites)
    few = next(iter(gaining.values()), AS_FAST) if has_products and None not in gaining.values() else None
    for site in plan.sites:
        if type(site.fused) is plain.Linear and not has_kernels and len(site.weights[0]) == 1:
            why = _SINGLE_LINEAR
        elif limits.ignore_size_limits:
            why = None
        elif site.is_product:
            why = few or (gaining.get(site, AS_FAST) if has_kernels else None)
        else:
            goes = few and _goes_with(site, gaining)
            why = few if goes else _too_small_for_kernel(site, in_graphs, has_kernels)
        if why:
            yield site, why


def _gaining_products(plan: Plan, in_fp8: set[Site], in_graphs: bool) -> Iterator[tuple[Site, str | None]]:
    """Yield the products that gain from some number of rows on, and why the call has too few, or None."""
    for site in filter(lambda site: site.is_product, plan.sites):
        size = size_of_product(site)
        least = size.least_rows(site in in_fp8, in_graphs)
        if least < math.inf:
            gain = "FP8 gains" if site in in_fp8 else "fused products gain"
            yield site, _too_few_rows(size.rows, size.width, least, gain)


def _goes_with(site: Site, gaining: dict[Site, str | None]) -> bool:
    """Return True for a rotation in a graph with gaining products: it runs unfused whenever they do."""
    return isinstance(site.fused, plain.Rotary) and any(each.fused.gains for each in gaining)


def _too_few_rows(rows: int, width: int, least: float, what: str) -> str | None:
    if not isinstance(rows, int) or rows >= least:
        return None
    return f"the call has {rows:,} tokens, but {what} from {least:,} on (width {width})"


def _too_small_for_kernel(site: Site, in_graphs: bool, has_kernels: bool) -> str | None:
    """Return why an op other than a fused product is too small for its kernel, or None."""
    first, *others = site.node.args
    if isinstance(site.fused, plain.PaddedLinear):
        tokens, least = math.prod(shape_of(first)[:-1]), limits.MIN_PADDED_TOKENS
        is_few = isinstance(tokens, int) and tokens < least
        return f"the call has {tokens:,} tokens, but padding gains from {least} on" if is_few else None
    if not has_kernels:
        return None
    if isinstance(site.fused, plain.Rotary) and len(shape_of(first)) == 4:
        rows, width = limits.rotation_size(shape_of(first))
        least = limits.break_even_rows(width, in_fp8=False)
        return _too_few_rows(rows, width, least, "TE's rotary kernel gains")
    if isinstance(site.fused, plain.DotProductAttention):
        return _small_attention(first, others, in_graphs)
    if isinstance(site.fused, plain.WideLinear):
        work = math.prod(shape_of(first)[:-1]) * numel_of(others[0])
        is_small = isinstance(work, int) and work < limits.MIN_WIDE_WORK
        least = f"{limits.MIN_WIDE_WORK:,.0f}"
        return f"{work:,} multiplications, but tensor cores gain from {least} on" if is_small else None
    is_loss = isinstance(site.fused, plain.CrossEntropy) and not in_graphs
    if is_loss and isinstance(numel_of(first), int) and numel_of(first) < limits.MIN_LOGITS:
        return f"{numel_of(first):,} logits, but TE's kernel gains from {limits.MIN_LOGITS:,.0f} on"
    return None


def _small_attention(query: fx.Node, others: list, in_graphs: bool) -> str | None:
    key, mask = value(others[0]), others[2]
    sizes = (*value(query).shape, *key.shape)
    if len(sizes) != 8 or not all(isinstance(size, int) for size in sizes):
        return None
    return limits.too_small_attention(value(query), key, mask is not None, in_graphs)
