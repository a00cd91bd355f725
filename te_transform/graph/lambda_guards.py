"""Guards that call Python code, for questions that dynamo's own guards cannot ask."""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch._C._dynamo.guards import dict_version
from torch._dynamo import guards
from torch._dynamo.source import GlobalStateSource
from torch._guards import Guard, TracingContext

Notes = TypeVar("Notes")


def notes_of_capture(kind: type[Notes], build: Callable[[Any, Guard, Notes], None]) -> Notes:
    """Return the notes of a class that the current capture takes.

    The first call makes the notes, and installs the guard that `build` makes of them after the capture.
    """
    installed = TracingContext.get().guards_context.dynamo_guards
    taken = vars(installed).setdefault("_te_transform_notes", {})
    if kind not in taken:
        taken[kind] = kind()
        installed.add(GlobalStateSource().make_guard(functools.partial(build, notes=taken[kind])))
    return taken[kind]


def add_guard(manager: Any, guard: Guard, is_same: Callable[[Any], bool], code_part: str) -> None:
    """Add a guard that calls `is_same` with the manager's value; `code_part` describes it in messages."""
    manager.add_lambda_guard(is_same, guards.get_verbose_code_parts([code_part], guard), guard.user_stack)


def while_unchanged(dicts: list[dict[Any, Any]], is_same: Callable[[], bool]) -> Callable[[], bool]:
    """Return a function that calls `is_same` only if a dict has changed since the last call that was true."""
    known: list[int] = []

    def ask() -> bool:
        nonlocal known
        versions = list(map(dict_version, dicts))
        if versions == known:
            return True
        if is_same():
            known = versions
            return True
        return False

    return ask


def guard_at_root(
    builder: Any, guard: Guard, name: str, ask: Callable[[Any], Hashable], question: str
) -> None:
    """Guard the current answer of `ask` for the value of an expression such as "L['self'].held".

    The expression is evaluated once all other guards hold: in another dict, a missing key may be added.
    """
    code, known = compile(name, "<guard>", "eval"), _globals_of(builder)
    answer = ask(value_of(builder, name))

    def is_same(local_names: dict[str, Any]) -> bool:
        try:
            return ask(eval(code, known, {"L": local_names})) == answer
        except Exception:  # the value is not where it was
            return False

    code_parts = guards.get_verbose_code_parts([description(question, answer)], guard)
    builder.guard_manager.root.add_epilogue_lambda_guard(is_same, code_parts, guard.user_stack)


def description(question: str, answer: Hashable) -> str:
    """Return the text of a guard, which differs for each answer."""
    return f"{question} == {reprlib.repr(answer)} (hash {hash(answer)})"


def value_of(builder: Any, name: str) -> Any:
    """Return the value of an expression at capture, or None if it has none."""
    try:
        return eval(name, _globals_of(builder), {"L": builder.scope["L"]})
    except Exception:  # for example the source of a value that the capture made
        return None


def _globals_of(builder: Any) -> dict[str, Any]:
    known = {**builder.scope, **guards._get_closure_vars()}
    del known["L"]  # the arguments of the captured call
    return known
