"""The command line: `te-transform`, or `python -m te_transform`.

It exits with 0; with 1 where a model is not fused as expected, or not verified; with 2 where what was given
cannot be used, and a sentence on stderr says why.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Column, Table
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from te_transform.backends import BackendError
from te_transform.config_file import LoadError, read_config
from te_transform.convert import convert
from te_transform.explain import explanation
from te_transform.graph.inputs import BATCH, InputError, Inputs, TraceError, invent
from te_transform.graph.nodes import dtype_name
from te_transform.inspect import inspect
from te_transform.load import imported, inputs_of, load
from te_transform.passes import PIPELINE
from te_transform.plan.model import ModelError, check_model
from te_transform.plan.options import OptionError
from te_transform.plan.precision_plan import PrecisionError
from te_transform.plan.rule import Rule
from te_transform.pretrained import config_of
from te_transform.report.page import versions
from te_transform.report.report import ExpectationError, Report
from te_transform.report.sentences import told_by
from te_transform.reporting import report as report_of
from te_transform.runtime import timing
from te_transform.runtime.console import in_a_line, status
from te_transform.verify.verify import verify

BAD_INPUT = (BackendError, InputError, LoadError, ModelError, OptionError, PrecisionError, TraceError)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WIDTH = 140  # of a table where there is no terminal
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")  # whose labels are their ids
_SEVERAL: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}  # given once, or more often
# how many tokens a row may have: the names that configs of transformers have for it
_POSITIONS = ("max_position_embeddings", "max_target_positions", "max_decoder_position_embeddings")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status.

    Args:
        arguments: those of the command line; None: of this process.
    """
    asked = _parser().parse_args(arguments)
    try:
        with _quiet():
            code = asked.run(asked)
        sys.stdout.flush()
        return code
    except BAD_INPUT as error:
        hint = "\nHere example inputs are told by --input." * isinstance(error, (InputError, TraceError))
        print(f"te-transform: {error}{hint}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # as of `| head`
        sys.stderr.close()
        return 0
    except OSError as error:  # as of a disk that is full
        print(f"te-transform: {error}", file=sys.stderr)
        with suppress(OSError):  # Python would write what is left at its end, and tell of it again
            sys.stdout.close()
        return 2


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the logs and the warnings of dynamo, the stacks of what a sentence of ours says, and of
    torchao, which transformers imports where it is installed, on kernels that nothing here calls; unless
    asked for."""
    levels = {logger: logger.level for logger in map(logging.getLogger, ("torch", "torchao"))}
    try:
        with warnings.catch_warnings():
            if "TORCH_LOGS" not in os.environ:
                for logger in levels:
                    logger.setLevel(logging.CRITICAL)
                warnings.filterwarnings("ignore", module=r"torch\._dynamo\.")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def _printing_aside() -> redirect_stdout:
    """What the user's code prints meanwhile is no part of what is asked for, as JSON it could not be read."""
    return redirect_stdout(sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="te-transform", description="Transformers on fused ops.")
    parser.add_argument("--version", action="version", version=versions())
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    planned = commands.add_parser("inspect", help="what would be fused, and why not more, on any machine")
    _add_model(planned, length=2048, backend="te")
    _add_output(planned)
    planned.add_argument(
        "--expect", **_SEVERAL, metavar="RULE=N", help="fail unless so many places are fused"
    )
    planned.add_argument(
        "--times", action="store_true", help="predict what a call takes on an H100 in each way to run it"
    )
    planned.set_defaults(run=_inspect)

    compared = commands.add_parser("verify", help="convert, and compare outputs and gradients")
    _add_model(compared, length=64, backend="auto")
    _add_output(compared)
    compared.set_defaults(run=_verify)

    tuned = commands.add_parser("tune", help="time each way to run it here, and keep what is the fastest")
    _add_model(tuned, length=2048, backend="auto")
    _add_output(tuned)
    tuned.set_defaults(run=_tune)

    explained = commands.add_parser("explain", help="what a rule rewrites, and when it does not")
    rules = ", ".join(rule.name for rule in PIPELINE)
    explained.add_argument(
        "rule", nargs="?", metavar="RULE", help=f"one of {rules}, or package.module:RULE of your own"
    )
    explained.set_defaults(run=_explain)

    tried = commands.add_parser("models", help="what was converted and compared, and what is fused in it")
    tried.add_argument("name", nargs="?", default="", help="a part of a model's name")
    tried.set_defaults(run=_models)
    return parser


def _add_model(parser: argparse.ArgumentParser, length: int, backend: str) -> None:
    parser.add_argument("model", help="package.module:factory, a folder with a config.json, or a config")
    parser.add_argument("--batch", type=_positive, help=f"rows of the example ({BATCH})")
    parser.add_argument(
        "--length", type=_positive, help=f"tokens of a row ({length}, or what the model has positions for)"
    )
    parser.add_argument("--layers", type=_positive, default=None, help="of a config: fewer than it says")
    parser.add_argument("--dtype", choices=DTYPES, default=None, help="of a config's model (its own)")
    parser.add_argument("--backend", choices=("auto", "te", "torch"), default=backend, help=f"({backend})")
    parser.add_argument("--recipe", default=None, help="fp8-delayed, fp8-current, fp8-block or mxfp8")
    parser.add_argument("--approximate", action="store_true", help="allow rules that change the numbers")
    parser.add_argument("--pad-vocabulary", action="store_true", help="allow the rule pad_vocabulary")
    parser.add_argument("--inference", action="store_true", help="in evaluation, without a backward")
    parser.add_argument("--skip", **_SEVERAL, metavar="GLOB", help="paths of modules left alone")
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="[NAME=]SHAPE[:DTYPE[:HIGH]]",
        help="an example input, as 2x16x64 or mask=2x16:bool or 2x16:int64:1000, integers below 1000; else "
        "they are invented, if the model says what it reads",
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the Python code that a config names"
    )
    parser.set_defaults(usual_length=length)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--html", type=_page, metavar="FILE", help="write the report and both graphs to this page"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _page(text: str) -> Path:
    """Asked before anything is planned or timed, which takes long and would be lost."""
    path, what = Path(text), ""
    if path.is_dir():
        what = "is a folder"
    elif not path.parent.is_dir():
        what = "is in no folder that there is"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        what = "is not to be written by this user"
    if what:
        raise argparse.ArgumentTypeError(f"{text!r} {what}, a file that can be written is needed")
    return path


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _inspect(asked: argparse.Namespace) -> int:
    expected = _expected(asked.expect)
    model, inputs = _loaded(asked, on_meta=True)
    options = {"compile": "auto" if asked.times else False, **_options(asked)}
    try:
        with _printing_aside(), status("capturing"):
            report = inspect(model, inputs, **options)
    except TraceError as error:
        if not isinstance(error.__cause__, DataDependentOutputException):
            raise
        model, inputs = _loaded(asked, on_meta=False)
        with _printing_aside(), status("capturing with weights, which the forward branches on"):
            report = inspect(model, inputs, **options)
    report = replace(report, notes=(*report.notes, *_notes_of(asked, model)))
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


