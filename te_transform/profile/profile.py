"""The front door profile(): why a step is slow, by the model's modules."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from te_transform.backends.ranks import gathered
from te_transform.execution.attach import runner_of
from te_transform.graph.errors import message_of
from te_transform.graph.grouped import grouped
from te_transform.graph.inputs import Inputs, as_inputs
from te_transform.graph.keywords import suggests
from te_transform.graph.nodes import path_below
from te_transform.graph.preserve import ParametersWritten, one_at_a_time, same_random
from te_transform.inspect import inspect
from te_transform.plan.model import ModelError, check_module
from te_transform.plan.options import OptionError
from te_transform.profile.analysis import NS, Analysis
from te_transform.profile.classes import COMMUNICATION
from te_transform.profile.findings import findings
from te_transform.profile.result import Finding, Profile, RankTime, SiteTime
from te_transform.profile.steps import device_of, record
from te_transform.profile.trials import Replacements
from te_transform.report.places import listed
from te_transform.report.report import Report, fallback_notes
from te_transform.reporting import report as report_of

_EXCESS = 0.3  # of the step under the profiler, which a note tells
_STEPS_OF_TRIALS = 2.0  # the time limit of the trials, in steps


@suggests
@one_at_a_time
def profile(model: nn.Module, batch: Any = None, *, plan: bool = True) -> Profile:
    """Run a few steps of `model` and report what each part costs, and what slows it down.

    A step is a forward and, in training mode, a backward. The backward begins at the loss, or at a scalar of
    the outputs if there is no loss. The optimizer does not run. The model, its gradients, buffers, hooks,
    mode and the random state are restored. The profile takes the time of 6 to 10 steps and half a second;
    the plan of convert() is extra.

    With several ranks, call it on each rank. The result then also has the steps of all ranks.

    Args:
        model: Any module; it may be converted, compiled or wrapped. Its device and mode are kept.
        batch: A tensor, a tuple (args), a dict (kwargs), a list of those (a step each), or None to generate
            inputs.
        plan: True to add what convert() would fuse and refuse.

    Raises:
        te_transform.ModelError: `model` is not a module, or has lazy parameters, or parameters on the meta
            device, or its forward writes to parameters.
        te_transform.InputError: there are no inputs, and none can be generated.
        te_transform.OptionError: `plan` is not a bool, or a profiler runs already.
        te_transform.TraceError: the model fails on the batch.
    """
    _check_profile(model, plan)
    samples = as_inputs(model, batch)
    start = time.perf_counter()
    try:
        recording = record(model, samples)
    except ParametersWritten as error:
        raise ModelError(str(error)) from error
    analysis = Analysis(model, recording)
    seconds = statistics.median(recording.seconds)
    device = device_of(model)
    with same_random(model.parameters()):
        results = findings(analysis, Replacements(device, _STEPS_OF_TRIALS * seconds))
    classes = analysis.classes()
    profiled = Profile(
        type(model).__name__,
        torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "forward and backward" if recording.is_training else "forward",
        "; ".join(map(str, samples)),
        seconds,
        NS * analysis.total,
        time.perf_counter() - start,
        tuple(analysis.parts()),
        classes,
        results,
        ranks=_ranks(seconds, classes.get(COMMUNICATION, 0.0)),
        notes=tuple(_notes(model, analysis, results)),
    )
    return _add_plan(profiled, model, samples, analysis) if plan else profiled


def _check_profile(model: nn.Module, plan: bool) -> None:
    check_module(model, "profile")
    if not isinstance(plan, bool):
        raise OptionError(f"expected True or False for plan, got {plan!r}")
    if torch.autograd._profiler_enabled():
        raise OptionError("expected no profiler to run, got one; call profile() outside of torch.profiler")
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        raise ModelError(
            f"expected a model with memory, got a {type(model).__name__} with tensors on the meta device; "
            "move it by to_empty(device=...) and load its weights first, or plan it by te_transform.inspect()"
        )


def _notes(model: nn.Module, analysis: Analysis, found: tuple[Finding, ...]) -> Iterator[str]:
    if not analysis.recording.is_training:
        yield f"only the forward ran, because {_why_no_backward(model)} to profile a training step"
    excess = NS * analysis.total / statistics.median(analysis.recording.seconds) - 1
    if excess > _EXCESS:
        yield (
            f"the step under the profiler took {excess:.0%} longer than the others: rely on shares, and "
            "profile an idle machine and longer steps"
        )
    if analysis.recording.watch is None:
        yield "lines of code are not shown, because the model is compiled or converted"
    if not found:
        yield "no slow fallback was found"


def _why_no_backward(model: nn.Module) -> str:
    """Return why no backward ran, and what to do."""
    if not model.training:
        return "the model is in evaluation mode; call model.train()"
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return "no parameter requires a gradient; profile a model with trained parameters"
    return "no output requires a gradient; return the loss or tensors that lead to it"


def _ranks(seconds: float, exposed: float) -> tuple[RankTime, ...]:
    times = gathered((seconds, exposed))
    if len(times) == 1:
        return ()
    return tuple(RankTime(rank, *time) for rank, time in enumerate(times))


def _add_plan(profiled: Profile, model: nn.Module, samples: list[Inputs], analysis: Analysis) -> Profile:
    """Add the plan of convert(), or the report of a converted model."""
    try:
        path, planned = _planned(model)
        plan_report = inspect(planned, samples) if runner_of(planned) is None else report_of(planned)
    except Exception as error:  # convert() refuses models that can be profiled, such as wrapped ones
        why = " ".join(message_of(error).split())
        return replace(profiled, notes=(*profiled.notes, f"convert() is not planned: {why}"))
    return replace(
        profiled,
        sites=tuple(_sites(plan_report, path, analysis)),
        report=plan_report,
        notes=(*profiled.notes, *fallback_notes(plan_report.fallbacks)),
    )


def _planned(model: nn.Module) -> tuple[str, nn.Module]:
    """Return the path and the module that is converted, or that convert() would take."""
    converted = ((path, each) for path, each in model.named_modules() if runner_of(each) is not None)
    is_wrapped = isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel))
    return next(converted, ("module", model.module) if is_wrapped else ("", model))


def _sites(plan_report: Report, root: str, analysis: Analysis) -> Iterator[SiteTime]:
    """Yield the sites of a report on the module at the path `root`, with times."""
    groups = grouped(
        ((site.rule, site.status, site.reasons, site.inactive), path_below(root, site.path))
        for site in plan_report.sites
    )
    times = []
    for (rule, status, reasons, inactive), paths in groups.items():
        inside = set().union(*(analysis.under(path) for path in paths))
        seconds = NS * analysis.cost(inside)
        times.append(SiteTime(rule, status, listed(paths), len(paths), seconds, reasons, inactive))
    yield from sorted(times, key=lambda site: -site.seconds)
