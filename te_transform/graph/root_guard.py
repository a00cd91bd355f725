"""Guards that evaluate expressions, for questions that dynamo's managers of single objects cannot ask."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Hashable
from typing import Any

from torch._dynamo import guards
from torch._guards import Guard


def guard_at_root(builder: Any, guard: Guard, name: str, ask: Callable[[Any], Hashable], told: str) -> None:
    """Guard the current answer of `ask` for the value of an expression such as "L['self'].held"."""
    code, known = compile(name, "<guard>", "eval"), _globals_of(builder)
    answer = ask(value_of(builder, name))

    def is_same(local_names: dict[str, Any]) -> bool:
        try:
            return ask(eval(code, known, {"L": local_names})) == answer
        except Exception:  # the value is not where it was
            return False

    builder.guard_manager.root.add_lambda_guard(is_same, description(told, answer, guard), guard.user_stack)


def description(question: str, answer: Hashable, guard: Guard) -> list[str]:
    """Return the text of a guard, which differs for each answer."""
    said = f"{question} == {reprlib.repr(answer)} (hash {hash(answer)})"
    return guards.get_verbose_code_parts([said], guard)


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
