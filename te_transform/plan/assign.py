"""Decide which products run in FP8, for what reasons the others do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from te_transform.backends import Backend
from te_transform.backends.limits import DTYPES
from te_transform.graph.nodes import dtype_name, dtype_of, is_model_tensor, name_in_model, value
from te_transform.plan.match import Plan, Site
from te_transform.plan.options import Options
from te_transform.plan.precision_plan import PrecisionError, PrecisionPlan


def assign(
    plans: Iterable[tuple[str, Plan]], asked: Any, backend: Backend, others: Iterable[str] = ()
) -> PrecisionPlan:
    """The precision of every fused product.

    Args:
        plans: what is going to be fused in each captured graph, with the path of the captured module, "" for
            the whole model. A graph that blocks share comes once for each block.
        asked: a recipe, or a plan that overrides what is decided here (but for shapes no kernel has).
        backend: te, or what stands for it.
        others: modules with products that are captured later, as those around blocks are: a plan may name
            them.

    Raises:
        PrecisionError: `asked` names a module in which nothing is fused.
    """
    named = asked if isinstance(asked, PrecisionPlan) else PrecisionPlan(asked)
    decided: dict[str, str | None] = {}
    for prefix, plan in plans:
        heads = set() if prefix else set(_heads(plan))
        for site, path in product_paths(plan).items():
            path = path_below(prefix, path)
            decided[path] = _why_not(site, path, site in heads, named, backend)
    decided |= {path: named.sites[path] for path in others if path in named.sites and path not in decided}
    if unknown := sorted(named.sites.keys() - decided.keys()):
        raise PrecisionError(
            f"the precision plan names {', '.join(unknown)}, where no product is fused: "
            "te_transform.inspect() with the plan's recipe alone has the paths that there are, in .precision"
        )
    return PrecisionPlan(named.recipe, decided, named.small_calls)


def put_in_recipe(plan: Plan, options: Options) -> None:
    """Let each op of one captured graph run in the recipe, or not, as its shapes and its place say.

    What a precision plan says of single layers, which may share a graph, is kept with their parameters.
    """
    asked = options.recipe
    named = PrecisionPlan(asked.recipe if isinstance(asked, PrecisionPlan) else asked)
    heads = set(_heads(plan))
    for site, path in product_paths(plan).items():
        site.fused.in_fp8 = _why_not(site, path, site in heads, named, options.backend) is None


def products_in(plans: Iterable[tuple[str, Plan]], precision: PrecisionPlan) -> dict[str, bool]:
    """Whether each product runs in the recipe, by the name of the first parameter of its weight."""
    # Modules around blocks have no site yet, but for what their weight is called. Of others the sites say it.
    found = {f"{path}.weight": why is None for path, why in precision.sites.items()}
    for prefix, plan in plans:
        for site, path in product_paths(plan).items():
            inside = precision.sites[path_below(prefix, path)] is None
            names = (name_in_model(weight[0]) for weight in site.weights)
            found |= {path_below(prefix, name): inside for name in names if name}
    return found


def path_below(prefix: str, path: str) -> str:
    """The path, of a captured module, in the whole model."""
    return f"{prefix}.{path}".strip(".")


def product_paths(plan: Plan) -> dict[Site, str]:
    """What a precision plan calls a site with matrix products: its path, its name where two share a path."""
    sites = [site for site in plan.sites if site.weights]
    sharing = Counter(site.path for site in sites)
    return {site: site.path if sharing[site.path] == 1 else site.name for site in sites}


def _why_not(site: Site, path: str, is_head: bool, named: PrecisionPlan, backend: Backend) -> str | None:
    """Why the site stays out of FP8, None where it does not."""
    multiple = backend.multiple(backend.recipe_of(named.recipe))
    reasons = [*_foreign(site, backend), *_wide(site), *_odd(site, multiple)]
    reasons += [named.sites[path]] if path in named.sites else _head(is_head)
    return next((why for why in reasons if why is not None), None)


def _head(is_head: bool) -> Iterator[str]:
    if is_head:
        yield (
            "it makes the model's output, FP8 would round that itself and not what is summed up later: "
            "name it in a te_transform.PrecisionPlan to have it there"
        )


def _foreign(site: Site, backend: Backend) -> Iterator[str]:
    kind = type(site.fused)
    if getattr(backend, kind.__name__, None) is not kind:
        yield (
            f"{kind.__name__} is a rule's own module, a recipe holds for TE's: leave the rule out of passes= "
            "to have the product in FP8"
        )


def _wide(site: Site) -> Iterator[str]:
    dtypes = {dtype_of(parameter) for weight in site.weights for parameter in weight}
    if not dtypes <= {*DTYPES, torch.float32}:
        found = ", ".join(sorted(map(dtype_name, dtypes)))
        yield (
            f"the weights are {found}, FP8 needs bfloat16, float16, or float32 under torch.autocast: store "
            "them in one of these, as model.to(torch.bfloat16) does"
        )


def _odd(site: Site, multiple: int) -> Iterator[str]:
    for place in site.fused.PRODUCTS:
        shape = value(site.node.args[place]).shape
        if any(size % multiple for size in shape):
            enough = (-(size // -multiple) * multiple for size in shape)
            yield (
                f"the weight is {' x '.join(map(str, shape))}, FP8 kernels need multiples of {multiple}: "
                f"make it {' x '.join(map(str, enough))}, where training allows"
            )


def _heads(plan: Plan) -> Iterator[Site]:
    """The sites of one product that make the model's output and nothing else: between the two lie only
    functions of one tensor, and a bias."""
    sites = {site.result: site for site in plan.sites if site.weights}
    towards_output: set[fx.Node] = set()
    for node in reversed(plan.canonical.nodes):
        if node.op == "output":
            towards_output.add(node)
        elif node.op != "placeholder" and towards_output.issuperset(node.users):
            if node not in sites and len(_sources(node)) == 1:
                towards_output.add(node)
            elif node in sites and len(sites[node].weights) == 1:
                yield sites[node]


def _sources(node: fx.Node) -> list[fx.Node]:
    """The floating tensors that the node computes with, but for a bias that it adds."""
    added = node.target is torch.add
    return [n for n in node.all_input_nodes if _is_floating(n) and not (added and is_model_tensor(n))]


def _is_floating(node: fx.Node) -> bool:
    held = value(node)
    return isinstance(held, Tensor) and held.is_floating_point()
