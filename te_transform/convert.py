"""trace -> normalise -> match -> rewrite -> verify -> finalise -> report: the whole of te_transform, on one
line."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import fx, nn

from te_transform.backends.limits import gaining
from te_transform.calibrate import quantise
from te_transform.config import Options
from te_transform.emit import Emitted, emit, enter_loss, leave, undo
from te_transform.finalise import finalise, unfinalise
from te_transform.inputs import Inputs, as_inputs
from te_transform.loss import fusable
from te_transform.memory import Memory, predict
from te_transform.model import ModelError, check_model
from te_transform.normalise import normalise
from te_transform.originals import plain_calls
from te_transform.plan import Plan, plan
from te_transform.precision import PrecisionPlan, assign
from te_transform.progress import progress
from te_transform.report import Report, collapse
from te_transform.rewrite import snapshot
from te_transform.slots import takes_subclasses
from te_transform.trace import TraceError, record
from te_transform.verify import check_sites

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
    """The same model on fused modules: same class, same weights, same answers.

    Args:
        model: any transformer in plain PyTorch; left untouched unless `inplace`.
        example_inputs: a tensor, a tuple (args), a dict (kwargs) or a list of those, as a plain model(...)
            takes them;
            None: invented where the model says what it reads.
        backend: "te", "torch", or "auto": te where it runs, else torch; the report says which and why.
        recipe: None, "fp8-delayed", "fp8-current", "fp8-block", "mxfp8" or a TE recipe object.
        passes: the rules to run, in order; None is te_transform.PIPELINE.
        skip: module paths or globs left alone, with all they contain.
        approximate: allow rules that change the numbers (the exact GELU becomes the tanh one).
        compile: False, True or a torch.compile mode: compile the converted model.
        inplace: convert `model` itself; peak memory is the model plus one site.
        verify: check every rewritten site against the original on the example inputs, forward and gradients;
            a site
            that fails is taken back and reported.

    Returns:
        The converted model, an instance of the original class. te_transform.report() tells what was done and
        why not.

    Raises:
        ModelError: this is no model that can be converted (a ScriptModule, a DDP wrapper, ...).
        InputError, OptionError, BackendError, TraceError: as their messages say.
        Whatever is raised, `model` is bitwise what it was.
    """
    check_model(model)
    options = Options.of(
        model,
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
    converted = model if inplace else _copy(model)
    made, before = _planned(converted, samples[0], options)
    precision = _precision(converted, made, options)
    memory = _memory(made, precision, options)
    emitted: list[Emitted] = []
    try:
        for site in progress(made.sites.values(), "converting"):
            emit(converted, site, emitted)
        if verify:
            made.roll_back(check_sites(converted, emitted, samples))
        if options.backend.NAME == "te":
            enter_loss(converted)
        if precision is not None:
            quantise(converted, emitted, precision, options.backend, samples)
        converted.__dict__["_te_transform"] = _report(made, before, options, precision, memory)
        log.info("%s", converted.__dict__["_te_transform"])
        finalise(converted, options)
        for counter in plain_calls(converted):
            counter.clear()  # of the calls that were made to verify
    except BaseException:
        unfinalise(converted)
        leave(converted)
        converted.__dict__.pop("_te_transform", None)
        for site in reversed(emitted):
            undo(converted, site)
        raise
    return converted


def inspect(model: nn.Module, example_inputs: Any = None, **options: Any) -> Report:
    """What convert() would do with the same arguments, and why not more; nothing is changed, no GPU and no TE
    needed.

    Raises:
        ModelError, InputError, OptionError, TraceError: as convert() does.
    """
    check_model(model)
    chosen = Options.of(model, planning=True, **options)
    chosen.check_skip(model)
    made, before = _planned(model, as_inputs(model, example_inputs)[0], chosen)
    precision = _precision(model, made, chosen)
    return _report(made, before, chosen, precision, _memory(made, precision, chosen))


def report(converted: nn.Module) -> Report:
    """What convert() did to this model: sites fused and refused, with reasons, the graphs before and after,
    and how often fused modules have had to run in plain PyTorch since.

    Raises:
        ModelError: `converted` does not come from te_transform.convert().
    """
    found = converted.__dict__.get("_te_transform") if isinstance(converted, nn.Module) else None
    if found is None:
        raise ModelError(
            f"{type(converted).__name__} has no report, te_transform.convert() returns a model that has one"
        )
    return replace(found, plain_calls=sum(plain_calls(converted), Counter()))


def _planned(model: nn.Module, sample: Inputs, options: Options) -> tuple[Plan, fx.Graph]:
    try:
        recording = normalise(record(model, sample.doubled()))
    except TraceError:
        recording = normalise(record(model, sample))
    before = snapshot(recording)
    return plan(recording, options), before


def _precision(model: nn.Module, made: Plan, options: Options) -> PrecisionPlan | None:
    if options.recipe is None:
        return None
    if not takes_subclasses(type(model)):
        raise ModelError(
            f"{type(model).__name__} refuses to be subclassed, a recipe makes the model an instance of a "
            "subclass of its class: leave recipe=None"
        )
    return assign(made, options.recipe, options.backend)


def _memory(made: Plan, precision: PrecisionPlan | None, options: Options) -> Memory | None:
    if options.backend.NAME != "te":
        return None
    return predict(made, precision, fused_loss=fusable(made.recording.root))


def _report(
    made: Plan, before: fx.Graph, options: Options, precision: PrecisionPlan | None, memory: Memory | None
) -> Report:
    after = snapshot(made.recording)
    sizes = _size_notes(made, precision) if options.backend.NAME == "te" else ()
    notes = (options.backend_reason, *_norm_notes(made), *sizes, *_layout_notes(made.projections))
    name = type(made.recording.root).__name__
    return Report(name, tuple(made.outcomes), before, after, notes, precision, memory=memory)


def _norm_notes(made: Plan) -> Iterator[str]:
    if any(site.plain and site.norm_in_front for site in made.sites.values()):
        yield "norms run where they stand, PyTorch has no kernel that joins one with what reads it"


def _size_notes(made: Plan, precision: PrecisionPlan | None) -> Iterator[str]:
    """Which calls are too small for TE's modules, at the width that most of them have."""
    scales = [getattr(site.fused, "layer_norm_weight", None) for site in made.sites.values()]
    widths = Counter(len(scale) for scale in scales if scale is not None)
    if not widths or (precision and precision.small_calls):
        return
    ((width, _),) = widths.most_common(1)
    inside = precision is not None and None in precision.sites.values()
    where = "FP8" if inside else "TE's modules"
    yield (
        f"calls of {gaining(width, inside):,} tokens and more run in {where} (width {width}), smaller ones "
        "in plain PyTorch, where they are faster"
    )


def _layout_notes(projections: dict[str, str]) -> Iterator[str]:
    for name in sorted(set(projections.values())):
        paths = ", ".join(
            pattern for pattern, _ in collapse(p for p, layout in projections.items() if layout == name)
        )
        yield f"queries, keys and values are {name} in {paths}"


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}), a copy is needed to "
            "leave the original untouched: pass inplace=True"
        ) from error
