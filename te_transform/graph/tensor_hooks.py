"""Hooks that a forward registers on tensors which it has computed."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any

from torch._dynamo.exc import Unsupported
from torch._dynamo.variables import (
    NestedUserFunctionVariable,
    TensorVariable,
    TorchInGraphFunctionVariable,
    UserFunctionVariable,
)
from torch._dynamo.variables.base import VariableTracker

from te_transform.graph.dynamo_patches import Patch, around, leave_forward_to_user

_WIDE_HOOK = "it registers a hook that reads or writes more than its argument; let it read its argument alone"
_RETAINED = (
    "it retains the gradient of a tensor that it computed; leave out retain_grad() if nothing reads it"
)
# instructions that read or write outside of a function, or make a function that may
_READ_ELSEWHERE = frozenset(("IMPORT_NAME", "LOAD_DEREF", "MAKE_FUNCTION", "STORE_DEREF", "STORE_GLOBAL"))


def hook_patches() -> Iterator[Patch]:
    """Yield the dynamo methods that trace the hooks of tensors, with their wrappers.

    A hook becomes a part of the graph, or the forward is not captured. Between two graphs, a hook would miss
    the part of the gradient that a fused op or a compiled graph computes inside.
    """
    yield TensorVariable, "_method_register_hook", around(_hook_in_graph)
    yield TensorVariable, "method_attr_retain_grad", around(_no_retained_gradient)


def _hook_in_graph(
    own: Callable[..., Any], self: TensorVariable, tx: Any, name: str, hook: VariableTracker
) -> Any:
    """Trace a hook that reads only its argument: dynamo reads other values before the backward does."""
    if self.source is not None:
        return own(self, tx, name, hook)
    if _reads_only_its_argument(hook):
        with suppress(Unsupported):
            return own(self, tx, name, hook)
    leave_forward_to_user(_WIDE_HOOK)


def _no_retained_gradient(own: Callable[..., Any], self: TensorVariable, tx: Any) -> Any:
    """Leave a forward that retains the gradient of a tensor to the user's own code."""
    if self.source is not None:
        return own(self, tx)
    leave_forward_to_user(_RETAINED)


def _reads_only_its_argument(hook: VariableTracker) -> bool:
    """Return True if a function reads nothing but its argument, constants and the torch package."""
    if not isinstance(hook, (UserFunctionVariable, NestedUserFunctionVariable)):
        return isinstance(hook, TorchInGraphFunctionVariable)
    code, variables = hook.get_code(), hook.get_globals()
    if (code.co_argcount, code.co_kwonlyargcount) != (1, 0):
        return False  # an object or the default of a further argument
    read = [(each.opname, each.argval) for each in dis.get_instructions(code)]
    are_of_torch = (_is_of_torch(variables.get(name)) for opname, name in read if opname == "LOAD_GLOBAL")
    return all(are_of_torch) and _READ_ELSEWHERE.isdisjoint(opname for opname, _ in read)


def _is_of_torch(value: Any) -> bool:
    return isinstance(value, ModuleType) and value.__name__.partition(".")[0] == "torch"
