"""Compose the report from the plan of each captured graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from torch import fx, nn

from te_transform.backends import plain
from te_transform.backends.limits import DTYPES, break_even_rows
from te_transform.graph.edit import snapshot
from te_transform.graph.grouped import grouped
from te_transform.graph.nodes import path_below, value
from te_transform.graph.pattern import spelled_as, targets_of, within
from te_transform.plan import cost, memory
from te_transform.plan.active import AS_FAST, why_inactive
from te_transform.plan.assign import product_paths
from te_transform.plan.match import Plan
from te_transform.plan.options import Options
from te_transform.plan.overview import overview_of
from te_transform.plan.precision_plan import PrecisionPlan
from te_transform.plan.quantized_modules import quantized_modules
from te_transform.plan.rule import Outcome
from te_transform.report.drawing import Part
from te_transform.report.graph_breaks import explain_graphs
from te_transform.report.places import listed
from te_transform.report.report import Report

_COMPILED_NOTE = (
    "compiled: inductor fuses norms and activations itself; attention and FP8 matrix products run in the "
    "backend's kernels"
)
_REPLAYED = "calls run as CUDA graphs, from the third call with the same shapes and mode"
_FLOAT32_NOTE = "the example call multiplies in float32: products run in FP8 only under torch.autocast"


def compose(
    model: nn.Module,
    plans: Sequence[tuple[str, Plan]],
    options: Options,
    precision: PrecisionPlan | None,
    inputs: str = "",
    notes: Iterable[str] = (),
    reasons: Mapping[str, str] | None = None,
) -> Report:
    """Compose the report of a conversion, or of a planned conversion.

    Args:
        plans: the plans of the captured graphs in call order, each with the path of the captured module (""
            for the whole model). A graph that several blocks share appears once per block.
        inputs: a description of the example inputs; if given, the memory of a step is predicted for them.
        notes: additional sentences.
        reasons: dynamo's reasons for code that it does not capture, each with the function that it traced.
    """
    has_kernels, compiled = options.backend.HAS_KERNELS, bool(options.compile)
    by_size = has_kernels and (precision is not None or not compiled)
    wide = precision is not None and None in precision.sites.values() and _multiplies_wide(plans)
    inside = None if wide else precision
    predicted = inputs and has_kernels and not compiled
    by_graph = [tuple(_completed(path, plan, options, inside, model.training)) for path, plan in plans]
    outcomes = tuple(_outcomes(by_graph, {path for path, _ in model.named_modules()}))
    priced = any(outcome.seconds is not None for own in by_graph for outcome in own)
    step = memory.predict(plans, model.parameters(), inputs, inside) if predicted else None
    parts = tuple(_report_parts(plans))  # after `by_graph`, which writes each site's outcome to its node
    largest = max(parts, key=lambda part: len(part.after.nodes), default=Part((), fx.Graph(), fx.Graph()))
    captured = [(path, plan.captured) for path, plan in plans]
    return Report(
        type(model).__name__,
        outcomes,
        largest.before,
        largest.after,
        (
            options.backend_reason,
            *(_call_sizes(plans, precision, options.in_cuda_graphs) if by_size else ()),
            *([_COMPILED_NOTE] if compiled else ()),
            *([_REPLAYED] if options.graphs else ()),
            *([_FLOAT32_NOTE] if wide else ()),
            *(_outside_recipe(plans) if precision is not None else ()),
            *([cost.NOTE] if priced else ()),
            *memory.room(model, step),
            *_unmatched_rules(plans, options),
            *_quantized_weights(model),
            *_no_gain(plans, outcomes, options, by_size or compiled),
            *notes,
        ),
        tuple(explain_graphs(captured, reasons, "forward" in vars(model))),
        precision,
        memory=step,
        options=options.asked(),
        inputs=inputs,
        parts=parts,
        rules=tuple(rule.name for rule in options.passes),
        overview=overview_of(plans, options, inside, model.training, model.parameters(), step),
    )


def _report_parts(plans: Iterable[tuple[str, Plan]]) -> Iterator[Part]:
    """Yield each graph once, with the paths of all modules that share it."""
    for several in grouped((plan.captured, (path, plan)) for path, plan in plans).values():
        plan = several[0][1]
        yield Part(tuple(path for path, _ in several), plan.before, snapshot(plan.canonical))


def _unmatched_rules(plans: Sequence[tuple[str, Plan]], options: Options) -> Iterator[str]:
    """Yield a note for each unmatched rule that an option of its name asks for, or that can match nothing.

    The pattern of the latter has functions that canonical graphs lack.
    """
    matched = {outcome.rule for _, plan in plans for outcome in plan.outcomes}
    for rule in (rule for rule in options.passes if plans and rule.name not in matched):
        if rule.requires and getattr(options, rule.name, False):
            yield f"{rule.name}=True has no effect on these calls: the rule needs {rule.requires}"
        targets = (target for part in within(rule.pattern) for target in targets_of(part))
        twins = {target: twin for target in targets if (twin := spelled_as(target)) is not None}
        for target, twin in twins.items():
            yield (
                f"nothing resembles the pattern of the rule {rule.name!r}: patterns match "
                f"ops.{twin.__name__}, not {target.__name__}; use ops.{twin.__name__} from te_transform.rules"
            )


def _quantized_weights(model: nn.Module) -> Iterator[str]:
    """Yield a note on the modules whose weights are quantized."""
    for what, paths in quantized_modules(model).items():
        yield (
            f"weights are quantized ({what}) in {listed(paths)}, so their products are not fused: dequantize "
            "the weights before convert() to fuse them"
        )


def _no_gain(
    plans: Sequence[tuple[str, Plan]], outcomes: Sequence[Outcome], options: Options, is_faster: bool
) -> Iterator[str]:
    """Yield a note if the model gains nothing; `is_faster`: even single products gain (kernels, compile)."""
    sites = [site for _, plan in plans for site in plan.sites]
    fused = [outcome for outcome in outcomes if outcome.status == "fused"]
    if plans and not sites:
        yield (
            "nothing fused: every site that resembles the pattern of a rule is refused, see the reasons"
            if any(plan.outcomes for _, plan in plans)
            else "nothing fused: no operations of the model resemble the pattern of a rule"
        )
    elif sites and not is_faster and all(type(site.fused) is plain.Linear for site in sites):
        yield "no speedup: only single products are fused, and this backend runs them like the model"
    elif fused and not options.compile and all(outcome.inactive for outcome in fused):
        steps = ", compile=True or a recipe" if options.recipe is None else " or compile=True"
        yield (
            "no speedup in a call of these sizes, so the model runs as captured: try larger example inputs"
            f"{steps}"
        )


def _outside_recipe(plans: Sequence[tuple[str, Plan]]) -> Iterable[str]:
    """Return the notes of fused ops that compute products outside of the recipe."""
    notes = (site.fused.OUTSIDE_RECIPE for _, plan in plans for site in plan.sites)
    return dict.fromkeys(filter(None, notes))


def _multiplies_wide(plans: Sequence[tuple[str, Plan]]) -> bool:
    """Return True if all fused products return more than 16 bits; recipes do not apply to these."""
    return all(
        value(site.result).dtype not in DTYPES for _, plan in plans for site in plan.sites if site.weights
    )


def _completed(
    path: str, plan: Plan, options: Options, precision: PrecisionPlan | None, training: bool
) -> Iterator[Outcome]:
    """Yield the outcomes of one graph, with the known numbers of each site.

    Each outcome is also stored in the `meta` of its fused op's node, for the drawings.
    """
    unknown = cost.unknown([(path, plan)], options)
    priced = plan.outcomes if unknown else cost.priced(path, plan, options, precision, training)
    products = product_paths(plan)
    keeps = options.backend.HAS_KERNELS and training and not options.compile
    kept = memory.kept_by_site(path, plan, precision) if keeps else {}
    inactive = why_inactive(path, plan, options, precision)
    for (_, site), outcome, why in zip(plan.outcomes_with_sites(), priced, inactive, strict=True):
        outcome = replace(outcome, inactive=why)
        if site is not None:
            name = products.get(site)
            text = "" if precision is None or name is None else precision.told(path_below(path, name))
            outcome = replace(outcome, kept=kept.get(site), precision=text, deviations=site.deviations)
            site.node.meta["outcome"] = outcome
        yield outcome.below(path)


def _outcomes(by_graph: Iterable[Iterable[Outcome]], modules: Collection[str]) -> Iterator[Outcome]:
    """Return the outcomes of all graphs; equal sites in several graphs of one module count once.

    A module has several graphs if it was captured for several sizes.
    """
    alike: dict[Outcome, list[Outcome]] = {}
    for outcomes in by_graph:
        named = [replace(outcome, path=_module_at(outcome.path, modules)) for outcome in outcomes]
        own = grouped((outcome, outcome) for outcome in named)
        alike |= {key: each for key, each in own.items() if len(each) > len(alike.get(key, ()))}
    return chain.from_iterable(alike.values())


def _module_at(path: str, modules: Collection[str]) -> str:
    """Return the path if it is a module's path, else the path of the innermost module around it.

    The path of a call may end in the name of a function.
    """
    while path and path not in modules:
        path = path.rpartition(".")[0]
    return path


def _call_sizes(
    plans: Sequence[tuple[str, Plan]], precision: PrecisionPlan | None, in_cuda_graphs: bool
) -> Iterator[str]:
    """Yield a note on the call sizes that run in TE's modules, for the most common width."""
    sites = [
        site for _, plan in plans for site in plan.sites if isinstance(site.fused, plain.LayerNormLinear)
    ]
    inside = precision is not None and None in precision.sites.values()
    gaining = [site for site in sites if inside or site.fused.gains]
    if in_cuda_graphs and not inside:
        return
    if not gaining or (precision and precision.small_calls):
        yield from [f"products run as captured: {AS_FAST}"] * bool(sites and not inside)
        return
    widths = Counter(value(site.node.args[site.fused.PRODUCTS[0]]).shape[1] for site in gaining)
    ((width, _),) = widths.most_common(1)
    where, least = "FP8" if inside else "TE's modules", break_even_rows(width, inside, in_cuda_graphs)
    yield (
        f"calls with {least:,} or more tokens run in {where} (width {width}); smaller calls run in plain "
        "PyTorch, which is faster for them"
    )
