"""The front door report(): what was fused in a converted model, and why the rest was left alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import nn

from te_transform.execution.attach import runner_of
from te_transform.execution.blocks import blocks
from te_transform.execution.first_calls import FirstGraphs
from te_transform.execution.runner import Runner
from te_transform.graph.inputs import Inputs
from te_transform.plan.assign import assign
from te_transform.plan.model import ModelError
from te_transform.report.compose import compose
from te_transform.report.graph_breaks import SET_ON_MODEL, explain_breaks
from te_transform.report.report import Report

_SET_ON_MODEL = f"{SET_ON_MODEL}it runs unchanged and calls captured modules"


def report(converted: nn.Module) -> Report:
    """Return the report of a conversion: fused and refused sites, with reasons, and the graphs.

    Raises:
        ModelError: `converted` does not come from te_transform.convert().
    """
    runner = runner_of(converted) if isinstance(converted, nn.Module) else None
    if runner is None:
        parts = converted.named_modules() if isinstance(converted, nn.Module) else ()
        inside = next((path for path, part in parts if runner_of(part) is not None), None)
        raise ModelError(
            f"expected a model returned by te_transform.convert(), got a {type(converted).__name__} without "
            "report" + (f"; pass its .{inside}" if inside else "")
        )
    material = runner.material
    if material.next_call:
        material.report = _report_of_next_call(converted, runner)
        material.next_call = None
    graphs, notes = runner.graphs, material.report.notes
    plain = sum((site.fused.plain_calls for graph in graphs for site in graph.plan.sites), Counter())
    plain += runner.user_code.calls
    fallbacks = sum((graph.fallback_sentences() for graph in graphs), Counter())
    later = [note for note in material.notes if note not in notes]
    if runner.division is not None:
        later += runner.division.sentences()
    # calls with other sizes than the examples may add graph breaks
    broken = explain_breaks((graph.captured for graph in graphs), material.breaks)
    breaks = tuple(dict.fromkeys((*material.report.breaks, *broken)))
    counted = {"plain_calls": plain, "fallbacks": fallbacks}
    return replace(material.report, **counted, notes=(*notes, *later), breaks=breaks)


def _report_of_next_call(model: nn.Module, runner: Runner) -> Report:
    """Return the report of the first call, if the conversion captured nothing or chose another backend.

    The memory of a step stays what was predicted for the example inputs, in training mode.
    """
    old, options = runner.material.report, runner.options
    layers = set(map(id, blocks(model)))
    plans = [
        (path, graph.plan)
        for graph in runner.material.next_call
        for number, path in enumerate(graph.plan.modules)
        if number == 0 or id(model.get_submodule(path)) in layers  # count other modules once
    ]
    precision = None
    if options.recipe is not None:
        precision = assign(plans, options.recipe, options.backend, products_around(model, []))
    new = compose(model, plans, options, precision, notes=runner.material.notes)
    return replace(new, memory=old.memory, timings=old.timings, chosen=old.chosen, inputs=old.inputs)


def reported(model: nn.Module, runner: Runner, seen: FirstGraphs, sample: Inputs) -> Report:
    options, plans = runner.options, list(seen.plans())
    precision = None
    if options.recipe is not None:
        # the graphs around blocks have the model's path, but do not cover the whole model
        others = products_around(model, [path for path, _ in plans if path or not runner.policy.by_block])
        precision = assign(plans, options.recipe, options.backend, others)
    if plans and "forward" in vars(model) and not runner.material.was_called:
        runner.tell(_SET_ON_MODEL)
    return compose(
        model, plans, options, precision, str(sample), runner.material.notes, runner.material.breaks
    )


def products_around(model: nn.Module, captured: Iterable[str]) -> Iterator[str]:
    """Yield the paths of modules with a weight matrix outside all `captured` modules ("": whole model)."""
    inside = tuple(f"{path}." if path else "" for path in captured)
    for path, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.dim() != 2 or isinstance(module, nn.Embedding):
            continue
        if not path.startswith(inside):
            yield path
