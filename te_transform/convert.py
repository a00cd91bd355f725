"""The front doors convert(), revert() and the torch.compile backend.

The pipeline: capture -> canonicalize -> match -> rewrite -> precision -> lower -> report.
"""

from __future__ import annotations

import copy
import gc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import fx, nn

from te_transform.backends.fp8.fp8_only import is_fp8_only
from te_transform.backends.fp8.precision import Precision
from te_transform.backends.joined import make_adjacent
from te_transform.backends.ranks import is_first_rank
from te_transform.execution import timing
from te_transform.execution.attach import attach, detach, runner_of
from te_transform.execution.calibrate import calibrate
from te_transform.execution.classes import restore_classes
from te_transform.execution.console import progress
from te_transform.execution.first_calls import FirstGraphs, fails_captured, first_calls, traced_otherwise
from te_transform.execution.fp8_only import dequantize_weights
from te_transform.execution.runner import Runner
from te_transform.execution.timing import Timing
from te_transform.graph.errors import in_a_line, in_full
from te_transform.graph.inputs import InputError, Inputs, TraceError, as_inputs
from te_transform.graph.keywords import suggests
from te_transform.graph.preserve import one_at_a_time, same_random
from te_transform.graph.state_snapshot import Noted
from te_transform.pipeline import PIPELINE
from te_transform.plan.assign import products_in
from te_transform.plan.model import CONVERTED, ModelError, check_model, check_module
from te_transform.plan.options import OptionError, Options, check_skip
from te_transform.reporting import reported
from te_transform.verify.check import check_sites

M = TypeVar("M", bound=nn.Module)
log = logging.getLogger(__name__)


@suggests
@one_at_a_time
def convert(
    model: M,
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
) -> M:
    """Convert a model to fused ops: same class, same parameters, same results.

    Args:
        model: Any transformer in plain PyTorch. It stays unchanged unless `inplace`.
        example_inputs: A tensor, a tuple (args), a dict (kwargs) or a list of those, as for model(...). None:
            inputs are generated from the config or the forward's signature.
        backend: "te", "torch" or "auto". "auto" is te if it runs here, else torch. It switches to te once the
            model is captured where te runs, for example after a move to the GPU. The report says which
            backend was chosen, and why.
        recipe: None, "fp8-delayed", "fp8-current", "fp8-block", "mxfp8", a TE recipe object or a
            te_transform.PrecisionPlan. "fp8-delayed-fast" and "fp8-current-fast" accumulate gradients with
            fewer bits.
        passes: The rules to run, in order. None means te_transform.PIPELINE.
        skip: Module paths or globs to leave alone, with all submodules.
        approximate: True to allow rules that change the numbers: the exact GELU becomes the tanh GELU. In
            float32, this change exceeds the bounds of the check; also pass verify=False there.
        pad_vocabulary: True to pad the weight of a head whose vocabulary is not a multiple of 8, on a GPU.
            Rows of zeros are added up to a multiple of 64, which makes the product several times as fast.
            Logits and parameters keep their sizes.
        chunked_loss: True to never hold all logits or their gradient in memory, for a loss with gradients.
            Head and loss are computed for one chunk of the vocabulary at a time; the backward computes the
            head a second time. Logits that the model returns with such a loss are NaN.
        compile: False, True or a torch.compile mode: inductor compiles each fused graph at its first call.
            "auto" times the candidates and takes the fastest on the first example inputs, in the current
            training or evaluation mode. Candidates are the original code, fused, compiled, and CUDA graphs,
            each without and with the recipe. Timing takes at most five minutes; a file stores the result.
            With a process group, all ranks must convert: the slowest rank's time counts.
        graphs: True to run forward and backward as CUDA graphs, alone or with compile=True. They are recorded
            in the third call with the same shapes and mode. The recording is checked against the call itself.
        inplace: True to convert `model` itself.
        verify: True to check every fused site against the captured operations, forward and gradients, on the
            values of the first call of its graph. A site that fails is rolled back and reported.

    Returns:
        The converted model, an instance of the original class, with the original modules, parameters and
        names. te_transform.report() says what was fused, and why the rest was left alone.

    Raises:
        ModelError: `model` cannot be converted (a ScriptModule, a DDP wrapper, ...).
        InputError, OptionError, BackendError, TraceError: see their messages. If an error is raised, `model`
            is bitwise unchanged.
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
            "expected example_inputs with compile='auto', which times calls on them, got none; pass "
            "example_inputs of the sizes that the model will run on"
        )
    target, original = (model, None) if inplace else (_copy(model), model)
    return (_fastest if compile == "auto" else _convert)(target, original, options, samples)


def _convert(target: M, original: M | None, options: Options, samples: Sequence[Inputs]) -> M:
    """Convert `target` in place; it may be a copy of `original`. Errors leave it unchanged."""
    runner = Runner(options, check_sites if options.verify else None)
    try:
        _capture_and_report(target, original, runner, samples)
        return target
    except BaseException:
        detach(target)
        raise


def _capture_and_report(
    target: nn.Module, original: nn.Module | None, runner: Runner, samples: Sequence[Inputs]
) -> None:
    attach(target, runner)
    seen, why = FirstGraphs(), None
    try:
        seen = first_calls(target, runner, samples, original)
        if runner.policy.by_block:  # known only after a first call
            seen = first_calls(target, runner, samples, original)
    except TraceError as error:
        why = fails_captured(target, samples, original, error)
    if runner.captures.checker is not None and why is None:
        why = traced_otherwise(target, runner, seen.outputs, samples[0], original)
    if why is not None:
        runner.material.notes.append(why)
        runner.options = replace(runner.options, run_original=True)
        seen.graphs.clear()
        seen.groups.clear()
    seen.outputs.clear()
    options = runner.options
    if not (seen.graphs or options.run_original):  # for example with dynamo disabled
        runner.material.next_call = []
    if options.run_original:
        restore_classes(target)
    runner.material.report = reported(target, runner, seen, samples[0])
    # all checks passed: parameters may be moved now
    joins = not options.compile or options.recipe is not None  # when compiled, only FP8 products need it
    groups = progress(tuple(seen.groups) * joins, "making joined parameters adjacent")
    runner.note_scattered(target, [group for group in groups if not make_adjacent(group)])
    if options.recipe is not None and not options.run_original:
        _enter_recipe(target, runner, seen, samples)
    runner.user_code.calls.clear()
    for graph in runner.graphs:
        graph.count_anew()
    log.log(logging.INFO if is_first_rank() else logging.DEBUG, "%s", runner.material.report)


def _fastest(made: M, original: M | None, options: Options, samples: Sequence[Inputs]) -> M:
    """Convert `made` with the options that are fastest on the first sample, in its current mode."""
    ways = options.ways()
    key = timing.key_of(made, samples[0], {**vars(options), "backend": options.backend.NAME}, *ways)
    timings = timing.of_all_ranks(key, timing.kept_timings(key))
    if not timings:
        timings = timing.of_all_ranks(key, _timings(made, original, ways, samples))
        if timing.fastest(timings) is not None:
            timing.keep(key, timings)
    best = timing.fastest(timings)
    chosen = replace(options, compile=False) if best is None else ways[best.name]
    converted = _convert(made, original, replace(chosen, run_original=False), samples)
    runner = runner_of(converted)
    runner.options, material = chosen, runner.material
    name = "" if best is None else best.name
    material.report = replace(material.report, timings=tuple(timings), chosen=name)
    return converted


def _timings(
    target: nn.Module, original: nn.Module | None, ways: Mapping[str, Options], samples: Sequence[Inputs]
) -> list[Timing]:
    """Time a call with each candidate; the most promising come first, because the time is limited."""
    end, timings = time.monotonic() + timing.SECONDS_IN_ALL, {}
    first, *others = ways
    for name in progress([first, *reversed(others)], "timing"):
        if time.monotonic() > end:
            timings[name] = Timing(name, None, f"not timed, the {timing.SECONDS_IN_ALL:.0f} s were over")
            continue
        try:
            if not ways[name].run_original:
                _convert(target, original, ways[name], samples[:1])
            timings[name] = Timing(name, timing.seconds_of(target, samples[0]))
        except Exception as error:
            log.debug("timing of %s failed", name, exc_info=error)
            timings[name] = Timing(name, None, in_a_line(error))
        finally:
            detach(target)
            _free_gpu_memory()
    return [timings[name] for name in ways]


def _free_gpu_memory() -> None:
    """Free the GPU memory of captured, compiled and recorded graphs, before the next candidate."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def _enter_recipe(model: nn.Module, runner: Runner, seen: FirstGraphs, samples: Sequence[Inputs]) -> None:
    """Run the products that the plan names in its recipe; delayed scaling calibrates on the samples."""
    backend, plan = runner.options.backend, runner.material.report.precision
    recipe = backend.recipe_of(plan.recipe)
    runner.precision = Precision(recipe, products_in(seen.plans(), plan), plan.small_calls)
    if backend.is_delayed(recipe) and all(parameter.is_cuda for parameter in model.parameters()):
        calibrate(model, samples)


