"""capture -> canonicalize -> match -> rewrite -> precision -> lower -> report: the whole of te_transform, on
one line."""

from __future__ import annotations

import copy
import gc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from te_transform.backends.joined import make_adjacent
from te_transform.backends.quantized import is_quantized
from te_transform.execution import timing
from te_transform.execution.calibrate import calibrate
from te_transform.execution.classes import give_classes_back
from te_transform.execution.console import in_a_line, progress
from te_transform.execution.first_calls import Seen, fails_captured, first_calls, traced_otherwise
from te_transform.execution.precision import Precision
from te_transform.execution.runner import Runner, attach, detach, runner_of
from te_transform.execution.timing import Timing
from te_transform.graph.inputs import InputError, Inputs, TraceError, as_inputs
from te_transform.graph.keywords import suggests
from te_transform.graph.preserve import one_at_a_time, same_random
from te_transform.graph.state_snapshot import noted
from te_transform.passes import PIPELINE
from te_transform.plan.assign import products_in
from te_transform.plan.model import CONVERTED, ModelError, check_model, check_module
from te_transform.plan.options import OptionError, Options, check_skip
from te_transform.quantize import dequantize_weights
from te_transform.reporting import reported
from te_transform.verify.check import check_sites

log = logging.getLogger(__name__)


@suggests
@one_at_a_time
def convert(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    backend: str = "auto",
    recipe: Any = None,
    passes: Any = None,
    skip: Any = (),
    approximate: bool = False,
    pad_vocabulary: bool = False,
    chunked_loss: bool = False,
    compile: bool | str = False,
    graphs: bool = False,
    inplace: bool = False,
    verify: bool = True,
) -> nn.Module:
    """The same model on fused ops: same class, same parameters, same answers.

    Args:
        model: any transformer in plain PyTorch; left untouched unless `inplace`.
        example_inputs: a tensor, a tuple (args), a dict (kwargs) or a list of those, as a plain model(...)
            takes them; None: invented where the model says what it reads.
        backend: "te", "torch", or "auto": te where it runs, else torch, until the model is captured where te
            runs, as on a GPU that it has been moved to; the report says which and why.
        recipe: None, "fp8-delayed", "fp8-current", "fp8-block", "mxfp8" or a TE recipe object.
        passes: the rules to run, in order; None is te_transform.PIPELINE.
        skip: module paths or globs left alone, with all they contain.
        approximate: allow rules that change the numbers (the exact GELU becomes the tanh one); in float32,
            whose bounds that is beyond, with verify=False.
        pad_vocabulary: on a GPU, compute the product of a head whose vocabulary is no multiple of 8 with rows
            of zeros, up to a multiple of 64, several times as fast; logits and parameters keep their sizes.
        chunked_loss: where a loss with gradients is computed, never hold its logits in memory, nor their
            gradient: head and loss are computed for a part of the vocabulary at a time, the head a second
            time in the backward. The logits that the model returns beside such a loss are NaN.
        compile: False, True or a torch.compile mode: inductor compiles the fused graphs, each at its first
            call. "auto" takes the fastest way on the first example inputs, in the mode that the model is in:
            its own code, fused, compiled, as CUDA graphs, each with the recipe, if one is given, and without.
            They are timed for five minutes at most; a file keeps what was found.
        graphs: run forward and backward as CUDA graphs, which are recorded in the third call of a kind, and
            held there to what the call itself computes; alone, or with compile=True.
        inplace: convert `model` itself.
        verify: check every rewritten site against what was captured, forward and gradients, on the values of
            the first call of its graph; a site that fails is taken back and reported.

    Returns:
        The converted model, an instance of the original class, with the user's own modules, parameters and
        names. te_transform.report() tells what was done and why not.

    Raises:
        ModelError: this is no model that can be converted (a ScriptModule, a DDP wrapper, ...).
        InputError, OptionError, BackendError, TraceError: as their messages say. Whatever is raised, `model`
            is bitwise what it was.
    """
    check_model(model, "convert")
    options = Options.of(
        model,
        PIPELINE,
        backend=backend,
        passes=passes,
        recipe=recipe,
        skip=skip,
        approximate=approximate,
        pad_vocabulary=pad_vocabulary,
        chunked_loss=chunked_loss,
        compile=compile,
        graphs=graphs,
        inplace=inplace,
        verify=verify,
    )
    check_skip(options.skip, model)
    samples = as_inputs(model, example_inputs)
    if compile == "auto" and samples[0].invented:
        raise InputError(
            "compile is 'auto', which times calls on the example inputs, and none were given: pass "
            "example_inputs of the sizes that the model is going to run on"
        )
    made, original = (model, None) if inplace else (_copy(model), model)
    return (_fastest if compile == "auto" else _convert)(made, original, options, samples)


