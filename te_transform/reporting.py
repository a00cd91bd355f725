"""report(): what was done to a converted model, and why not more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import nn

from te_transform.graph.inputs import Inputs
from te_transform.plan.assign import assign
from te_transform.plan.model import ModelError
from te_transform.report.compose import compose
from te_transform.report.explain import SET_ON_MODEL, divided, explain_breaks
from te_transform.report.report import Report
from te_transform.runtime.blocks import blocks
from te_transform.runtime.converted import Converted, converted_of
from te_transform.runtime.first_calls import Seen
from te_transform.runtime.trials import TOLD

_SET_ON_MODEL = f"{SET_ON_MODEL}it runs as it is, with parts that are captured"


def report(converted: nn.Module) -> Report:
    """What convert() did to this model: sites fused and refused, with reasons, and the graphs before and
    after.

    Raises:
        ModelError: `converted` does not come from te_transform.convert().
    """
    found = converted_of(converted) if isinstance(converted, nn.Module) else None
    if found is None:
        parts = converted.named_modules() if isinstance(converted, nn.Module) else ()
        inside = next((path for path, part in parts if converted_of(part) is not None), None)
        raise ModelError(
            f"{type(converted).__name__} has no report, te_transform.convert() returns a model that has one"
            + (f": pass its .{inside}" if inside else "")
        )
    if found.whole:
        found.report = _report_of_whole(converted, found)
        found.whole = None
    graphs, told = found.graphs, found.report.notes
    plain = sum((site.fused.plain_calls for graph in graphs for site in graph.plan.sites), Counter())
    plain += Counter({TOLD: found.trials.own_calls})
    fallbacks = sum((graph.fallbacks_told() for graph in graphs), Counter())
    later = [note for note in found.failures if note not in told]
    if found.parallel is not None:
        later += divided(found.parallel.places, found.parallel.ranks.count)
    # sizes that vary may break what the examples' did not
    broken = explain_breaks((graph.captured for graph in graphs), found.reasons)
    breaks = tuple(dict.fromkeys((*found.report.breaks, *broken)))
    return replace(found.report, plain_calls=plain, fallbacks=fallbacks, notes=(*told, *later), breaks=breaks)


def _report_of_whole(model: nn.Module, converted: Converted) -> Report:
    """Return the report of the first call, if the conversion captured nothing or chose another backend.

    The memory of a step stays what was predicted for the example inputs, in training mode.
    """
    told, options = converted.report, converted.options
    layers = set(map(id, blocks(model)))
    plans = [
        (path, graph.plan)
        for graph in converted.whole
        for number, path in enumerate(graph.plan.modules)
        if number == 0 or id(model.get_submodule(path)) in layers  # what else runs it, nobody knows
    ]
    precision = None
    if options.recipe is not None:
        precision = assign(plans, options.recipe, options.backend, products_around(model, []))
    made = compose(model, plans, options, precision, notes=converted.failures)
    return replace(made, memory=told.memory, timings=told.timings, chosen=told.chosen, inputs=told.inputs)


def reported(model: nn.Module, converted: Converted, seen: Seen, sample: Inputs) -> Report:
    options, plans = converted.options, list(seen.plans())
    precision = None
    if options.recipe is not None:
        # graphs of what is around blocks are the model's, and not all of it
        others = products_around(model, [path for path, _ in plans if path or not converted.by_block])
        precision = assign(plans, options.recipe, options.backend, others)
    if plans and "forward" in vars(model) and not converted.entered:
        converted.tell(_SET_ON_MODEL)
    return compose(model, plans, options, precision, str(sample), converted.failures, converted.reasons)


def products_around(model: nn.Module, captured: Iterable[str]) -> Iterator[str]:
    """The modules with a matrix of weights that lie in none of the captured ones; "" is the whole model."""
    inside = tuple(f"{path}." if path else "" for path in captured)
    for path, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.dim() != 2 or isinstance(module, nn.Embedding):
            continue
        if not path.startswith(inside):
            yield path
