"""Limit recompiles of a forward that reads a value which changes with each call.

Dynamo guards every value that a forward reads. A counter, a schedule, a growing list, a hook registered for
one call or other frozen parameters make the guards of all graphs fail. A capture takes as long as thousands
of calls.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.guards import DeletedGuardManagerWrapper, get_guard_fail_reason_helper
from torch._dynamo.types import ConvertFrameReturn, DynamoFrameType

MOST_CAPTURES = 3  # captures of a module for different values of one expression
_CALLS_BEFORE_CAPTURE = 2  # calls with new hooks that run the user's code: many hooks exist for one call
_NEW = (
    "the first calls with a new hook, or with other frozen parameters, run your own code, because many hooks "
    "exist for one call"
)

# Modes, sizes and dtypes may have a graph each; dynamo makes varying sizes dynamic.
_NO_VALUE = ("GLOBAL_STATE", "tensor '", ".size()", ".stride()", "Unexpected recompilation", "BACKEND_MATCH")
_INTEGER = re.compile(r" == -?\d+$")
_HOOKS = re.compile(r"_hooks\b")
_ABSENT = re.compile(r"___dict_contains\('(\w+)', (\w+)\.__dict__\)")
# an attribute or an item of a variable or of its class, not a function
_PATH = re.compile(r"(?:type\([^()\s]+\)|[A-Za-z_]\w*)(?:\.\w+|\[[^]]+\])+(?![\w(])")
_GUARDED_NAME = re.compile(r"\b[A-Za-z_]\w*(?=\)*(?:\[\d+\])? ==)|(?<=^not )[A-Za-z_]\w*$")


# Dynamo makes an integer attribute of a module a graph input after two different values.
_DYNAMIC = {"allow_unspec_int_on_nn_module": True}


class Recompiles:
    """The captures of one forward, and the guards that failed for calls without a matching graph."""

    def __init__(self, tell: Callable[[str], None] | None) -> None:
        self.tell = tell  # receives the reason of a refusal; None: no call is refused
        # the module of each capture, by the compile id of the capture
        self.modules: dict[str, weakref.ref[nn.Module] | None] = {}
        # the last hooks and frozen parameters without a graph, and the number of consecutive calls with them
        self.last: tuple[Hashable, int] = ((), 0)

    def settings(self, frame: DynamoFrameType) -> Mapping[str, Any] | None:
        """Return the dynamo settings for the capture of a call, or None if the call runs the user's code."""
        if self.tell is None:
            return {}
        module = module_in_frame(frame)
        failed = [
            _FailedGuard.of(entry, frame)
            for entry in _debug_get_cache_entry_list(frame.f_code)
            if not isinstance(entry.guard_manager, DeletedGuardManagerWrapper)
            if self._is_of(str(entry.compile_id), module)
        ]
        guards = [guard for guard in failed if guard.is_of_value]
        is_of_hooks = any(guard.is_of_hooks for guard in guards)
        is_of_frozen = sum(guard.is_of_frozen for guard in failed) >= MOST_CAPTURES
        passing = _hooks_of(module) if is_of_hooks else (), _frozen_in(module) if is_of_frozen else ()
        if (is_of_hooks or is_of_frozen) and self._are_new(passing):
            self.tell(_NEW)
            return None
        for guard in guards:
            if len({other.text for other in guards if other.subject == guard.subject}) >= MOST_CAPTURES:
                self.tell(guard.sentence())
                return None
        return _DYNAMIC if any(guard.is_of_integer for guard in guards) else {}

    def note(self, code: ConvertFrameReturn, frame: DynamoFrameType) -> None:
        """Record the module of a capture: each layer may have its own graph."""
        if code.guarded_code is not None:
            module = module_in_frame(frame)
            # a module may be false: its class may have a length
            self.modules[str(code.guarded_code.compile_id)] = None if module is None else weakref.ref(module)

    def _is_of(self, capture: str, module: nn.Module | None) -> bool:
        if capture not in self.modules:  # of another model: the wrappers of a decorator share one code object
            return False
        known = self.modules[capture]
        return (None if known is None else known()) is module

    def _are_new(self, passing: Hashable) -> bool:
        last, calls = self.last
        calls = calls + 1 if passing == last else 1
        self.last = passing, calls
        return calls <= _CALLS_BEFORE_CAPTURE


def module_in_frame(frame: DynamoFrameType) -> nn.Module | None:
    """Return the called module: the first module among the frame's local variables, or in its `*args`."""
    groups = (value if type(value) is tuple else (value,) for value in frame.f_locals.values())
    return next((value for value in chain.from_iterable(groups) if isinstance(value, nn.Module)), None)


def _hooks_of(module: nn.Module | None) -> Hashable:
    """Return weak references to all hooks in a module: the id of a deleted hook may be reused."""
    homes = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return tuple(
        (path, home, _reference(hook))
        for path, part in (() if module is None else module.named_modules())
        for home in homes
        for hook in vars(part).get(home, {}).values()
    )


def _frozen_in(module: nn.Module | None) -> Hashable:
    """Return the names of the parameters without gradients."""
    named = () if module is None else module.named_parameters()
    return tuple(name for name, parameter in named if not parameter.requires_grad)


def _reference(hook: Callable[..., Any]) -> Hashable:
    try:
        return weakref.ref(hook)
    except TypeError:
        return id(hook)


@dataclass(frozen=True)
class _FailedGuard:
    """A guard that failed for a call, as dynamo prints it."""

    text: str  # an expression such as "s.n == 3"
    line: str  # the file and the line of the user's code that reads the value

    @classmethod
    def of(cls, entry: Any, frame: DynamoFrameType) -> _FailedGuard:
        """Return the first guard of a graph that fails for the call."""
        said = get_guard_fail_reason_helper(
            entry.guard_manager, frame.f_locals, entry.compile_id, entry.backend
        ).partition("\n")[0]
        text, _, where = said.removeprefix(f"{entry.compile_id}: ").partition("  # ")
        path = where.rpartition("  # ")[2].partition(" in ")[0].strip()
        return cls(text.strip(), path.rpartition("/")[2])  # dynamo cuts off the first letters of the path

    @property
    def is_of_value(self) -> bool:
        return bool(self.subject) and not any(known in self.text for known in _NO_VALUE)

    @property
    def is_of_hooks(self) -> bool:
        return _HOOKS.search(self.text) is not None

    @property
    def is_of_frozen(self) -> bool:
        return "_parameters[" in self.text and "requires_grad mismatch" in self.text

    @property
    def is_of_integer(self) -> bool:
        return _INTEGER.search(self.text) is not None

    @property
    def subject(self) -> str:
        """The guarded expression, such as "self.n", with "#" for layer numbers; "" if there is none."""
        absent, match = _ABSENT.search(self.text), _PATH.search(self.text) or _GUARDED_NAME.search(self.text)
        path = f"{absent[2]}.{absent[1]}" if absent else match[0] if match else ""
        return re.sub(r"\d+", "#", path)

    def sentence(self) -> str:
        subject, at = _as_in_forward(self.subject), f" ({self.line})" if self.line else ""
        return (
            f"expected a constant value of {subject}, which the forward reads{at}, got more than "
            f"{MOST_CAPTURES} values, and further ones run the user's own code; store it in a buffer"
        )


def _as_in_forward(subject: str) -> str:
    """Return an expression of dynamo as a forward writes it.

    G holds the globals, and ___stack0 the result of a call that ends a graph.
    """
    if subject.startswith("___stack"):
        return "a call's result"
    return re.sub(r"(?:^G|\._modules)\['([^']+)'\]", lambda key: "." + key[1], subject).removeprefix(".")
