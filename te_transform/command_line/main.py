"""The command line: `te-transform`, or `python -m te_transform`.

Exit status:

- 0: success.
- 1: a model is not fused as expected, fails verification, or takes longer than its budget.
- 2: the input cannot be used. A sentence on stderr says why.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import Any

from te_transform.config_file import LoadError
from te_transform.execution.console import status
from te_transform.graph.errors import in_a_line, is_from_user_code, message_of, raised_at
from te_transform.graph.keywords import did_you_mean

_BATCH = 2
_INPUTS = """On the command line, pass --input once for each argument:
  --input 2x16:int64:1000            integers below 1000, such as token ids
  --input 2x16x64                    floats
  --input mask=2x16:bool             an argument by its name; then name all of them
  --input batch.ids=2x16:int64:1000  an entry of an argument that is a dict"""
_SEVERAL: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}  # the option may be repeated


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    Args:
        arguments: The command-line arguments; None means those of this process.
    """
    asked = _parse(arguments)
    try:
        code = asked.run(asked)
        sys.stdout.flush()
        return code
    except _bad_input() as error:
        print(f"te-transform: {_options_of(error, asked)}{error}{_hint_of(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # for example with `| head`
        sys.stderr.close()
        return 0
    except OSError as error:  # for example a full disk
        print(f"te-transform: {message_of(error)}", file=sys.stderr)
        with suppress(OSError):  # else Python flushes at exit, and reports the error again
            sys.stdout.close()
        return 2
    except BaseException as error:
        if isinstance(error, Exception) and not is_from_user_code(error):
            raise
        print(
            f"te-transform: expected a model that runs, got "
            f"{in_a_line(error)}{raised_at(error)}; correct its code",
            file=sys.stderr,
        )
        return 2


def _options_of(error: Exception, asked: argparse.Namespace) -> str:
    """Return the options of the command for the arguments that an error is about, followed by a colon."""
    arguments = filter(asked.__contains__, getattr(error, "arguments", ()))
    options = ", ".join(f"--{name.replace('_', '-')}" for name in arguments)
    return options and f"{options}: "


def _hint_of(error: Exception) -> str:
    """Return the line of the user's code that failed on the inputs, and how to pass others."""
    if type(error).__name__ not in ("InputError", "TraceError"):
        return ""
    place = "" if error.__cause__ is None else raised_at(error.__cause__)
    return "\n".join(["", *([f"The error was raised{place}."] if place else []), _INPUTS])


def _bad_input() -> tuple[type[Exception], ...]:
    """Return the error types that a command reports as a sentence.

    Errors of modules that are not imported cannot occur.
    """
    commands = sys.modules.get("te_transform.command_line.commands")
    return (LoadError,) if commands is None else commands.BAD_INPUT


def _run_with_torch(asked: argparse.Namespace) -> int:
    """Import torch, and run the command."""
    with status("importing torch"):
        commands = importlib.import_module("te_transform.command_line.commands")
    with _quiet_logs():  # importing torch sets up its logs
        return getattr(commands, f"run_{asked.command}")(asked)


@contextmanager
def _quiet_logs() -> Iterator[None]:
    """Silence the logs of torch and torchao, unless TORCH_LOGS is set.

    dynamo logs stack traces for errors that are reported as one sentence here. transformers imports torchao
    if it is installed, which then logs about kernels that are never called here.
    """
    levels = {logger: logger.level for logger in map(logging.getLogger, ("torch", "torchao"))}
    try:
        if "TORCH_LOGS" not in os.environ:
            for logger in levels:
                logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


class _Version(argparse.Action):
    """The action of --version; it looks up the versions only when called."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from te_transform.execution.timing import versions

        print(versions())
        parser.exit()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments; the error for an unknown option suggests the correct name."""
    parser, commands = _parser()
    asked, unknown = parser.parse_known_args(arguments)
    if unknown:
        options = re.findall(r"--[a-z-]+", commands[asked.command].format_usage())
        hint = did_you_mean(unknown[0].partition("=")[0], options)
        if getattr(asked, "input", None) and not unknown[0].startswith("-"):
            hint = f"\n{_INPUTS}"
        commands[asked.command].error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return asked


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser, and those of the commands."""
    parser = argparse.ArgumentParser(prog="te-transform", description="Transformers on fused ops.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions of the packages")
    parser.set_defaults(run=_run_with_torch)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    planned = commands.add_parser("inspect", help="report what would be fused, and why not the rest")
    _add_model(planned, length=2048)
    _add_output(planned)
    planned.add_argument("--expect", **_SEVERAL, metavar="RULE=N", help="fail unless RULE fuses N sites")
    planned.add_argument(
        "--times", action="store_true", help="predict the time of a call on an H100 in each execution mode"
    )

    compared = commands.add_parser("verify", help="compare outputs and gradients of two models")
    _add_model(compared, length=64)
    _add_second(compared)
    _add_output(compared)

    tuned = commands.add_parser("tune", help="time each execution mode here, and store the fastest")
    _add_model(tuned, length=2048)
    _add_output(tuned)

    _add_profile(
        commands.add_parser("profile", help="report what each part of a step costs, and why it is slow")
    )

    explained = commands.add_parser("explain", help="explain what a rule rewrites, and when it refuses")
    rules = ", ".join(_explanations())
    explained.add_argument(
        "rule", nargs="?", metavar="RULE", help=f"one of {rules}, or your own rule as package.module:RULE"
    )
    explained.set_defaults(run=_explain)

    tried = commands.add_parser("models", help="list the tested models, and what is fused in them")
    tried.add_argument("name", nargs="?", default="", help="part of a model's name")
    tried.set_defaults(run=_models)
    return parser, commands.choices


def _add_profile(parser: argparse.ArgumentParser) -> None:
    _add_subject(parser, length=512)
    _add_output(parser, "profile")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    parser.add_argument(
        "--budget", type=_parse_duration, metavar="TIME", help="fail if a step takes longer, such as 120ms"
    )
    parser.add_argument("--no-plan", action="store_true", help="leave out what convert() would change")


def _add_model(parser: argparse.ArgumentParser, length: int) -> None:
    """Add the arguments for a model, its inputs and the options of a conversion."""
    _add_subject(parser, length)
    parser.add_argument(
        "--backend",
        choices=("auto", "te", "torch"),
        help="default: auto, te if it runs here, else torch; inspect plans a recipe and --times on te",
    )
    parser.add_argument(
        "--recipe",
        default=None,
        help="fp8-delayed, fp8-current (or fp8-delayed-fast, fp8-current-fast), fp8-block or mxfp8",
    )
    parser.add_argument("--approximate", action="store_true", help="allow rules that change the numbers")
    parser.add_argument("--pad-vocabulary", action="store_true", help="allow the rule pad_vocabulary")
    parser.add_argument("--skip", **_SEVERAL, metavar="GLOB", help="paths of modules to leave alone")


def _add_subject(parser: argparse.ArgumentParser, length: int) -> None:
    """Add the arguments for a model and its inputs."""
    parser.add_argument("model", help="package.module:factory, a folder with a config.json, or a config")
    parser.add_argument("--batch", type=_positive, help=f"batch size of the example (default: {_BATCH})")
    parser.add_argument(
        "--length", type=_positive, help=f"tokens per row (default: {length}, at most the model's positions)"
    )
    parser.add_argument("--layers", type=_positive, default=None, help="use fewer layers than the config has")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="convert the weights to this dtype"
    )
    parser.add_argument("--inference", action="store_true", help="evaluation mode, without a backward")
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="[NAME=]SHAPE[:DTYPE[:HIGH]]",
        help="an example input, such as 2x16x64, mask=2x16:bool, 2x16:int64:1000 (integers below 1000) or "
        "batch.ids=2x16:int64:1000 (an entry of a dict); one for each argument; default: generated from the "
        "config or the forward's signature",
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run Python code that a config names"
    )
    parser.set_defaults(usual_length=length, usual_batch=_BATCH)


def _add_second(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--against", metavar="MODEL", help="the second model; default: the first, converted by te_transform"
    )
    parser.add_argument(
        "--names",
        **_SEVERAL,
        metavar="OLD=NEW",
        help="other names of modules and weights in the second model",
    )
    parser.add_argument(
        "--weights",
        metavar="package.module:function",
        help="a differentiable function that makes the second model's state dict from the first's",
    )
    parser.add_argument(
        "--copy-weights", action="store_true", help="load the first model's weights into the second"
    )


def _add_output(parser: argparse.ArgumentParser, what: str = "report") -> None:
    page = "report and both graphs" if what == "report" else what
    parser.add_argument("--html", type=_page, metavar="FILE", help=f"write the {page} to this HTML file")
    parser.add_argument("--json", action="store_true", help=f"print the {what} as JSON")


def _page(text: str) -> Path:
    """Check that the HTML file can be written, before any long-running work."""
    path, what = Path(text), ""
    if os.path.isdir(path):  # Path.is_dir() raises for names that are too long
        what = "is a folder"
    elif not os.path.isdir(path.parent):
        what = "is in a folder that does not exist"
    elif not os.access(path if os.path.exists(path) else path.parent, os.W_OK):
        what = "cannot be written by this user"
    if what:
        raise argparse.ArgumentTypeError(f"expected a writable file, got {text!r}, which {what}")
    return path


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def _parse_duration(text: str) -> float:
    """Parse a duration such as 120ms."""
    matched = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*(us|ms|s)", text)
    if not matched or not float(matched[1]):
        raise argparse.ArgumentTypeError(
            f"expected a time with a unit, such as 120ms, 1.5s or 900us, got {text!r}"
        )
    return float(matched[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[matched[2]]


def _explain(asked: argparse.Namespace) -> int:
    known = _explanations()
    if asked.rule is None:
        print("\n".join(text.partition("\n")[0] for text in known.values()))
    elif asked.rule in known:
        print(known[asked.rule])
    elif all(asked.rule.partition(":")):
        return _run_with_torch(asked)
    else:
        raise LoadError(
            f"expected a rule, one of {', '.join(known)}, or package.module:RULE, got {asked.rule!r}"
            f"{did_you_mean(asked.rule, known)}"
        )
    return 0


def _explanations() -> dict[str, str]:
    """Return the text of docs/explained.md for each rule, by name and in order."""
    page = resources.files("te_transform").joinpath("explained.md").read_text("utf-8")
    return dict(re.findall(r"^## (\w+)\n\n````text\n(.*?)\n````$", page, re.DOTALL | re.MULTILINE))


def _models(asked: argparse.Namespace) -> int:
    """Print the rows of docs/models.md's tables: models, their fused sites, and what hinders more."""
    page = resources.files("te_transform").joinpath("models.md").read_text("utf-8")
    tables = [line for line in page.splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip(" `") for cell in line.split("|")[1:-1]] for line in tables)
    wanted, found = _letters(asked.name), []  # the page writes gpt2 for GPT-2
    for names, *counts, reasons in rows:
        matching = [name for name in names.split(", ") if wanted in _letters(name)]
        if matching and counts[0].isdigit():  # skips the headers of further tables
            fused = (f"{rule} {count}" for rule, count in zip(head[1:], counts, strict=False) if count != "0")
            found += [_wrapped(", ".join(matching), ""), _wrapped(", ".join(fused) or "nothing is fused")]
            found += [_wrapped(f"not more: {reasons}")] if reasons else []
    if not found:
        known = ", ".join(names for names, *_ in rows).split(", ")
        raise LoadError(
            f"expected part of a tested model's name, got {asked.name!r}; run te-transform inspect on the "
            f"model{did_you_mean(asked.name, known)}"
        )
    print("\n".join(found))
    return 0


def _wrapped(line: str, indent: str = "  ") -> str:
    width = shutil.get_terminal_size().columns
    return textwrap.fill(line, width, initial_indent=indent, subsequent_indent="  ")


def _letters(name: str) -> str:
    return re.sub(r"[-_. ]", "", name.lower())
