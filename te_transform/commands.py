"""The commands that need torch: inspect, verify, tune, and explain for a rule of the user's own."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from te_transform.backends import BackendError
from te_transform.config_file import LoadError, read_config
from te_transform.convert import convert
from te_transform.execution import timing
from te_transform.execution.console import in_a_line, status
from te_transform.explain import explanation
from te_transform.graph.inputs import InputError, Inputs, TraceError, invent, positions
from te_transform.graph.nodes import dtype_name
from te_transform.inspect import inspect
from te_transform.load import imported, inputs_of, load
from te_transform.passes import PIPELINE
from te_transform.plan.model import ModelError, check_model
from te_transform.plan.options import OptionError
from te_transform.plan.precision_plan import PrecisionError
from te_transform.plan.rule import Rule
from te_transform.pretrained import config_of
from te_transform.report.report import ExpectationError, Report
from te_transform.reporting import report as report_of
from te_transform.verify.verify import verify

_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")  # whose labels are their ids
BAD_INPUT = (BackendError, InputError, LoadError, ModelError, OptionError, PrecisionError, TraceError)


def _printing_aside() -> redirect_stdout:
    """What the user's code prints meanwhile is no part of what is asked for, as JSON it could not be read."""
    return redirect_stdout(sys.stderr)


def run_inspect(asked: argparse.Namespace) -> int:
    expected = _expected(asked.expect)
    model, inputs = _loaded(asked, on_meta=True)
    options = {"compile": "auto" if asked.times else False, **_options(asked)}
    if asked.backend is None and (asked.recipe or asked.times):
        options["backend"] = "te"  # no other backend has recipes and times
    try:
        with _printing_aside(), status("capturing"):
            report = inspect(model, inputs, **options)
    except TraceError as error:
        if not isinstance(error.__cause__, DataDependentOutputException):
            raise
        model, inputs = _loaded(asked, on_meta=False)
        with _printing_aside(), status("capturing with weights, which the forward branches on"):
            report = inspect(model, inputs, **options)
    inputs_told = [f"planned for the inputs ({report.inputs})"] * (report.memory is None)  # which has them
    report = replace(report, notes=(*report.notes, *inputs_told, *_notes_of(asked, model)))
    _write(asked, report, report)
    try:
        report.expect(**expected)
    except ExpectationError as error:
        print(f"te-transform: {error}", file=sys.stderr)
        return 1
    return 0


def _notes_of(asked: argparse.Namespace, model: nn.Module) -> Iterator[str]:
    """Yield what a config says, and the model was not built by."""
    if not Path(asked.model).exists():
        return
    told = read_config(config_of(Path(asked.model)), asked.trust_remote_code)
    yield from told.notes()
    if told.quantized:
        dtype = dtype_name(next(model.parameters()).dtype)
        yield (
            f"the config says that the weights are quantized ({told.quantized}), the plan is that of the "
            f"model with its weights in {dtype}: dequantize them before the conversion"
        )


def run_verify(asked: argparse.Namespace) -> int:
    model, inputs = _loaded(asked, on_meta=False)
    with _printing_aside():
        converted = convert(model, inputs, **_options(asked))
        try:
            found = verify(model, converted, inputs)
        except ValueError as error:
            raise OptionError(str(error)) from error
    _write(
        asked, report_of(converted), found, verified=bool(found), guilty=found.guilty, skipped=found.skipped
    )
    return 0 if found else 1


def run_tune(asked: argparse.Namespace) -> int:
    model, inputs = _loaded(asked, on_meta=False)
    inputs = replace(inputs, invented=False)  # their sizes were asked for
    with _printing_aside():
        tuned = report_of(convert(model, inputs, inplace=True, compile="auto", **_options(asked)))
    kept = f'kept for convert(..., compile="auto") of such a model with such inputs, in {timing.file()}'
    _write(asked, tuned, "\n".join([*tuned.all_timings(), kept]), chosen=tuned.chosen)
    return 0


def _write(asked: argparse.Namespace, report: Report, shown: Any, **more: Any) -> None:
    """The report as a page, if one is asked for; and print what there is to show, or all as JSON."""
    if asked.html:
        try:
            report.to_html(asked.html)
        except OSError as error:
            raise OptionError(
                f"--html has {asked.html}, which cannot be written ({error.strerror})"
            ) from error
    _show(json.dumps(_as_data(report) | more, indent=1) if asked.json else shown)


