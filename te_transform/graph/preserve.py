"""Run a model and restore its state bit by bit."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, _tensor_str, nn
from torch.autograd.graph import saved_tensors_hooks

from te_transform.graph.bits import same_bits
from te_transform.graph.state_snapshot import Noted, is_plain

P = ParamSpec("P")
T = TypeVar("T")
_ONE_AT_A_TIME = threading.RLock()
_BYTES_OF_PARAMETERS = 2**28


def one_at_a_time(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function behind a lock that all decorated functions share.

    Threads share the random states. During such a call, the model may have another class, other tensors or
    another mode. Each call runs in a copy of the context, which discards what a forward sets in context
    variables.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with _ONE_AT_A_TIME:
            return contextvars.copy_context().run(function, *args, **kwargs)

    return run


preserving: ContextVar[bool] = ContextVar("preserving", default=False)
"""True within preserved(), which holds the memory of all tensors."""


class ParametersWritten(ValueError):
    """The error for a forward that writes to its own parameters."""


@contextlib.contextmanager
def preserved(model: nn.Module, original: nn.Module | None = None) -> Iterator[Noted]:
    """Restore every attribute, buffer, training flag and random state of `model` after the body.

    This covers every object that the modules, their classes and their code refer to, see state_snapshot.py.
    Two copies of the parameters may not fit into memory. Without `original`, only the values of the smallest
    parameters are copied, up to 256 MiB in total. With `original`, the model that `model` was copied from,
    values are restored from the parameters of `original`.

    Raises:
        ParametersWritten: the forward writes to its own parameters, even if the values stay equal, and there
            is no original.
    """
    versions = [(name, p, p._version) for name, p in model.named_parameters() if not p.is_inference()]
    with contextlib.ExitStack() as afterwards:  # runs every callback, even after one fails
        before = afterwards.enter_context(same_state(model))
        for put_back in _numbers_of_parameters(model, original):
            afterwards.callback(put_back)
        afterwards.callback(preserving.reset, preserving.set(True))
        with same_random(model.parameters()):
            yield before
    written = [name for name, p, version in versions if p._version != version]
    if original is not None:
        with torch.no_grad():
            for name in written:
                model.get_parameter(name).copy_(original.get_parameter(name))
    elif written:
        raise ParametersWritten(
            "expected a forward that does not write to its parameters, got one that writes to or resets "
            f"{written}; hold such values in buffers (convert() with inplace=False takes such a forward, too)"
        )


def _numbers_of_parameters(model: nn.Module, original: nn.Module | None) -> Iterator[Callable[[], None]]:
    """Yield functions that restore parameter values.

    Writes through .data change values without changing the version counter.
    """
    if original is None:
        plain, left = filter(is_plain, model.parameters()), _BYTES_OF_PARAMETERS
        for parameter in sorted(plain, key=lambda parameter: parameter.nbytes):
            if (left := left - parameter.nbytes) >= 0:
                yield functools.partial(_put_numbers_back, parameter, parameter.detach().clone())
        return
    originals = dict(original.named_parameters())
    for name, parameter in model.named_parameters():
        if is_plain(parameter) and name in originals:
            yield functools.partial(_put_numbers_back, parameter, originals[name])


def _put_numbers_back(parameter: nn.Parameter, numbers: Tensor) -> None:
    if parameter.shape == numbers.shape and not same_bits(parameter, numbers):
        parameter.data.copy_(numbers)


@contextlib.contextmanager
def same_state(model: nn.Module) -> Iterator[Noted]:
    """Restore what a forward changes: it may update running statistics, count calls or keep tensors."""
    before = Noted(model)
    with contextlib.ExitStack() as afterwards:
        for read, write in _SETTINGS:
            afterwards.callback(write, read())
        for content in before.contents:
            afterwards.callback(content.put_back)
        before.lend_copies()
        yield before


def _put_back_environment(before: dict[str, str]) -> None:
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (lambda: dict(os.environ), _put_back_environment),
    (lambda: dict(vars(_tensor_str.PRINT_OPTS)), lambda before: vars(_tensor_str.PRINT_OPTS).update(before)),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
)
"""Functions that read and write the settings of the process that a forward may change."""


def hidden_from_checkpoints() -> contextlib.AbstractContextManager[None]:
    """Return a context whose saved tensors a checkpoint around it does not count.

    The hooks detach: a node that returned its own result would form a reference cycle with it, which is never
    freed.
    """
    return saved_tensors_hooks(Tensor.detach, lambda tensor: tensor)


@contextlib.contextmanager
def same_random(tensors: Iterable[Any]) -> Iterator[None]:
    """Restore the random states of Python, numpy, and torch on the CPU and on the tensors' devices."""
    gpus = {t.device.index or 0 for t in tensors if isinstance(t, Tensor) and t.device.type == "cuda"}
    python, numpy = random.getstate(), sys.modules.get("numpy")
    legacy = numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=sorted(gpus)):
            yield
    finally:
        random.setstate(python)
        if numpy:
            numpy.random.set_state(legacy)
