"""The command line: `te-transform`, or `python -m te_transform`.

It exits with 0; with 1 where a model is not fused as expected, or not verified; with 2 where what was given
cannot be used, and a sentence on stderr says why.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import Any

from te_transform.config_file import LoadError

WIDTH = 140  # of a table where there is no terminal
_BATCH = 2
_SEVERAL: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}  # given once, or more often


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status.

    Args:
        arguments: those of the command line; None: of this process.
    """
    asked = _parser().parse_args(arguments)
    try:
        run = asked.run(asked)  # which may import torch, and torch sets up its logs
        with _quiet():
            code = run(asked)
        sys.stdout.flush()
        return code
    except _bad_input() as error:
        hint = "\nHere example inputs are told by --input."
        named = type(error).__name__ in ("InputError", "TraceError")
        print(f"te-transform: {error}{hint * named}", file=sys.stderr)
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


def _bad_input() -> tuple[type[Exception], ...]:
    """Return the errors that a command explains; errors of modules that are not imported cannot occur."""
    commands = sys.modules.get("te_transform.commands")
    return (LoadError,) if commands is None else commands.BAD_INPUT


def _with_torch(name: str) -> Callable[[argparse.Namespace], Callable[[argparse.Namespace], int]]:
    """Return a function that imports a command which needs torch, for the parser."""
    return lambda asked: getattr(importlib.import_module("te_transform.commands"), name)


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


class _Version(argparse.Action):
    """Print the versions; they are looked up only when asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from te_transform.report.page import versions

        print(versions())
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="te-transform", description="Transformers on fused ops.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions of the packages")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    planned = commands.add_parser("inspect", help="what would be fused, and why not more, on any machine")
    _add_model(planned, length=2048)
    _add_output(planned)
    planned.add_argument(
        "--expect", **_SEVERAL, metavar="RULE=N", help="fail unless so many places are fused"
    )
    planned.add_argument(
        "--times", action="store_true", help="predict what a call takes on an H100 in each way to run it"
    )
    planned.set_defaults(run=_with_torch("run_inspect"))

    compared = commands.add_parser("verify", help="convert, and compare outputs and gradients")
    _add_model(compared, length=64)
    _add_output(compared)
    compared.set_defaults(run=_with_torch("run_verify"))

    tuned = commands.add_parser("tune", help="time each way to run it here, and keep what is the fastest")
    _add_model(tuned, length=2048)
    _add_output(tuned)
    tuned.set_defaults(run=_with_torch("run_tune"))

    explained = commands.add_parser("explain", help="what a rule rewrites, and when it does not")
    rules = ", ".join(_explanations())
    explained.add_argument(
        "rule", nargs="?", metavar="RULE", help=f"one of {rules}, or package.module:RULE of your own"
    )
    explained.set_defaults(run=_explaining)

    tried = commands.add_parser("models", help="what was converted and compared, and what is fused in it")
    tried.add_argument("name", nargs="?", default="", help="a part of a model's name")
    tried.set_defaults(run=lambda asked: _models)
    return parser


def _add_model(parser: argparse.ArgumentParser, length: int) -> None:
    parser.add_argument("model", help="package.module:factory, a folder with a config.json, or a config")
    parser.add_argument("--batch", type=_positive, help=f"rows of the example ({_BATCH})")
    parser.add_argument(
        "--length", type=_positive, help=f"tokens of a row ({length}, or what the model has positions for)"
    )
    parser.add_argument("--layers", type=_positive, default=None, help="of a config: fewer than it says")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="convert the weights to it (their own)"
    )
    parser.add_argument(
        "--backend",
        choices=("auto", "te", "torch"),
        help="(auto: te where it runs, else torch; inspect plans a recipe and --times on te)",
    )
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
    parser.set_defaults(usual_length=length, usual_batch=_BATCH)


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


def _explaining(asked: argparse.Namespace) -> Callable[[argparse.Namespace], int]:
    known = _explanations()
    if asked.rule is None or asked.rule in known:
        return _explain
    if not all(asked.rule.partition(":")):
        raise LoadError(
            f"there is no rule {asked.rule!r}: one of {', '.join(known)}, or package.module:RULE is needed"
        )
    return _with_torch("run_explain")(asked)


def _explain(asked: argparse.Namespace) -> int:
    known = _explanations()
    print(known[asked.rule] if asked.rule else "\n".join(text.partition("\n")[0] for text in known.values()))
    return 0


def _explanations() -> dict[str, str]:
    """Return what docs/explained.md has of each rule, by name and in order."""
    page = resources.files("te_transform").joinpath("explained.md").read_text("utf-8")
    return dict(re.findall(r"^## (\w+)\n\n````text\n(.*?)\n````$", page, re.DOTALL | re.MULTILINE))


def _models(asked: argparse.Namespace) -> int:
    """The lines of docs/models.md's tables, with the counts of each rule."""
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table

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
