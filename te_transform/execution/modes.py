"""Torch function modes for captured graphs, hidden from dynamo, which would trace through them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import _VF
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _get_current_function_mode_stack,
)
from torch.utils._device import DeviceContext

from te_transform.graph.context import set_to

NOTHING = contextlib.nullcontext()
"""A context for most calls, in which no mode is on: a context manager that is made anew takes longer."""

_aside: ContextVar[tuple[GraphMode, ...]] = ContextVar("_aside", default=())
# Every dropout of torch.nn and torch.nn.functional calls one of these functions of torch._VF.
_RANDOM_NAMES = (
    "dropout", "dropout_", "alpha_dropout", "alpha_dropout_",
    "feature_dropout", "feature_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_",
)  # fmt: skip


class GraphMode(TorchFunctionMode):
    """A mode that sees every torch call of a converted model, inside and outside of graphs."""


class UntilGraph(TorchFunctionMode):
    """A mode that sees the torch calls of the user's code until the first graph runs."""

    def __exit__(self, *error: Any) -> None:
        if _get_current_function_mode() is self:  # set_aside() may have ended it
            super().__exit__(*error)


def is_foreign_mode_on() -> bool:
    """Return True if a user's mode is active. Dynamo traces its effects, and the graph would repeat them."""
    if not torch._C._len_torch_function_stack():
        return False
    modes = _get_current_function_mode_stack()
    return any(not isinstance(mode, (GraphMode, UntilGraph, DeviceContext)) for mode in modes)


def is_graph_mode_on() -> bool:
    """Return True if a mode of te_transform is active."""
    is_on = torch._C._len_torch_function_stack() > 0
    return is_on and isinstance(_get_current_function_mode(), GraphMode)


def is_dispatch_mode_on() -> bool:
    """Return True if a dispatch mode is active, such as that of selective checkpoints or fake tensors."""
    return torch._C._len_torch_dispatch_stack() > 0


def set_aside() -> contextlib.AbstractContextManager[None]:
    """Disable the graph modes while dynamo's callable runs, and end those that last until the first graph.

    Python code between two graphs runs without the modes, except for dropouts.
    """
    return _without_modes() if torch._C._len_torch_function_stack() or _aside.get() else NOTHING


@contextlib.contextmanager
def _without_modes() -> Iterator[None]:
    taken: list[GraphMode] = []
    while isinstance(mode := _get_current_function_mode(), (GraphMode, UntilGraph)):
        mode.__exit__(None, None, None)
        if isinstance(mode, GraphMode):
            taken.insert(0, mode)
    try:
        with set_to(_aside, tuple(taken)), _dropouts_in_modes() if taken else NOTHING:
            yield
    finally:
        for mode in taken:
            mode.__enter__()


def put_back() -> contextlib.AbstractContextManager[None]:
    """Enter the modes that were set aside, for a call of a captured graph."""
    modes = _aside.get()
    return _entered(modes) if modes else NOTHING


@contextlib.contextmanager
def _entered(modes: Sequence[GraphMode]) -> Iterator[None]:
    with set_to(_aside, ()), contextlib.ExitStack() as stack:  # a nested graph must not enter them twice
        for mode in modes:
            stack.enter_context(mode)
        yield


@contextlib.contextmanager
def _dropouts_in_modes() -> Iterator[None]:
    """Run dropouts outside of graphs in the modes that were set aside.

    Dynamo captures F.dropout as one operation and does not trace its body, so captures do not change.
    """
    vars(_VF).update({name: _in_modes(getattr(_VF, name)) for name in _RANDOM_NAMES})
    try:
        yield
    finally:
        for name in _RANDOM_NAMES:  # getattr falls back to torch's functions
            vars(_VF).pop(name, None)


def _in_modes(dropout: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with put_back():
            return dropout(*args)

    return run
