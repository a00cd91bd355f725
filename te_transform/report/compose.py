"""Make the report of what was planned for each captured graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from torch import fx, nn

from te_transform.backends import plain
from te_transform.backends.limits import DTYPES, break_even_rows
from te_transform.graph.edit import snapshot
from te_transform.graph.nodes import value
from te_transform.graph.pattern import spelled_as, targets_of, within
from te_transform.plan import cost, memory
from te_transform.plan.active import why_inactive
from te_transform.plan.assign import path_below, product_paths
from te_transform.plan.match import Plan
from te_transform.plan.options import Options
from te_transform.plan.precision_plan import PrecisionPlan
from te_transform.plan.quantized_modules import quantized_modules
from te_transform.plan.rule import Outcome, Rule
from te_transform.report.drawing import Part
from te_transform.report.explain import explain_graphs
from te_transform.report.places import listed
from te_transform.report.report import Report

_COMPILED = (
    "compiled: inductor fuses norms and activations by itself, attention and products in FP8 run in the "
    "kernels of the backend"
)
_REPLAYED = "calls run as CUDA graphs, from the third of a kind on"
_AS_FAST = (
    "products run as they were captured: in the weights' own dtype, uncompiled, fused ones are faster in "
    "gated MLPs alone"
)
_WIDE = "the example call multiplies in float32: products run in FP8 under torch.autocast alone"

_EXPERTS = (
    "experts compute in their weights' own dtype in a recipe too: casts to FP8 would take most of the time "
    "that their products gain"
)


def compose(
    model: nn.Module,
    plans: Sequence[tuple[str, Plan]],
    options: Options,
    precision: PrecisionPlan | None = None,
    inputs: str = "",
    notes: Iterable[str] = (),
    reasons: Iterable[str] = (),
) -> Report:
    """The report of a conversion, or of one that is only planned.

    Args:
        plans: of the captured graphs in the order of their calls, each with the path of the captured module,
            "" for the whole model. A graph that blocks share comes once for each block.
        inputs: what the example inputs are, in words, if the memory of a step is to be predicted for them.
        notes: more sentences.
        reasons: what dynamo said of code that it does not capture.
    """
    has_kernels, compiled = options.backend.HAS_KERNELS, bool(options.compile)
    by_size = has_kernels and (precision is not None or not compiled)
    wide = precision is not None and None in precision.sites.values() and _multiplies_wide(plans)
    inside = None if wide else precision
    predicted = inputs and has_kernels and not compiled
    found = [tuple(_told(path, plan, options, inside, model.training)) for path, plan in plans]
    outcomes = tuple(_outcomes(found, {path for path, _ in model.named_modules()}))
    priced = any(outcome.seconds is not None for told in found for outcome in told)
    step = memory.predict(plans, model.parameters(), inputs, inside) if predicted else None
    parts = tuple(_parts(plans))  # with the numbers of their places, which are told by now
    largest = max(parts, key=lambda part: len(part.after.nodes), default=Part((), fx.Graph(), fx.Graph()))
    captured = [(path, plan.captured) for path, plan in plans]
    return Report(
        type(model).__name__,
        outcomes,
        largest.before,
        largest.after,
        (
            options.backend_reason,
            *(_sizes(plans, precision, options.in_cuda_graphs) if by_size else ()),
            *([_COMPILED] if compiled else ()),
            *([_REPLAYED] if options.graphs else ()),
            *([_WIDE] if wide else ()),
            *([_EXPERTS] if precision is not None and _has_experts(plans) else ()),
            *([cost.NOTE] if priced else ()),
            *memory.room(model, step),
            *_never(plans, options.passes),
            *_quantized(model),
            *_nothing(plans, outcomes, by_size or compiled),
            *notes,
        ),
        tuple(explain_graphs(captured, reasons, "forward" in vars(model))),
        precision,
        memory=step,
        options=options.asked(),
        inputs=inputs,
        parts=parts,
        rules=tuple(rule.name for rule in options.passes),
    )


def _parts(plans: Iterable[tuple[str, Plan]]) -> Iterator[Part]:
    """Each graph once, with the paths of all that share it."""
    found: dict[fx.GraphModule, tuple[Plan, list[str]]] = {}
    for path, plan in plans:
        found.setdefault(plan.captured, (plan, []))[1].append(path)
    for plan, paths in found.values():
        yield Part(tuple(paths), plan.before, snapshot(plan.canonical))


def _never(plans: Sequence[tuple[str, Plan]], rules: Iterable[Rule]) -> Iterator[str]:
    """Of rules that nothing resembles, which functions in their patterns stand under other names there."""
    found = {outcome.rule for _, plan in plans for outcome in plan.outcomes}
    for rule in (rule for rule in rules if plans and rule.name not in found):
        targets = (target for part in within(rule.pattern) for target in targets_of(part))
        twins = {target: twin for target in targets if (twin := spelled_as(target)) is not None}
        for target, twin in twins.items():
            yield (
                f"nothing resembles the pattern of the rule {rule.name!r}, which has {target.__name__} as it "
                f"is written in models: write ops.{twin.__name__}, what te_transform.rules has for it"
            )


def _quantized(model: nn.Module) -> Iterator[str]:
    """Name the modules whose weights are quantized."""
    for what, paths in quantized_modules(model).items():
        yield (
            f"weights are quantized ({what}) in {listed(paths)}: their products are not fused, dequantize "
            "the weights before convert() to have them fused"
        )


def _nothing(
    plans: Sequence[tuple[str, Plan]], outcomes: Sequence[Outcome], is_faster: bool
) -> Iterator[str]:
    """Say that a model gains nothing, and why; `is_faster`: single products are, in kernels or compiled."""
    sites = [site for _, plan in plans for site in plan.sites]
    fused = [outcome for outcome in outcomes if outcome.status == "fused"]
    if plans and not sites:
        yield (
            "nothing fused: each place that resembles the pattern of a rule is refused, see its reasons"
            if any(plan.outcomes for _, plan in plans)
            else "nothing fused: no operations of the model resemble the pattern of a rule"
        )
    elif sites and not is_faster and all(type(site.fused) is plain.Linear for site in sites):
        yield "nothing gains: only single products are fused, and this backend runs them as the model does"
    elif fused and all(outcome.inactive for outcome in fused):
        yield (
            "nothing gains in a call of these sizes, the model runs as captured: larger example inputs, "
            "compile=True or a recipe may change that"
        )


def _has_experts(plans: Sequence[tuple[str, Plan]]) -> bool:
    return any(isinstance(site.fused, plain.Experts) for _, plan in plans for site in plan.sites)


def _multiplies_wide(plans: Sequence[tuple[str, Plan]]) -> bool:
    """Whether all fused products return more than 16 bits, which no recipe holds for."""
    return all(
        value(site.result).dtype not in DTYPES for _, plan in plans for site in plan.sites if site.weights
    )


def _told(
    path: str, plan: Plan, options: Options, precision: PrecisionPlan | None, training: bool
) -> Iterator[Outcome]:
    """The outcomes of one graph, with the numbers that there are of each place; the calls of fused ops in the
    graph get them too, to be shown by whoever draws it."""
    unknown = cost.unknown([(path, plan)], options)
    priced = plan.outcomes if unknown else cost.priced(path, plan, options, precision, training)
    products = product_paths(plan)
    keeps = options.backend.HAS_KERNELS and training and not options.compile
    kept = memory.kept(path, plan, precision) if keeps else {}
    inactive = why_inactive(path, plan, options, precision)
    for (_, site), outcome, why in zip(plan.places(), priced, inactive, strict=True):
        outcome = replace(outcome, inactive=why)
        if site is not None:
            name = products.get(site)
            held = "" if precision is None or name is None else precision.told(path_below(path, name))
            outcome = replace(outcome, kept=kept.get(site), precision=held, deviations=site.deviations)
            site.node.meta["outcome"] = outcome
        yield outcome.below(path)


def _outcomes(found: Iterable[Iterable[Outcome]], modules: Collection[str]) -> Iterator[Outcome]:
    """Those of all graphs; what stands in several graphs of one module, for other sizes, is one outcome."""
    alike: dict[Outcome, list[Outcome]] = {}
    for told in found:
        own: dict[Outcome, list[Outcome]] = {}
        for outcome in told:
            outcome = replace(outcome, path=_module_at(outcome.path, modules))
            own.setdefault(outcome, []).append(outcome)
        alike |= {key: each for key, each in own.items() if len(each) > len(alike.get(key, ()))}
    return chain.from_iterable(alike.values())


def _module_at(path: str, modules: Collection[str]) -> str:
    """The path itself, or the innermost module around it: code may be reached by the name of a function."""
    while path and path not in modules:
        path = path.rpartition(".")[0]
    return path


def _sizes(
    plans: Sequence[tuple[str, Plan]], precision: PrecisionPlan | None, in_cuda_graphs: bool
) -> Iterator[str]:
    """Which calls run in TE's modules, at the width that most products have."""
    sites = [
        site for _, plan in plans for site in plan.sites if isinstance(site.fused, plain.LayerNormLinear)
    ]
    inside = precision is not None and None in precision.sites.values()
    gaining = [site for site in sites if inside or site.fused.gains]
    if in_cuda_graphs and not inside:
        return
    if not gaining or (precision and precision.small_calls):
        yield from [_AS_FAST] * bool(sites and not inside)
        return
    widths = Counter(value(site.node.args[site.fused.PRODUCTS[0]]).shape[1] for site in gaining)
    ((width, _),) = widths.most_common(1)
    where, least = "FP8" if inside else "TE's modules", break_even_rows(width, inside, in_cuda_graphs)
    yield (
        f"calls of {least:,} tokens and more run in {where} (width {width}), "
        "smaller ones in plain PyTorch, where they are faster"
    )
