"""Run a model and leave it bitwise as it was."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from te_transform.graph.bits import same_bits
from te_transform.graph.state_snapshot import Noted, TensorContent, is_plain, noted

P = ParamSpec("P")
T = TypeVar("T")
_ONE_AT_A_TIME = threading.RLock()
_BYTES_OF_PARAMETERS = 2**28


def one_at_a_time(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function, whose calls other threads wait for.

    Threads share random states, and a model that is looked at has another class, other tensors or another
    mode meanwhile. What a forward sets in context variables is lost with the context of the call.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with _ONE_AT_A_TIME:
            return contextvars.copy_context().run(function, *args, **kwargs)

    return run


@contextlib.contextmanager
def preserved(model: nn.Module, original: nn.Module | None = None) -> Iterator[Noted]:
    """Put back every attribute, buffer, training flag and random state of `model`, whatever the body does.

    That goes for all that its modules, their classes and their code lead to, see contents.py. Parameters may
    not fit twice: numbers are copied of the smallest alone, up to 256 MiB, or taken from `original`, which
    `model` is a copy of.

    Raises:
        RuntimeError: the forward writes into its own parameters or sets them anew, be it to what they held,
            and there is no original.
    """
    before = noted(model)
    versions = [(name, p, p._version) for name, p in model.named_parameters() if not p.is_inference()]
    with contextlib.ExitStack() as afterwards:  # all of it, where something cannot be put back too
        for content in before.contents:
            afterwards.callback(content.put_back)
        for put_back in _numbers_of_parameters(model, original):
            afterwards.callback(put_back)
        before.lend_copies()
        with same_random(model.parameters()):
            yield before
    written = [name for name, p, version in versions if p._version != version]
    if original is not None:
        with torch.no_grad():
            for name in written:
                model.get_parameter(name).copy_(original.get_parameter(name))
    elif written:
        raise RuntimeError(
            f"the model's forward writes into its own parameters {written} or sets them anew, convert() "
            "needs them unchanged: leave inplace=False"
        )


def _numbers_of_parameters(model: nn.Module, original: nn.Module | None) -> Iterator[Callable[[], None]]:
    """Yield functions that put the numbers of parameters back, which writes through .data change unseen."""
    if original is None:
        held, left = filter(is_plain, model.parameters()), _BYTES_OF_PARAMETERS
        for parameter in sorted(held, key=lambda parameter: parameter.nbytes):
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
