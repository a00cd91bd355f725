"""Guards on the names that a function looks up outside of itself: closures, builtins, imported modules.

Dynamo has no guard for these lookups:

- the closure and the default arguments of a method of an object that the forward makes, where writes are lost
  as well
- a builtin function that a global variable of the same name may hide later
- a module that an import statement finds in `sys.modules`
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch._dynamo.source import GlobalSource
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import UserFunctionVariable, UserMethodVariable
from torch._guards import Guard

from te_transform.graph.dynamo_patches import Patch, call_before
from te_transform.graph.lambda_guards import add_guard, notes_of_capture, while_unchanged


def name_patches() -> Iterator[Patch]:
    """Yield the dynamo methods that look up names, with their wrappers."""
    yield UserFunctionVariable, "bind_args", call_before(_name_function)
    yield InstructionTranslatorBase, "load_builtin_from_argval", call_before(_note_builtin)
    yield InstructionTranslatorBase, "import_source", call_before(_note_import)


def _name_function(self: Any, tx: Any, *_: Any) -> None:
    """Give a function without a source a global name, by which guards and writes reach what it holds."""
    function = self.fn
    holds_values = function.__closure__ or function.__defaults__ or function.__kwdefaults__
    if holds_values and self.get_source() is None and not _is_torch_module(function.__module__):
        self.source = GlobalSource(tx.output.install_global_by_id("__function", function))
        if isinstance(self, UserMethodVariable):
            self.source_fn = self.source


def _is_torch_module(module: str | None) -> bool:
    """Return True for the modules of PyTorch, which hide no builtins and keep no values in functions."""
    return (module or "").startswith("torch.")


class _LookedUp:
    """The builtins and modules that one capture looks up by name."""

    def __init__(self) -> None:
        self.builtins: defaultdict[int, set[str]] = defaultdict(set)  # by the id of a function's globals
        self.globals: dict[int, dict[str, Any]] = {}
        self.modules: dict[str, Any] = {}


def _note_builtin(self: Any, name: str) -> None:
    if not _is_torch_module(self.f_globals.get("__name__")):
        notes = notes_of_capture(_LookedUp, _find_the_same)
        notes.globals[id(self.f_globals)] = self.f_globals
        notes.builtins[id(self.f_globals)].add(name)


def _note_import(self: Any, name: str) -> None:
    if self.current_instruction.opname == "IMPORT_NAME":
        notes_of_capture(_LookedUp, _find_the_same).modules[name] = sys.modules[name]


def _find_the_same(builder: Any, guard: Guard, notes: _LookedUp) -> None:
    """Build the guard after all names were looked up."""
    looked_up = [(notes.globals[key].keys(), names) for key, names in notes.builtins.items()]
    imported = list(notes.modules.items())

    def is_same() -> bool:
        if not all(variables.isdisjoint(names) for variables, names in looked_up):
            return False
        return all(sys.modules.get(name) is module for name, module in imported)

    unchanged = while_unchanged([*notes.globals.values(), sys.modules], is_same)
    code_part = f"no global variable hides a builtin, and {sorted(notes.modules)} are the same modules"
    add_guard(builder.guard_manager.root, guard, lambda _: unchanged(), code_part)