def _options(asked: argparse.Namespace) -> dict[str, Any]:
    names = "backend", "recipe", "approximate", "pad_vocabulary", "skip"
    given = {name: getattr(asked, name) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def _loaded(asked: argparse.Namespace, on_meta: bool) -> tuple[nn.Module, Inputs]:
    with _printing_aside(), status(f"building {asked.model}"):
        return _built(asked, on_meta)


def _built(asked: argparse.Namespace, on_meta: bool) -> tuple[nn.Module, Inputs]:
    dtype = None if asked.dtype is None else getattr(torch, asked.dtype)
    model = load(
        asked.model,
        on_meta=on_meta,
        dtype=dtype,
        layers=asked.layers,
        trust_remote_code=asked.trust_remote_code,
    )
    if not on_meta and torch.cuda.is_available():
        model.cuda()
    check_model(model, asked.command)
    model.train(not asked.inference)
    if asked.input:
        if asked.batch or asked.length:
            raise OptionError(
                "--batch and --length are the sizes of inputs that are invented, --input has its own: leave "
                "them out"
            )
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        return model, inputs_of(asked.input, device)
    inputs = _invented(model, asked.batch or asked.usual_batch, _length(model, asked), bool(asked.length))
    is_language_model = type(model).__name__.endswith(_LANGUAGE_MODELS) and "input_ids" in inputs.kwargs
    if is_language_model and not asked.inference:
        inputs = replace(inputs, kwargs={**inputs.kwargs, "labels": inputs.kwargs["input_ids"]})
    return model, inputs


def _length(model: nn.Module, asked: argparse.Namespace) -> int:
    """The tokens of a row: as many as are asked for; else the usual number, or those that there are positions
    for, which a config of images and text has in its text's."""
    allowed, name = positions(model)
    if asked.length and asked.length > allowed:
        raise OptionError(
            f"--length is {asked.length}, the configuration allows {allowed} ({name}): pass at most that, or "
            "a configuration with more positions"
        )
    return asked.length or min(asked.usual_length, int(allowed))


def _invented(model: nn.Module, batch: int, length: int, exactly: bool) -> Inputs:
    try:
        return invent(model, batch, length, exactly)
    except (RuntimeError, TypeError) as error:
        raise OptionError(
            f"--batch {batch} and --length {length} make no inputs ({in_a_line(error)}), smaller numbers are "
            "needed"
        ) from error


def _expected(told: Sequence[str]) -> dict[str, int]:
    expected: dict[str, int] = {}
    for rule, count in map(_expectation, told):
        if expected.setdefault(rule, count) != count:
            raise OptionError(
                f"--expect has {rule}={expected[rule]} and {rule}={count}, one number of a rule is needed"
            )
    return expected


def _expectation(text: str) -> tuple[str, int]:
    rule, _, count = text.partition("=")
    if rule not in {rule.name for rule in PIPELINE} or not count.isdecimal():
        known = ", ".join(rule.name for rule in PIPELINE)
        raise OptionError(f"--expect has {text!r}, RULE=N is needed, for a rule of {known}")
    return rule, int(count)


def _as_data(report: Report) -> dict[str, Any]:
    precision = report.precision
    return {
        "model": report.model,
        "fused": dict(report.counts),
        "sites": [
            {name: told for name, told in asdict(site).items() if name != "inside"} for site in report.sites
        ],
        "notes": report.all_notes(),
        "precision": None if precision is None else dict(precision.sites),
        "memory": None if report.memory is None else asdict(report.memory),
        "times": [asdict(each) for each in report.timings],
    }


def run_explain(asked: argparse.Namespace) -> int:
    """Print what a rule of the user's own rewrites, and when it does not."""
    rule = imported(asked.rule)
    if not isinstance(rule, Rule):
        raise LoadError(f"{asked.rule!r} is a {type(rule).__name__}, a te_transform.Rule is needed")
    with _printing_aside(), status("capturing its example"):
        lines = [*explanation(rule)]
    print("\n".join(lines))
    return 0


def _show(what: Any) -> None:
    """On a terminal in color and its width, elsewhere as plain text."""
    if sys.stdout.isatty() and not isinstance(what, str):
        Console().print(what)
    else:
        print(what)
