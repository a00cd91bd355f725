"""capture -> canonicalize -> match -> rewrite -> precision -> lower -> report: the whole of te_transform, on
one line."""

from __future__ import annotations

import copy
import gc
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from te_transform.backends.joined import lay
from te_transform.graph.capture import noting_reasons, on_fake_tensors, ways_to_call
from te_transform.graph.inputs import InputError, Inputs, TraceError, as_inputs
from te_transform.graph.preserve import one_at_a_time, preserved
from te_transform.passes import PIPELINE
from te_transform.plan import cost
from te_transform.plan.assign import assign, products_in
from te_transform.plan.match import Plan
from te_transform.plan.model import ModelError, check_model, check_module
from te_transform.plan.options import OptionError, Options, check_skip
from te_transform.plan.precision_plan import PrecisionPlan
from te_transform.quantize import dequantize_weights
from te_transform.report.compose import compose
from te_transform.report.explain import SET_ON_MODEL, divided
from te_transform.report.report import Report
from te_transform.runtime import timing
from te_transform.runtime.calibrate import calibrate
from te_transform.runtime.captured import CapturedGraph
from te_transform.runtime.console import in_a_line, progress
from te_transform.runtime.converted import (
    Converted,
    blocks,
    converted_of,
    enter,
    give_classes_back,
    leave,
    own_classes,
)
from te_transform.runtime.distances import distance, rounding
from te_transform.runtime.precision import Precision
from te_transform.runtime.timing import Timing
from te_transform.verify.check import check_sites

log = logging.getLogger(__name__)

# The number of blocks from which on a model is planned and checked block by block: one captured graph serves
# all of them, while a capture of the whole takes 0.2 s a block. What runs later is captured whole, at its
# first call.
DEEP = 8
_SET_ON_MODEL = f"{SET_ON_MODEL}it runs as it is, with parts that are captured"
_LATER = "what is around the blocks is captured in the first call, and in te_transform.report() from then on"


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
        backend: "te", "torch", or "auto": te where it runs, else torch; the report says which and why.
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
    converted = Converted(options, len(blocks(made)) > DEEP, check_sites if options.verify else None)
    try:
        _capture_and_report(made, original, converted, samples)
        return made
    except BaseException:
        leave(made)
        raise


def _capture_and_report(
    made: nn.Module, original: nn.Module | None, converted: Converted, samples: Sequence[Inputs]
) -> None:
    enter(made, converted)
    seen, why = _Seen(), None
    try:
        seen = _first_calls(made, converted, samples, original)
        if converted.in_pieces:  # which only a first call can show
            seen = _first_calls(made, converted, samples, original)
    except TraceError as error:
        why = _fails_captured(made, samples, original, error)
    if converted.checker is not None and why is None:
        why = _traced_otherwise(made, seen.outputs, samples[0], original)
    if why is not None:
        converted.failures.append(why)
        converted.options = replace(converted.options, as_it_is=True)
        seen.graphs.clear()
        seen.groups.clear()
    seen.outputs.clear()
    options = converted.options
    if converted.by_block and not converted.in_pieces:
        converted.whole = []
    converted.capture_blocks(made, one_by_one=converted.in_pieces)
    if options.as_it_is:
        give_classes_back(made)
    converted.report = _report(made, converted, seen, samples[0])
    # from here on nothing is refused any more: a model that is refused stays where it lay
    joins = not options.compile or options.recipe is not None  # compiled, products in FP8 alone
    groups = progress(tuple(seen.groups) * joins, "laying parameters next to each other")
    if held := [group for group in groups if not lay(group)]:
        # dynamo's exceptions, as of what ends a graph, have frames that hold the outputs of the first call
        # still, in a circle, and these what their backward would read
        gc.collect()
        for group in held:
            lay(group)
    if options.recipe is not None and not options.as_it_is:
        _enter_recipe(made, converted, seen, samples)
    for graph in converted.graphs:
        graph.count_anew()
    log.info("%s", converted.report)


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
    converted = _convert(made, original, replace(chosen, as_it_is=False), samples)
    found = converted_of(converted)
    found.options = chosen
    found.report = replace(found.report, timings=tuple(timings), chosen="" if best is None else best.name)
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
            if not ways[name].as_it_is:
                _convert(made, original, ways[name], samples[:1])
            found[name] = Timing(name, timing.seconds_of(made, samples[0]))
        except Exception as error:
            log.debug("where that came from", exc_info=error)
            found[name] = Timing(name, None, in_a_line(error))
        finally:
            leave(made)
            _free_gpu_memory()
    return [found[name] for name in ways]


