"""Hooks that a forward registers on tensors which it has computed."""

from __future__ import annotations

import functools
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

from te_transform.graph.dynamo_patches import Patch, leave_forward_to_user


def hook_patches() -> Iterator[Patch]:
    """Yield the dynamo methods that trace the hooks of tensors, with their wrappers.

    A hook becomes a part of the graph, or the forward is not captured. Between two graphs, a hook would miss
    the part of the gradient that a fused op or a compiled graph computes inside.
    """
    yield TensorVariable, "_method_register_hook", _hook_in_graph
    yield TensorVariable, "method_attr_retain_grad", _no_retained_gradient


def _hook_in_graph(own: Callable[..., Any]) -> Callable[..., Any]:
    """Trace a hook that reads only its arguments: dynamo reads other values before the backward does."""

    @functools.wraps(own)
    def register(self: TensorVariable, tx: Any, name: str, hook: VariableTracker) -> Any:
        if self.source is not None:
            return own(self, tx, name, hook)
        if _reads_only_arguments(hook):
            with suppress(Unsupported):
                return own(self, tx, name, hook)
        leave_forward_to_user("it registers a hook that reads or writes more than its arguments")

    return register


def _no_retained_gradient(own: Callable[..., Any]) -> Callable[..., Any]:
    """Leave a forward that retains the gradient of a tensor to the user's own code."""

    @functools.wraps(own)
    def look_up(self: TensorVariable, tx: Any) -> Any:
        if self.source is not None:
            return own(self, tx)
        leave_forward_to_user("it retains the gradient of a tensor that it computed")

    return look_up


def _reads_only_arguments(hook: VariableTracker) -> bool:
    """Return True if a function reads its arguments and Python modules only."""
    if not isinstance(hook, (UserFunctionVariable, NestedUserFunctionVariable)):
        return isinstance(hook, TorchInGraphFunctionVariable)
    code, variables = hook.get_code(), hook.get_globals()
    named = [variables[name] for name in code.co_names if name in variables]
    return not (hook.has_self() or code.co_freevars) and all(isinstance(v, ModuleType) for v in named)
