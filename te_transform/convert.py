"""capture -> canonicalize -> match -> rewrite -> precision -> lower -> report: the whole of te_transform, on one line."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo
from torch import fx, nn
from torch._dynamo.utils import counters

from te_transform.backends.joined import lay
from te_transform.graph.capture import capture, on_fake_tensors
from te_transform.graph.inputs import Inputs, TraceError, as_inputs
from te_transform.graph.preserve import preserved
from te_transform.passes import PIPELINE
from te_transform.plan.model import ModelError, check_model
from te_transform.plan.options import Options
from te_transform.report.console import progress
from te_transform.report.report import Report
from te_transform.runtime.captured import CapturedGraph
from te_transform.runtime.converted import (
    DEEP,
    Converted,
    blocks,
    converted_of,
    enter,
    leave,
)
from te_transform.verify.check import check_sites

log = logging.getLogger(__name__)


def convert(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    backend: str = "auto",
    recipe: Any = None,
    passes: Any = None,
    skip: Any = (),
    approximate: bool = False,
    compile: bool | str = False,
    inplace: bool = False,
    verify: bool = True,
) -> nn.Module:
    """The same model on fused ops: same class, same parameters, same answers.

    Args:
        model: any transformer in plain PyTorch; left untouched unless `inplace`.
        example_inputs: a tensor, a tuple (args), a dict (kwargs) or a list of those, as a plain model(...)
            takes them; None: invented where the model says what it reads.
        backend: "te", "torch", or "auto": te where it runs, else torch; the report says which and why.
        recipe: None, "fp8-delayed", "fp8-current", "fp8-block", "mxfp8" or a TE recipe object.
        passes: the rules to run, in order; None is te_transform.PIPELINE.
        skip: module paths or globs left alone, with all they contain.
        approximate: allow rules that change the numbers (the exact GELU becomes the tanh one).
        compile: False, True or a torch.compile mode: compile the converted model.
        inplace: convert `model` itself.
        verify: check every rewritten site against what was captured, forward and gradients, on the values of the
            first call of its graph; a site that fails is taken back and reported.

    Returns:
        The converted model, an instance of the original class, with the user's own modules, parameters and names.
        te_transform.report() tells what was done and why not.

    Raises:
        ModelError: this is no model that can be converted (a ScriptModule, a DDP wrapper, ...).
        InputError, OptionError, BackendError, TraceError: as their messages say.
        Whatever is raised, `model` is bitwise what it was.
    """
    check_model(model)
    options = Options.of(
        model,
        PIPELINE,
        backend=backend,
        passes=passes,
        recipe=recipe,
        skip=skip,
        approximate=approximate,
        compile=compile,
        inplace=inplace,
        verify=verify,
    )
    options.check_skip(model)
    samples = as_inputs(model, example_inputs)
    made = model if inplace else _copy(model)
    converted = Converted(options, len(blocks(made)) > DEEP, check_sites if verify else None)
    try:
        enter(made, converted)
        seen = _first_calls(made, converted, samples, None if inplace else model)
        for group in progress(seen.groups, "laying parameters next to each other"):
            lay(group)
        converted.report = _report(made, converted, seen)
        log.info("%s", converted.report)
        if compile:
            made.compile(mode=None if compile is True else compile)
    except BaseException:
        made.__dict__.pop("_compiled_call_impl", None)
        leave(made)
        raise
    return made


@dataclass
class _Seen:
    """The captured graphs that ran in the first calls, with the path of the module that each call was of."""

    graphs: dict[tuple[str, CapturedGraph], None] = field(default_factory=dict)
    groups: dict[tuple[nn.Parameter, ...], None] = field(default_factory=dict)
    breaks: list[str] = field(default_factory=list)


def _first_calls(model: nn.Module, converted: Converted, samples: Sequence[Inputs], original: nn.Module | None) -> _Seen:
    """Capture the forward in training mode, by calling the model on its example inputs; it is left as it was."""
    others = set() if original is None else set(map(id, original.parameters()))

    def check_own(arguments: Sequence[Any]) -> None:
        if any(id(argument) in others for argument in arguments):
            raise ModelError(
                f"the forward of {type(model).__name__} reads parameters through a function that the copy shares "
                "with the original, they would not be the copy's own: pass inplace=True"
            )

    trainable = not any(parameter.is_inference() for parameter in model.parameters())
    with _watched(converted, model, check_own) as seen, preserved(model, original), torch.set_grad_enabled(trainable):
        for sample in progress(samples, "capturing"):
            _call(model.train(), sample)
    return seen


@contextmanager
def _watched(
    converted: Converted, model: nn.Module, see: Callable[[Sequence[Any]], None] = lambda arguments: None
) -> Iterator[_Seen]:
    """What is captured, and called, meanwhile."""
    seen = _Seen()
    names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}

    def watch(graph: CapturedGraph, arguments: Sequence[Any]) -> None:
        see(arguments)
        seen.graphs[graph.path_in(names, arguments), graph] = None
        seen.groups |= dict.fromkeys(graph.groups(arguments))

    before = dict(counters["graph_break"])
    converted.watch = watch
    try:
        yield seen
    finally:
        converted.watch = None
    seen.breaks = [
        reason for reason, count in counters["graph_break"].items() if count > before.get(reason, 0)
    ]


def _call(model: nn.Module, sample: Inputs) -> None:
    args, kwargs = sample.clone()
    try:
        model(*args, **kwargs)
    except ModelError:
        raise
    except Exception as error:
        raise TraceError.of(model, sample, error) from error


def _report(model: nn.Module, converted: Converted, seen: _Seen) -> Report:
    outcomes = [outcome.below(path) for path, graph in seen.graphs for outcome in graph.plan.outcomes]
    graphs = [graph for _, graph in seen.graphs]
    largest = max(graphs, key=lambda graph: len(graph.plan.canonical.nodes), default=None)
    empty = fx.Graph()
    before, after = (largest.plan.before, largest.plan.canonical) if largest else (empty, empty)
    notes = (converted.options.backend_reason, *converted.failures, *seen.breaks)
    return Report(type(model).__name__, tuple(dict.fromkeys(outcomes)), before, after, notes)


def inspect(model: nn.Module, example_inputs: Any = None, **options: Any) -> Report:
    """What convert() would do with the same arguments, and why not more, found out on fake tensors: nothing of the
    model runs or is changed, and no GPU and no Transformer Engine is needed.

    Raises:
        ModelError, InputError, OptionError, TraceError: as convert() does.
    """
    check_model(model)
    chosen = Options.of(model, PIPELINE, planning=True, **options)
    chosen.check_skip(model)
    sample = as_inputs(model, example_inputs)[0]
    planned = Converted(chosen, dry=True)
    with _watched(planned, model) as seen, preserved(model):
        model.train()
        try:
            with on_fake_tensors(model, sample) as (args, kwargs):
                capture(type(model).forward, planned.backend)(model, *args, **kwargs)
        except Exception as error:
            raise TraceError.of(model, sample, error) from error
    return _report(model, planned, seen)


def report(converted: nn.Module) -> Report:
    """What convert() did to this model: sites fused and refused, with reasons, and the graphs before and after.

    Raises:
        ModelError: `converted` does not come from te_transform.convert().
    """
    found = converted_of(converted) if isinstance(converted, nn.Module) else None
    if found is None:
        raise ModelError(
            f"{type(converted).__name__} has no report, te_transform.convert() returns a model that has one"
        )
    return found.report


def revert(converted: nn.Module) -> nn.Module:
    """Take the captured forward off again; modules, parameters and what they hold were never changed."""
    leave(converted)
    return converted


def te_transform(
    captured: fx.GraphModule, example_inputs: Sequence[Any], **options: Any
) -> Callable[..., Any]:
    """The backend behind `torch.compile(model, backend="te_transform", options={...})`; see convert() for options.

    Nothing is laid out, checked or reported beforehand: that is what convert() is for.

    Raises:
        OptionError: an option has a value that it cannot have.
    """
    held = nn.ParameterList([value for value in example_inputs if isinstance(value, nn.Parameter)])
    return Converted(Options.of(held, PIPELINE, **(options.get("options") or {}))).backend(
        captured, example_inputs
    )


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}), a copy is needed to "
            "leave the original untouched: pass inplace=True"
        ) from error