def _free_gpu_memory() -> None:
    """Of what was captured, compiled and recorded, before the next is."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


@dataclass
class _Seen:
    """The captured graphs that ran in the first calls, with the path of the module that each call was of."""

    graphs: dict[tuple[str, CapturedGraph], None] = field(default_factory=dict)
    groups: dict[tuple[nn.Parameter, ...], None] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)  # of the model's parameters, by their ids
    reasons: list[str] = field(default_factory=list)  # of what dynamo did not capture
    outputs: list[Tensor] = field(default_factory=list)  # of the first call, those that are floating

    def plans(self) -> Iterator[tuple[str, Plan]]:
        """What is fused in each graph, with the path of the module; once for each module that shares a
        graph."""
        return ((path, graph.plan) for path, graph in self.graphs)

    def name_parameters(self, model: nn.Module) -> None:
        """Tell layers that share a graph apart by the parameters that they have now."""
        self.names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}


def _first_calls(
    model: nn.Module, converted: Converted, samples: Sequence[Inputs], original: nn.Module | None
) -> _Seen:
    """Capture the forward in training mode, by calling the model, which is left as it was, on its
    examples."""
    others = set() if original is None else set(map(id, original.parameters()))

    def check_own(arguments: Sequence[Any]) -> None:
        if any(id(argument) in others for argument in arguments):
            raise ModelError(
                f"the forward of {type(model).__name__} reads parameters through a function that the copy "
                "shares with the original, they would not be the copy's own: pass inplace=True"
            )

    with (
        _watched(converted, model, check_own) as seen,
        preserved(model, original),
        torch.set_grad_enabled(_is_trainable(model)),
    ):
        for sample in progress(samples, "capturing"):
            outputs = _call(model.train(), sample)
            seen.outputs = seen.outputs or _floating(outputs)
            del outputs  # with what its backward would read
    return seen


def _is_trainable(model: nn.Module) -> bool:
    return not any(parameter.is_inference() for parameter in model.parameters())


def _floating(outputs: Any) -> list[Tensor]:
    leaves = (leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))
    return [leaf.detach() for leaf in leaves if leaf.is_floating_point()]


def _traced_otherwise(
    model: nn.Module, found: Sequence[Tensor], sample: Inputs, original: nn.Module | None
) -> str | None:
    """Why the captured forward, which found these outputs, is not the model's, or None: code may ask whether
    it is traced, or of what class it is, and do something else then, as transformers does for masks."""

    def outputs() -> list[Tensor]:
        with preserved(model, original), torch.set_grad_enabled(_is_trainable(model)):
            return _floating(_call(model.train(), sample))

    if any(tensor.is_meta for tensor in found):  # which hold no numbers
        return None
    with own_classes(model):
        expected = outputs()
        off = _off(found, expected)
        # what draws random numbers of its own tells nothing
        if off <= rounding(expected) or _off(outputs(), expected):
            return None
    return (
        f"captured, the forward computes other numbers, off by {off:.2g}: it does something else where it is "
        "traced or in a subclass, one that does the same is needed; the model runs the user's own code"
    )


def _fails_captured(
    model: nn.Module, samples: Sequence[Inputs], original: nn.Module | None, error: TraceError
) -> str:
    """Why the captured forward raised on samples that the model takes.

    Raises:
        TraceError: the model does not take them.
        ModelError: the model does, and its copy does not.
    """

    def takes(one: nn.Module, twin: nn.Module | None) -> bool:
        with own_classes(one), preserved(one, twin), torch.set_grad_enabled(_is_trainable(model)):
            try:
                for sample in samples:
                    _call(one.train(), sample)
            except TraceError:
                return False
        return True

    raised = error.__cause__ or error
    if takes(model, original):
        return _raises_captured(raised)
    if original is not None and takes(original, model):
        raise ModelError(
            f"the copy of {type(model).__name__} raises {in_a_line(raised)}, and the original does not: "
            "copy.deepcopy() leaves out what the forward reads, as it does with __slots__, pass inplace=True"
        ) from error
    raise error


def _raises_captured(raised: BaseException) -> str:
    return (
        f"captured, the forward raises {in_a_line(raised)}: it does something else where it is traced or in "
        "a subclass, one that does the same is needed; the model runs the user's own code"
    )


def _off(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest distance between outputs; infinity where there are more of one than of the other."""
    if len(found) != len(expected):
        return math.inf
    return max(map(distance, found, expected), default=0.0)


