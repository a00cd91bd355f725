"""Run a model and leave it bitwise as it was."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from te_transform.graph.contents import TensorContent, noted

P = ParamSpec("P")
T = TypeVar("T")
_ONE_AT_A_TIME = threading.RLock()


def one_at_a_time(function: Callable[P, T]) -> Callable[P, T]:
    """The function, whose calls other threads wait for: they share random states, and a model that is looked
    at has another class, other tensors or another mode meanwhile."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with _ONE_AT_A_TIME:
            return function(*args, **kwargs)

    return run


@contextlib.contextmanager
def preserved(model: nn.Module, original: nn.Module | None = None) -> Iterator[None]:
    """Put back every attribute, buffer, training flag and random state of `model`, whatever the body does.

    That goes for what its modules and their classes hold, too, see contents.py. The numbers of parameters are
    not copied (they may not fit twice): those that a forward writes to get what they hold in `original`,
    which `model` is a copy of.

    Raises:
        RuntimeError: the forward writes into its own parameters or sets them anew, be it to what they held,
            and there is no original.
    """
    before = noted(model)
    versions = [(name, p, p._version) for name, p in model.named_parameters() if not p.is_inference()]
    with contextlib.ExitStack() as afterwards:  # all of it, where something cannot be put back too
        for content in before:
            afterwards.callback(content.put_back)
        with same_random(model.parameters()):
            yield
    written = {name: p for name, p, version in versions if p._version != version}
    if original is not None:
        with torch.no_grad():
            for name, parameter in written.items():
                parameter.copy_(original.get_parameter(name))
    elif written:
        raise RuntimeError(
            f"the model's forward writes into its own parameters {[*written]} or sets them anew, convert() "
            "needs them unchanged: leave inplace=False"
        )


@contextlib.contextmanager
def same_buffers(model: nn.Module) -> Iterator[None]:
    """Put back what buffers hold, as running statistics, which each forward in training moves."""
    before = [TensorContent(buffer) for buffer in model.buffers() if not buffer.is_meta]
    try:
        yield
    finally:
        for content in before:
            content.put_back()


@contextlib.contextmanager
def same_random(tensors: Iterable[Any]) -> Iterator[None]:
    """Put the random states back, of Python, of numpy, and of torch on the CPU and where the tensors are."""
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