def _convert(
    made: nn.Module, original: nn.Module | None, options: Options, samples: Sequence[Inputs]
) -> nn.Module:
    """Convert `made` itself, which may be a copy of an original; what is raised leaves it as it was."""
    runner = Runner(options, check_sites if options.verify else None)
    try:
        _capture_and_report(made, original, runner, samples)
        return made
    except BaseException:
        detach(made)
        raise


def _capture_and_report(
    made: nn.Module, original: nn.Module | None, runner: Runner, samples: Sequence[Inputs]
) -> None:
    attach(made, runner)
    seen, why = Seen(), None
    try:
        seen = first_calls(made, runner, samples, original)
        if runner.policy.by_block:  # which only a first call can show
            seen = first_calls(made, runner, samples, original)
    except TraceError as error:
        why = fails_captured(made, samples, original, error)
    if runner.captures.checker is not None and why is None:
        why = traced_otherwise(made, seen.outputs, samples[0], original)
    if why is not None:
        runner.material.notes.append(why)
        runner.options = replace(runner.options, run_original=True)
        seen.graphs.clear()
        seen.groups.clear()
    seen.outputs.clear()
    options = runner.options
    if not (seen.graphs or options.run_original):  # dynamo was switched off meanwhile, for example
        runner.material.next_call = []
    if options.run_original:
        give_classes_back(made)
    runner.material.report = reported(made, runner, seen, samples[0])
    # from here on nothing is refused any more: a model that is refused stays where it lay
    joins = not options.compile or options.recipe is not None  # compiled, products in FP8 alone
    groups = progress(tuple(seen.groups) * joins, "laying parameters next to each other")
    if held := [group for group in groups if not make_adjacent(group)]:
        # dynamo's exceptions, as of what ends a graph, have frames that hold the outputs of the first call
        # still, in a circle, and these what their backward would read
        gc.collect()
        runner.note_scattered(made, [group for group in held if not make_adjacent(group)])
    if options.recipe is not None and not options.run_original:
        _enter_recipe(made, runner, seen, samples)
    for graph in runner.graphs:
        graph.count_anew()
    log.info("%s", runner.material.report)


def _fastest(
    made: nn.Module, original: nn.Module | None, options: Options, samples: Sequence[Inputs]
) -> nn.Module:
    """Convert `made` in the way that takes the least time on the first sample, in the mode that it is in."""
    ways = options.ways()
    key = timing.key_of(made, samples[0], {**vars(options), "backend": options.backend.NAME}, *ways)
    timings = timing.kept(key)
    if not timings:
        timings = _timings(made, original, ways, samples)
        timing.keep(key, timings)
    best = timing.fastest(timings)
    chosen = replace(options, compile=False) if best is None else ways[best.name]
    converted = _convert(made, original, replace(chosen, run_original=False), samples)
    found = runner_of(converted)
    found.options, material = chosen, found.material
    name = "" if best is None else best.name
    material.report = replace(material.report, timings=tuple(timings), chosen=name)
    return converted