@contextmanager
def _watched(
    converted: Converted, model: nn.Module, see: Callable[[Sequence[Any]], None] = lambda arguments: None
) -> Iterator[_Seen]:
    """What is captured, and called, meanwhile.

    Nothing runs fused: parameters do not lie next to each other yet, and a backward would keep the copies of
    all that are joined.
    """
    seen = _Seen()
    seen.name_parameters(model)

    def watch(graph: CapturedGraph, arguments: Sequence[Any]) -> None:
        see(arguments)
        seen.graphs[graph.path_in(seen.names, arguments), graph] = None
        seen.groups |= dict.fromkeys(graph.groups(arguments))

    converted.watch, converted.dry = watch, True
    try:
        with noting_reasons() as seen.reasons:
            yield seen
    finally:
        converted.watch, converted.dry = None, False


def _call(model: nn.Module, sample: Inputs) -> Any:
    args, kwargs = sample.clone()
    try:
        return model(*args, **kwargs)
    except ModelError:
        raise
    except Exception as error:
        raise TraceError.of(model, sample, error) from error


def _enter_recipe(model: nn.Module, converted: Converted, seen: _Seen, samples: Sequence[Inputs]) -> None:
    """Let the products that the plan names run in its recipe; delayed scaling finds its scales on the
    samples."""
    backend, plan = converted.options.backend, converted.report.precision
    recipe = backend.recipe_of(plan.recipe)
    converted.precision = Precision(recipe, products_in(seen.plans(), plan), plan.small_calls)
    if backend.is_delayed(recipe) and all(parameter.is_cuda for parameter in model.parameters()):
        calibrate(model, samples)


def _products_around(model: nn.Module, captured: Iterable[str]) -> Iterator[str]:
    """The modules with a matrix of weights that lie in none of the captured ones; "" is the whole model."""
    inside = tuple(f"{path}." if path else "" for path in captured)
    for path, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.dim() != 2 or isinstance(module, nn.Embedding):
            continue
        if not path.startswith(inside):
            yield path


def _report(model: nn.Module, converted: Converted, seen: _Seen, sample: Inputs) -> Report:
    options, plans = converted.options, list(seen.plans())
    precision = None
    if options.recipe is not None:
        others = _products_around(model, [path for path, _ in plans])
        precision = assign(plans, options.recipe, options.backend, others)
    if plans and "forward" in vars(model) and not converted.entered:
        converted.failures += [_SET_ON_MODEL] * (_SET_ON_MODEL not in converted.failures)
    return compose(model, plans, options, precision, str(sample), converted.failures, seen.reasons)


@one_at_a_time
def inspect(model: nn.Module, example_inputs: Any = None, **options: Any) -> Report:
    """What convert() would do with the same arguments, and why not more; no GPU and no Transformer Engine is
    needed, and the model is left as it was.

    It is found out on fake tensors, in no memory; only a forward that branches on values runs on real ones.

    Raises:
        ModelError, InputError, OptionError, TraceError: as convert() does.
    """
    asked, sample = _asked(model, example_inputs, options)
    if asked.compile != "auto":
        planned, seen = _planned(model, asked, sample)
        found = _report(model, planned, seen, sample)
        told = _predicted_call(list(seen.plans()), asked, found.precision, model.training, planned.by_block)
        return replace(found, notes=(*found.notes, *told))
    planned, seen = _planned(model, replace(asked, compile=False), sample, whole=True)
    found = _report(model, planned, seen, sample)
    timings = _predicted(list(seen.plans()), asked.ways(planning=True), found.precision, model.training)
    best = timing.fastest(timings)
    notes = found.notes if best is None or cost.NOTE in found.notes else (*found.notes, cost.NOTE)
    return replace(found, timings=tuple(timings), chosen="" if best is None else best.name, notes=notes)


def _predicted_call(
    plans: list[tuple[str, Plan]],
    options: Options,
    precision: PrecisionPlan | None,
    training: bool,
    by_block: bool,
) -> Iterator[str]:
    """What a call takes as these options ask for, in a sentence, if it can be told."""
    if cost.unknown(plans, options) is None:
        fused = cost.seconds_of(plans, options, precision, training)
        before = cost.seconds_of(plans, replace(options, as_it_is=True), None, training)
        what = "the blocks of a call are" if by_block else "a call is"
        mode = "forward and backward" if training else "forward"
        taken, unfused = timing.duration(fused), timing.duration(before)
        yield f"{what} predicted to take {taken} on an H100, {unfused} unfused ({mode})"


