"""The commands that need torch: inspect, verify, tune, profile, and explain for a user's own rule."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from te_transform.backends import BackendError
from te_transform.backends.ranks import is_first_rank
from te_transform.command_line.explain import explanation
from te_transform.config_file import LoadError, read_config
from te_transform.convert import convert
from te_transform.execution import timing
from te_transform.execution.console import as_text, status
from te_transform.graph.errors import in_a_line
from te_transform.graph.inputs import InputError, Inputs, TraceError, invent, positions
from te_transform.graph.keywords import ArgumentError, did_you_mean
from te_transform.graph.nodes import dtype_name
from te_transform.graph.preserve import ParametersWritten
from te_transform.graph.tables import UNKNOWN_RESULT
from te_transform.inspect import inspect
from te_transform.load import imported, inputs_of, load
from te_transform.pipeline import PIPELINE
from te_transform.plan.model import ModelError, check_model
from te_transform.plan.options import OptionError
from te_transform.plan.precision_plan import PrecisionError
from te_transform.plan.rule import Rule
from te_transform.pretrained import config_of
from te_transform.profile.profile import profile
from te_transform.report.as_json import as_json
from te_transform.report.report import ExpectationError, Report
from te_transform.reporting import report as report_of
from te_transform.verify.layout import Layout
from te_transform.verify.states import STATE_DICT
from te_transform.verify.verify import verify

_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")  # models whose labels are their input ids
BAD_INPUT = (
    ArgumentError, BackendError, InputError, LoadError, ModelError, ParametersWritten, PrecisionError,
    TraceError,
)  # fmt: skip


def _printing_aside() -> redirect_stdout:
    """Redirect prints of the user's code to stderr: on stdout they would corrupt the JSON output."""
    return redirect_stdout(sys.stderr)


def run_inspect(asked: argparse.Namespace) -> int:
    expected = _expected_counts(asked.expect)
    model, inputs = _loaded(asked, on_meta=True)
    options = {"compile": "auto" if asked.times else False, **_options(asked)}
    if asked.backend is None and (asked.recipe or asked.times):
        options["backend"] = "te"  # only te supports recipes and predicted times
    try:
        with _printing_aside(), status("capturing"):
            report = inspect(model, inputs, **options)
    except TraceError as error:
        if not isinstance(error.__cause__, UNKNOWN_RESULT):
            raise
        model, inputs = _loaded(asked, on_meta=False)
        with _printing_aside(), status("capturing with real weights, because the forward reads values"):
            report = inspect(model, inputs, **options)
    # the memory line of the report names the inputs, too
    inputs_told = [f"planned for the inputs ({report.inputs})"] * (report.memory is None)
    report = replace(report, notes=(*report.notes, *inputs_told, *_notes_of(asked, model)))
    _write(asked, report, report)
    try:
        report.expect(**expected)
    except ExpectationError as error:
        print(f"te-transform: {error}", file=sys.stderr)
        return 1
    return 0


def _notes_of(asked: argparse.Namespace, model: nn.Module) -> Iterator[str]:
    """Yield notes on entries of a config that the model was built without."""
    if not Path(asked.model).exists():
        return
    config = read_config(config_of(Path(asked.model)), asked.trust_remote_code)
    yield from config.notes()
    if config.quantized:
        dtype = dtype_name(next(model.parameters()).dtype)
        yield (
            f"the config says that the weights are quantized ({config.quantized}), but the plan is for "
            f"weights in {dtype}: dequantize the weights before the conversion"
        )


def run_verify(asked: argparse.Namespace) -> int:
    if asked.against:
        return _run_against(asked)
    if asked.names or asked.weights or asked.copy_weights:
        raise OptionError(
            "expected --names, --weights and --copy-weights with --against, got them without; name the "
            "second model by --against"
        )
    model, inputs = _loaded(asked, on_meta=False)
    with _printing_aside():
        converted = convert(model, inputs, **_options(asked))
        result = verify(model, converted, inputs)
    report = report_of(converted)
    _write(asked, report, result, **result.as_data() | {"notes": (*report.all_notes(), *result.notes)})
    return 0 if result else 1


