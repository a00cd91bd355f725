"""The front door inspect(): plan a conversion, and predict its times, without a GPU or memory for weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import nn

from te_transform.execution import timing
from te_transform.execution.attach import attach, detach
from te_transform.execution.first_calls import FirstGraphs, raises_captured, watched_calls
from te_transform.execution.runner import Runner
from te_transform.execution.timing import Timing
from te_transform.graph.fake import ways_to_call
from te_transform.graph.inputs import Inputs, TraceError, as_inputs
from te_transform.graph.preserve import one_at_a_time, preserved
from te_transform.pipeline import PIPELINE
from te_transform.plan import cost
from te_transform.plan.match import Plan
from te_transform.plan.model import check_model
from te_transform.plan.options import Options, check_skip
from te_transform.plan.precision_plan import PrecisionPlan
from te_transform.report.report import Report
from te_transform.reporting import reported


@one_at_a_time
def inspect(model: nn.Module, example_inputs: Any = None, **options: Any) -> Report:
    """Report what convert() would do with the same arguments, and why it would leave the rest alone.

    Neither a GPU nor Transformer Engine is needed. The model stays unchanged. The forward is captured on fake
    tensors, which need no memory; only a forward that branches on values runs on real tensors.

    Raises:
        ModelError, InputError, OptionError, TraceError: see convert().
    """
    asked, sample = _asked(model, example_inputs, options)
    is_auto = asked.compile == "auto"
    planned, seen = _plan_model(model, replace(asked, compile=False) if is_auto else asked, sample)
    result, plans = reported(model, planned, seen, sample), list(seen.plans())
    if not is_auto:
        notes_on_time = _predicted_call(plans, asked, result.precision, model.training)
        return replace(result, notes=(*result.notes, *notes_on_time))
    timings = _predicted(plans, asked.ways(planning=True), result.precision, model.training)
    best = timing.fastest(timings)
    notes = result.notes if best is None or cost.NOTE in result.notes else (*result.notes, cost.NOTE)
    return replace(result, timings=tuple(timings), chosen="" if best is None else best.name, notes=notes)


def _predicted_call(
    plans: list[tuple[str, Plan]],
    options: Options,
    precision: PrecisionPlan | None,
    training: bool,
) -> Iterator[str]:
    """Yield a sentence on the predicted time of a call with these options, or why there is no prediction."""
    why = cost.unknown(plans, options)
    if why and plans and options.backend.HAS_KERNELS:
        yield f"no time is predicted for a call, times are {why}"
    elif why is None:
        fused = cost.predicted_seconds(plans, options, precision, training)
        before = cost.predicted_seconds(plans, replace(options, run_original=True), None, training)
        mode = "forward and backward" if training else "forward"
        taken, unfused = timing.duration(fused), timing.duration(before)
        yield f"a call is predicted to take {taken} on an H100, {unfused} unfused ({mode})"


def _predicted(
    plans: list[tuple[str, Plan]],
    ways: Mapping[str, Options],
    precision: PrecisionPlan | None,
    training: bool,
) -> list[Timing]:
    """Return the predicted time of a call for each candidate, if known."""
    timings = []
    for name, options in ways.items():
        why = cost.unknown(plans, options)
        inside = precision if options.recipe is not None else None
        seconds = None if why else cost.predicted_seconds(plans, options, inside, training)
        timings.append(Timing(name, seconds, why or "predicted"))
    return timings


def plans_of(
    model: nn.Module, example_inputs: Any, **options: Any
) -> tuple[list[tuple[str, Plan]], PrecisionPlan | None]:
    """Return the plan of inspect() for each captured graph of the forward, and the precision plan."""
    asked, sample = _asked(model, example_inputs, options)
    planned, seen = _plan_model(model, asked, sample)
    return list(seen.plans()), reported(model, planned, seen, sample).precision


def _asked(model: nn.Module, example_inputs: Any, options: dict[str, Any]) -> tuple[Options, Inputs]:
    check_model(model, "inspect")
    asked = Options.of(model, PIPELINE, planning=True, **options)
    check_skip(asked.skip, model)
    return asked, as_inputs(model, example_inputs)[0]


def _plan_model(model: nn.Module, options: Options, sample: Inputs) -> tuple[Runner, FirstGraphs]:
    """Capture the forward, without memory unless the forward branches on values."""
    for tensors in ways_to_call(model):
        planned = Runner(options)
        try:
            return planned, _dry_call(model, planned, sample, tensors)
        except TraceError as error:
            failed = error
    with suppress(Exception), preserved(model), tensors(model, sample.clone()) as (args, kwargs):
        model.train()(*args, **kwargs)
        planned.material.notes.append(raises_captured(failed.__cause__ or failed))
        return planned, FirstGraphs()
    raise failed


def _dry_call(model: nn.Module, planned: Runner, sample: Inputs, tensors: Callable[..., Any]) -> FirstGraphs:
    """Capture the forward in training mode; nothing is fused."""
    with preserved(model), watched_calls(planned, model) as seen:
        attach(model, planned)
        try:
            with tensors(model, sample.clone()) as (args, kwargs):
                seen.name_parameters(model)
                model.train()(*args, **kwargs)
                if planned.policy.by_block:  # known only after a first call
                    model(*args, **kwargs)
        except Exception as error:
            raise TraceError.of(model, sample, error) from error
        finally:
            detach(model)
    return seen