def _predicted(
    plans: list[tuple[str, Plan]],
    ways: Mapping[str, Options],
    precision: PrecisionPlan | None,
    training: bool,
) -> list[Timing]:
    """What a call takes in each of the ways, as far as it can be told without a GPU."""
    found = []
    for name, options in ways.items():
        why = cost.unknown(plans, options)
        inside = precision if options.recipe is not None else None
        seconds = None if why else cost.seconds_of(plans, options, inside, training)
        found.append(Timing(name, seconds, why or "predicted"))
    return found


def plans_of(
    model: nn.Module, example_inputs: Any, **options: Any
) -> tuple[list[tuple[str, Plan]], PrecisionPlan | None]:
    """What inspect() plans for each captured graph of the whole forward, and what runs in FP8."""
    asked, sample = _asked(model, example_inputs, options)
    planned, seen = _planned(model, asked, sample, whole=True)
    return list(seen.plans()), _report(model, planned, seen, sample).precision


def _asked(model: nn.Module, example_inputs: Any, options: dict[str, Any]) -> tuple[Options, Inputs]:
    check_model(model, "inspect")
    asked = Options.of(model, PIPELINE, planning=True, **options)
    check_skip(asked.skip, model)
    return asked, as_inputs(model, example_inputs)[0]


def _planned(
    model: nn.Module, options: Options, sample: Inputs, whole: bool = False
) -> tuple[Converted, _Seen]:
    """Capture the forward without memory if that is possible; block by block if it is deep, and not wanted
    `whole`."""
    # what lies between blocks, or anywhere, may look at values, which fake tensors lack
    ways = [(True, on_fake_tensors)] * (len(blocks(model)) > DEEP and not whole)
    ways += [(False, tensors) for tensors in ways_to_call(model)]
    for by_block, tensors in ways:
        planned = Converted(options, by_block=by_block)
        try:
            return planned, _dry_call(model, planned, sample, tensors)
        except TraceError as error:
            failed = error
    with suppress(Exception), preserved(model), tensors(model, sample) as (args, kwargs):
        model.train()(*args, **kwargs)
        planned.failures.append(_raises_captured(failed.__cause__ or failed))
        return planned, _Seen()
    raise failed


def _dry_call(model: nn.Module, planned: Converted, sample: Inputs, tensors: Callable[..., Any]) -> _Seen:
    """Capture the forward in training mode; nothing is fused."""
    with preserved(model), _watched(planned, model) as seen:
        enter(model, planned)
        try:
            with tensors(model, sample) as (args, kwargs):
                seen.name_parameters(model)
                model.train()(*args, **kwargs)
        except Exception as error:
            raise TraceError.of(model, sample, error) from error
        finally:
            leave(model)
    return seen


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
    later = [note for note in found.failures if note not in told]
    if found.whole is not None and not found.in_pieces:
        later.append(_LATER)
    if found.parallel is not None:
        later += divided(found.parallel.places, found.parallel.ranks.count)
    return replace(found.report, plain_calls=plain, notes=(*told, *later))


def _report_of_whole(model: nn.Module, converted: Converted) -> Report:
    """What the first call of a deep model has shown, whose report was of its blocks until then.

    The memory of a step stays what was predicted for the example inputs, in training mode.
    """
    told, options = converted.report, converted.options
    plans, precision = [("", graph.plan) for graph in converted.whole], None
    if options.recipe is not None:
        precision = assign(plans, options.recipe, options.backend, _products_around(model, []))
    made = compose(model, plans, options, precision, notes=converted.failures)
    return replace(made, memory=told.memory, timings=told.timings, chosen=told.chosen)


def revert(converted: nn.Module) -> nn.Module:
    """Take the captured forward off again; modules, parameters and what they hold were never changed, but
    where parallelize() has divided them: then parameters are gathered, on all ranks of the mesh at once.

    Raises:
        ModelError: `converted` is no module.
    """
    check_module(converted, "revert")
    dequantize_weights(converted)
    leave(converted)
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
    converted = Converted(chosen)
    run = converted.backend(captured, example_inputs)
    # a graph lives for as long as what it belongs to, which here is no model, but what dynamo holds
    return lambda *arguments, converted=converted: run(*arguments)


def _copy(model: nn.Module) -> nn.Module:
    try:
        with torch.inference_mode(False), torch.no_grad():  # where it is on, copies could not be trained
            return copy.deepcopy(model)
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}), a copy is needed to "
            "leave the original untouched: pass inplace=True"
        ) from error