def revert(converted: M) -> M:
    """Restore the original forward of a converted model, in place.

    Modules, parameters and their values were never changed by convert(). If parallelize() divided the
    parameters, they are gathered; then all ranks of the mesh must call revert() together.

    Raises:
        ModelError: `converted` is not a converted model.
    """
    check_module(converted, "revert")
    if not any(CONVERTED in vars(module) for module in converted.modules()) and not any(
        map(is_fp8_only, converted.parameters())
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
    """Compile a captured graph for `torch.compile(model, backend="te_transform", options={...})`.

    The options are those of convert(). Unlike convert(), this backend does not move parameters, check sites
    or make a report.

    Raises:
        OptionError: an option is invalid, or torch.compile was given a mode.
        BackendError: the requested backend cannot run here.
    """
    if "mode" in options:
        raise OptionError(
            f"expected no mode with this backend of torch.compile, got {options['mode']!r}; pass "
            f"options={{'compile': {options['mode']!r}}}"
        )
    parameters = nn.ParameterList([value for value in example_inputs if isinstance(value, nn.Parameter)])
    chosen = Options.of(parameters, PIPELINE, **(options.get("options") or {}))
    if chosen.compile == "auto":
        raise OptionError(
            "expected a compile mode for one graph, got 'auto', which times a whole model; pass it to "
            "te_transform.convert()"
        )
    runner = Runner(chosen)
    run = runner.backend(captured, example_inputs)
    # a graph lives as long as its runner; here no model holds the runner, so the function that dynamo holds
    # does
    return lambda *arguments, runner=runner: run(*arguments)


def _copy(model: M) -> M:
    try:
        # a copy made in inference mode could not be trained
        with torch.inference_mode(False), torch.no_grad(), same_random(model.parameters()):
            return copy.deepcopy(model)
    except Exception as error:
        unsaved = "".join(f" ({why})" for why in Noted(model).unsaved())
        raise ModelError(
            "expected a model that can be copied, to leave the original unchanged, got a "
            f"{type(model).__name__} that cannot ({in_full(error)}){unsaved}; pass "
            "inplace=True"
        ) from error