def _verify(asked: argparse.Namespace) -> int:
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


def _tune(asked: argparse.Namespace) -> int:
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
    return {name: getattr(asked, name) for name in names}


def _loaded(asked: argparse.Namespace, on_meta: bool) -> tuple[nn.Module, Inputs]:
    with _printing_aside(), status(f"building {asked.model}"):
        return _built(asked, on_meta)


def _built(asked: argparse.Namespace, on_meta: bool) -> tuple[nn.Module, Inputs]:
    dtype = None if asked.dtype is None else DTYPES[asked.dtype]
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
    inputs = _invented(model, asked.batch or BATCH, _length(model, asked))
    is_language_model = type(model).__name__.endswith(_LANGUAGE_MODELS) and "input_ids" in inputs.kwargs
    if is_language_model and not asked.inference:
        inputs = replace(inputs, kwargs={**inputs.kwargs, "labels": inputs.kwargs["input_ids"]})
    return model, inputs


def _length(model: nn.Module, asked: argparse.Namespace) -> int:
    """The tokens of a row: as many as are asked for; else the usual number, or those that there are positions
    for, which a config of images and text has in its text's."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    said = [(getattr(each, name, None), name) for each in (config, text) for name in _POSITIONS]
    # XLNet's config has -1 where there is no limit
    allowed, name = min(((n, name) for n, name in said if n and n > 0), default=(sys.maxsize, ""))
    if asked.length and asked.length > allowed:
        raise OptionError(
            f"--length is {asked.length}, the configuration allows {allowed} ({name}): pass at most that, or "
            "a configuration with more positions"
        )
    return asked.length or min(asked.usual_length, int(allowed))


def _invented(model: nn.Module, batch: int, length: int) -> Inputs:
    try:
        return invent(model, batch, length)
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


def _explain(asked: argparse.Namespace) -> int:
    if asked.rule is None:
        for rule in PIPELINE:
            _show(f"{rule.name}: {told_by(rule)[0]}")
        return 0
    known = {rule.name: rule for rule in PIPELINE}
    rule = known[asked.rule] if asked.rule in known else _own_rule(asked.rule, known)
    with _printing_aside(), status("capturing its example"):
        lines = [*explanation(rule)]
    _show("\n".join(lines))
    return 0


def _own_rule(name: str, known: Iterable[str]) -> Rule:
    if not all(name.partition(":")):
        raise LoadError(
            f"there is no rule {name!r}: one of {', '.join(known)}, or package.module:RULE is needed"
        )
    rule = imported(name)
    if not isinstance(rule, Rule):
        raise LoadError(f"{name!r} is a {type(rule).__name__}, a te_transform.Rule is needed")
    return rule


def _models(asked: argparse.Namespace) -> int:
    """The lines of docs/models.md's tables, with the counts of each rule."""
    page = resources.files("te_transform").joinpath("models.md").read_text("utf-8")
    tables = [line.strip("| ") for line in page.splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip(" `") for cell in line.split("|")] for line in tables)
    table = Table(*(Column(name, overflow="fold") for name in head), box=box.SIMPLE_HEAD)
    wanted = _letters(asked.name)  # the page has gpt2 for what others call GPT-2
    for names, *counts in rows:
        found = [name for name in names.split(", ") if wanted in _letters(name)]
        if found and counts[0].isdigit():  # no head of another table
            table.add_row(", ".join(found), *counts)
    if not table.row_count:
        raise LoadError(f"no model of {asked.name!r} was tried, te-transform inspect says what is fused")
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)
    return 0


def _letters(name: str) -> str:
    return re.sub(r"[-_. ]", "", name.lower())


def _show(what: Any) -> None:
    """On a terminal in color and its width, elsewhere as plain text."""
    if sys.stdout.isatty() and not isinstance(what, str):
        Console().print(what)
    else:
        print(what)