def _run_against(asked: argparse.Namespace) -> int:
    """Compare two models that may have nothing to do with a conversion."""
    if asked.html or any(_options(asked).values()):
        raise OptionError(
            "expected no options of a conversion with --against, got some of --backend, --recipe, --skip, "
            "--approximate, --pad-vocabulary and --html; leave them out, nothing is converted"
        )
    names = dict(_renamed(text) for text in asked.names) or None
    weights = imported(asked.weights) if asked.weights else None
    for name in (asked.model, asked.against):  # imported first, since modules may draw numbers
        if not Path(name).exists() and all(name.partition(":")):
            imported(name)
    torch.manual_seed(0)  # factories of one architecture draw the same weights
    model, inputs = _loaded(asked, on_meta=False)
    torch.manual_seed(0)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with _printing_aside(), status(f"building {asked.against}"):
        dtype = None if asked.dtype is None else getattr(torch, asked.dtype)
        other = load(
            asked.against,
            dtype=dtype,
            layers=asked.layers if Path(asked.against).exists() else None,
            trust_remote_code=asked.trust_remote_code,
        )
        if not any(p.is_meta for p in other.parameters()):  # verify() reports those
            other.to(device)
    if not asked.input and "labels" not in signature(other.forward).parameters:  # generated for a loss
        inputs.kwargs.pop("labels", None)
    with _printing_aside():
        if asked.copy_weights:
            Layout(model, other, names, weights).copy()
        verification = verify(model, other, inputs, names=names, weights=weights)
    _show(verification.to_json() if asked.json else verification)
    if not asked.copy_weights and any(row.inputs == STATE_DICT and not row.ok for row in verification.rows):
        print("te-transform: to compare with the first model's weights, pass --copy-weights", file=sys.stderr)
    return 0 if verification else 1


def _renamed(text: str) -> tuple[str, str | None]:
    old, equals, new = text.partition("=")
    if not equals:
        raise OptionError(f"expected OLD=NEW for --names, got {text!r}; OLD= leaves a name out")
    return old, new or None


def run_tune(asked: argparse.Namespace) -> int:
    model, inputs = _loaded(asked, on_meta=False)
    inputs = replace(inputs, invented=False)  # the user chose their sizes
    with _printing_aside():
        tuned = report_of(convert(model, inputs, inplace=True, compile="auto", **_options(asked)))
    kept = (
        f'stored in {timing.file()} for convert(..., compile="auto") with the same model and inputs; delete '
        "this file to time again"
    )
    _write(asked, tuned, "\n".join([*tuned.all_timings(), kept if tuned.chosen else "nothing is stored"]))
    return 0


def run_profile(asked: argparse.Namespace) -> int:
    """Print a profile on rank 0, and return 1 if a step of any rank exceeds the budget."""
    if asked.device == "cuda" and not torch.cuda.is_available():
        raise OptionError("expected a GPU for --device cuda, got none; pass --device cpu, or leave it out")
    model, inputs = _loaded(asked, on_meta=False)
    with _printing_aside(), status("profiling"):
        step_profile = profile(model, inputs, plan=not asked.no_plan)
    if is_first_rank():
        if asked.html:
            step_profile.to_html(asked.html)
        _show(step_profile.to_json() if asked.json else step_profile)
    slowest = max([step_profile.seconds, *(rank.seconds for rank in step_profile.ranks)])
    if asked.budget is None or slowest <= asked.budget:
        return 0
    if is_first_rank():
        why = f"expected a step of at most {timing.duration(asked.budget)}, got {timing.duration(slowest)}"
        print(f"te-transform: {why}", file=sys.stderr)
    return 1


def _write(asked: argparse.Namespace, report: Report, shown: Any, **more: Any) -> None:
    """Write the HTML page if requested, then print `shown`, or everything as JSON."""
    if asked.html:
        try:
            report.to_html(asked.html)
        except OSError as error:
            raise OptionError(
                f"expected a writable file for --html, got {asked.html} ({error.strerror})"
            ) from error
    _show(as_json(report.as_data() | more) if asked.json else shown)


