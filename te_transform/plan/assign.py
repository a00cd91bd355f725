"""Decide which products run in FP8, and give the reason for each product that does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from te_transform.backends import Backend
from te_transform.backends.limits import DTYPES
from te_transform.graph.nodes import (
    dtype_name,
    dtype_of,
    is_model_tensor,
    name_in_model,
    path_below,
    value,
)
from te_transform.plan.match import Plan, Site
from te_transform.plan.options import Options
from te_transform.plan.precision_plan import PrecisionError, PrecisionPlan


def assign(
    plans: Iterable[tuple[str, Plan]], asked: Any, backend: Backend, others: Iterable[str] = ()
) -> PrecisionPlan:
    """Return the precision of every fused product.

    Args:
        plans: The plan of each captured graph with the path of its module, "" for the whole model. A graph
            shared by several blocks is listed once per block.
        asked: A recipe, or a precision plan. A plan overrides the choices made here, except for shapes that
            no kernel supports.
        backend: The te backend, or a stand-in for it.
        others: Paths of modules with products that are captured later, such as the head around blocks. A
            precision plan may name them.

    Raises:
        PrecisionError: `asked` names a module in which nothing is fused.
    """
    named = asked if isinstance(asked, PrecisionPlan) else PrecisionPlan(asked)
    decided: dict[str, str | None] = {}
    for prefix, plan in plans:
        heads = set() if prefix else set(_head_sites(plan))
        for site, path in product_paths(plan).items():
            path = path_below(prefix, path)
            decided[path] = _why_not_fp8(site, path, site in heads, named, backend)
    decided |= {path: named.sites[path] for path in others if path in named.sites and path not in decided}
    if unknown := sorted(named.sites.keys() - decided.keys()):
        raise PrecisionError(
            "expected paths of fused products in the precision plan, got "
            f"{', '.join(unknown)}; te_transform.inspect() with the plan's recipe alone lists the valid "
            "paths in .precision"
        )
    return PrecisionPlan(named.recipe, decided, named.small_calls)


def put_in_recipe(plan: Plan, options: Options) -> None:
    """Set `in_fp8` on each op of one captured graph, from its shapes and its position in the model.

    Choices of a precision plan for single layers are stored with the parameters, because layers may share a
    graph.
    """
    asked = options.recipe
    named = PrecisionPlan(asked.recipe if isinstance(asked, PrecisionPlan) else asked)
    heads = set(_head_sites(plan))
    for site, path in product_paths(plan).items():
        site.fused.in_fp8 = _why_not_fp8(site, path, site in heads, named, options.backend) is None


def products_in(plans: Iterable[tuple[str, Plan]], precision: PrecisionPlan) -> dict[str, bool]:
    """Return whether each product runs in the recipe, keyed by the parameter names of its weights."""
    # Modules around blocks have no sites yet: assume that their parameter is called "weight".
    in_recipe = {f"{path}.weight": why is None for path, why in precision.sites.items()}
    for prefix, plan in plans:
        for site, path in product_paths(plan).items():
            inside = precision.sites[path_below(prefix, path)] is None
            names = (name_in_model(weight[0]) for weight in site.weights)
            in_recipe |= {path_below(prefix, name): inside for name in names if name}
    return in_recipe


def runs_in_recipe(precision: PrecisionPlan | None, prefix: str, path: str) -> bool:
    """Return True if the product at `path` inside the module at `prefix` runs in the recipe."""
    return precision is not None and precision.sites.get(path_below(prefix, path), "") is None


def product_paths(plan: Plan) -> dict[Site, str]:
    """Return the name that a precision plan uses for each site with matrix products.

    The name is the site's path, or the name of its op if several sites share the path.
    """
    sites = [site for site in plan.sites if site.weights]
    sharing = Counter(site.path for site in sites)
    return {site: site.path if sharing[site.path] == 1 else site.name for site in sites}


def _why_not_fp8(site: Site, path: str, is_head: bool, named: PrecisionPlan, backend: Backend) -> str | None:
    """Return why the site stays out of FP8, or None if it runs in FP8."""
    multiple = backend.multiple(backend.recipe_of(named.recipe))
    reasons = [*_foreign(site, backend), *_too_wide(site), *_odd_sizes(site, multiple)]
    reasons += [named.sites[path]] if path in named.sites else _head(is_head)
    return next((why for why in reasons if why is not None), None)


def _head(is_head: bool) -> Iterator[str]:
    if is_head:
        yield (
            "it computes the model's output, but FP8 would round the output itself, not terms of a sum: name "
            "it in a te_transform.PrecisionPlan to run it in FP8"
        )


def _foreign(site: Site, backend: Backend) -> Iterator[str]:
    kind = type(site.fused)
    if getattr(backend, kind.__name__, None) is not kind:
        yield (
            f"{kind.__name__} is a module of the rule, but a recipe needs one of TE's: leave the rule out of "
            "passes= to run the product in FP8"
        )


def _too_wide(site: Site) -> Iterator[str]:
    dtypes = {dtype_of(parameter) for weight in site.weights for parameter in weight}
    if not dtypes <= {*DTYPES, torch.float32}:
        names = ", ".join(sorted(map(dtype_name, dtypes)))
        yield (
            f"the weights are {names}, but FP8 needs bfloat16, float16, or float32 under torch.autocast: "
            "store them in one of these, as model.to(torch.bfloat16) does"
        )


def _odd_sizes(site: Site, multiple: int) -> Iterator[str]:
    for position in site.fused.PRODUCTS:
        shape = value(site.node.args[position]).shape
        if any(size % multiple for size in shape):
            enough = (-(size // -multiple) * multiple for size in shape)
            yield (
                f"the weight is {' x '.join(map(str, shape))}, but FP8 kernels need multiples of {multiple}: "
                f"make it {' x '.join(map(str, enough))}, if you can retrain"
            )


def _head_sites(plan: Plan) -> Iterator[Site]:
    """Yield the sites with one product whose result is used only as the model's output.

    Between product and output there are only functions of one tensor, and a bias.
    """
    sites = {site.result: site for site in plan.sites if site.weights}
    towards_output: set[fx.Node] = set()
    for node in reversed(plan.canonical.nodes):
        if node.op == "output":
            towards_output.add(node)
        elif node.op != "placeholder" and towards_output.issuperset(node.users):
            if node not in sites and len(_floating_inputs(node)) == 1:
                towards_output.add(node)
            elif node in sites and len(sites[node].weights) == 1:
                yield sites[node]


def _floating_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the floating-point inputs of the node, without a bias that it adds."""
    added = node.target is torch.add
    return [n for n in node.all_input_nodes if _is_floating(n) and not (added and is_model_tensor(n))]


def _is_floating(node: fx.Node) -> bool:
    tensor = value(node)
    return isinstance(tensor, Tensor) and tensor.is_floating_point()