def _timings(
    made: nn.Module, original: nn.Module | None, ways: Mapping[str, Options], samples: Sequence[Inputs]
) -> list[Timing]:
    """What a call takes in each of the ways; the most promising come first, the time is limited."""
    end, found = time.monotonic() + timing.SECONDS_IN_ALL, {}
    first, *others = ways
    for name in progress([first, *reversed(others)], "timing"):
        if time.monotonic() > end:
            found[name] = Timing(name, None, f"not tried, {timing.SECONDS_IN_ALL:.0f} s were over")
            continue
        try:
            if not ways[name].run_original:
                _convert(made, original, ways[name], samples[:1])
            found[name] = Timing(name, timing.seconds_of(made, samples[0]))
        except Exception as error:
            log.debug("where that came from", exc_info=error)
            found[name] = Timing(name, None, in_a_line(error))
        finally:
            detach(made)
            _free_gpu_memory()
    return [found[name] for name in ways]


def _free_gpu_memory() -> None:
    """Of what was captured, compiled and recorded, before the next is."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def _enter_recipe(model: nn.Module, runner: Runner, seen: Seen, samples: Sequence[Inputs]) -> None:
    """Let the products that the plan names run in its recipe; delayed scaling finds its scales on the
    samples."""
    backend, plan = runner.options.backend, runner.material.report.precision
    recipe = backend.recipe_of(plan.recipe)
    runner.precision = Precision(recipe, products_in(seen.plans(), plan), plan.small_calls)
    if backend.is_delayed(recipe) and all(parameter.is_cuda for parameter in model.parameters()):
        calibrate(model, samples)


def revert(converted: nn.Module) -> nn.Module:
    """Take the captured forward off again; modules, parameters and what they hold were never changed, but
    where parallelize() has divided them: then parameters are gathered, on all ranks of the mesh at once.

    Raises:
        ModelError: `converted` is not converted.
    """
    check_module(converted, "revert")
    if not any(CONVERTED in vars(module) for module in converted.modules()) and not any(
        map(is_quantized, converted.parameters())
    ):
        raise ModelError(
            f"expected a converted model, got an unconverted {type(converted).__name__}; pass what "
            "te_transform.convert() returned, which is a copy unless inplace=True"
        )
    dequantize_weights(converted)
    detach(converted)
    return converted


def te_transform(
    captured: fx.GraphModule, example_inputs: Sequence[Any], **options: Any
) -> Callable[..., Any]:
    """The backend behind `torch.compile(model, backend="te_transform", options={...})`; see convert() for
    options.

    Nothing is laid out, checked or reported beforehand: that is what convert() is for.

    Raises:
        OptionError: an option has a value that it cannot have, or torch.compile was given a mode.
        BackendError: the backend that is asked for cannot run here.
    """
    if "mode" in options:
        raise OptionError(
            f"mode is {options['mode']!r}, it is for PyTorch's own backends: pass "
            f"options={{'compile': {options['mode']!r}}}"
        )
    held = nn.ParameterList([value for value in example_inputs if isinstance(value, nn.Parameter)])
    chosen = Options.of(held, PIPELINE, **(options.get("options") or {}))
    if chosen.compile == "auto":
        raise OptionError(
            "compile is 'auto', which times calls of a whole model: pass it to te_transform.convert()"
        )
    runner = Runner(chosen)
    run = runner.backend(captured, example_inputs)
    # a graph lives for as long as what it belongs to, which here is no model, but what dynamo holds
    return lambda *arguments, runner=runner: run(*arguments)


def _copy(model: nn.Module) -> nn.Module:
    try:
        # copies that are made in inference mode could not be trained
        with torch.inference_mode(False), torch.no_grad(), same_random(model.parameters()):
            return copy.deepcopy(model)
    except Exception as error:
        unsaved = "".join(f" ({why})" for why in noted(model).unsaved())
        raise ModelError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}){unsaved}, a copy is "
            "needed to leave the original untouched: pass inplace=True"
        ) from error