def _options(asked: argparse.Namespace) -> dict[str, Any]:
    names = "backend", "recipe", "approximate", "pad_vocabulary", "skip"
    given = {name: getattr(asked, name) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def _loaded(asked: argparse.Namespace, on_meta: bool) -> tuple[nn.Module, Inputs]:
    """Build the model and its inputs."""
    with _printing_aside(), status(f"building {asked.model}"):
        return _load_model(asked, on_meta)


def _load_model(asked: argparse.Namespace, on_meta: bool) -> tuple[nn.Module, Inputs]:
    dtype = None if asked.dtype is None else getattr(torch, asked.dtype)
    model = load(
        asked.model,
        on_meta=on_meta,
        dtype=dtype,
        layers=asked.layers,
        trust_remote_code=asked.trust_remote_code,
    )
    if not on_meta and torch.cuda.is_available() and getattr(asked, "device", None) != "cpu":
        model.cuda()
    if asked.command != "profile":  # a profile takes converted and wrapped models, too
        check_model(model, asked.command)
    model.train(not asked.inference)
    if asked.input:
        if asked.batch or asked.length:
            raise OptionError(
                "expected --input without --batch and --length, which are the sizes of generated inputs, got "
                "both; leave --batch and --length out"
            )
        return model, inputs_of(asked.input, model)
    inputs = _generate_inputs(
        model, asked.batch or asked.usual_batch, _length(model, asked), bool(asked.length)
    )
    is_language_model = type(model).__name__.endswith(_LANGUAGE_MODELS) and "input_ids" in inputs.kwargs
    if is_language_model and not asked.inference:
        inputs = replace(inputs, kwargs={**inputs.kwargs, "labels": inputs.kwargs["input_ids"]})
    return model, inputs


def _length(model: nn.Module, asked: argparse.Namespace) -> int:
    """Return the tokens per row: --length, else the default, limited by the positions of the config.

    A config of images and text has the number of positions in its text config.
    """
    allowed, name = positions(model)
    if asked.length and asked.length > allowed:
        raise OptionError(
            f"expected --length of at most {allowed} ({name}), got {asked.length}; pass a smaller one, or a "
            "config with more positions"
        )
    return asked.length or min(asked.usual_length, int(allowed))


def _generate_inputs(model: nn.Module, batch: int, length: int, exactly: bool) -> Inputs:
    try:
        return invent(model, batch, length, exactly)
    except (RuntimeError, TypeError) as error:
        raise OptionError(
            "expected --batch and --length that fit, got an error for --batch "
            f"{batch} and --length {length} ({in_a_line(error)}); pass smaller numbers"
        ) from error


def _expected_counts(texts: Sequence[str]) -> dict[str, int]:
    expected: dict[str, int] = {}
    for rule, count in map(_expectation, texts):
        if expected.setdefault(rule, count) != count:
            raise OptionError(
                f"expected one number per rule for --expect, got {rule}={expected[rule]} and {rule}={count}"
            )
    return expected


def _expectation(text: str) -> tuple[str, int]:
    rule, _, count = text.partition("=")
    known = [rule.name for rule in PIPELINE]
    if rule not in known or not count.isdecimal():
        hint = "" if rule in known else did_you_mean(rule, known)
        raise OptionError(
            f"expected RULE=N for --expect, with a rule of {', '.join(known)}, got {text!r}{hint}"
        )
    return rule, int(count)


def run_explain(asked: argparse.Namespace) -> int:
    """Print what a user's own rule rewrites, and when it refuses."""
    rule = imported(asked.rule)
    if not isinstance(rule, Rule):
        raise LoadError(f"expected a te_transform.Rule at {asked.rule!r}, got a {type(rule).__name__}")
    with _printing_aside(), status("capturing the example of the rule"):
        lines = [*explanation(rule)]
    print("\n".join(lines))
    return 0


def _show(what: Any) -> None:
    """Print in color and at full width on a terminal, as plain text elsewhere."""
    if isinstance(what, str):
        print(what)
    elif sys.stdout.isatty():
        Console().print(what)
    else:
        print(as_text(what, sys.stdout.encoding))
