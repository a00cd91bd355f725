"""Run a model and leave it bitwise as it was."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

_DEPTH = 5  # how deep: a module, its attributes, what these hold, ...
_CONTAINERS = (dict, list, set, deque)
_NOT_STATE = (type, types.ModuleType, types.FunctionType, nn.Parameter)
# Whose objects hold a user's values; Python's other objects go on.
_HOLDERS = ("types", "argparse", "collections")

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

    That goes for the containers, tensors and plain Python objects that its modules hold, too. Parameters are
    not copied (they may not fit twice): those that a forward writes to get what they hold in `original`,
    which `model` is a copy of.

    Raises:
        RuntimeError: the forward writes into its own parameters or sets them anew, be it to what they held,
            and there is no original.
    """
    before = _snapshot(model)
    versions = [(name, p, p._version) for name, p in model.named_parameters() if not p.is_inference()]
    try:
        with same_random(model.parameters()):
            yield
    finally:
        for value, content in before:
            if not _is_unchanged(value, content):
                _restore(value, content)
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
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers() if not buffer.is_meta]
    try:
        yield
    finally:
        for buffer, content in before:
            if not same_bits(buffer, content):
                _restore(buffer, content)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are of one kind and hold the same bits, of sparse ones in the same places."""
    alike = one.shape == other.shape and one.dtype == other.dtype and one.layout == other.layout
    return alike and all(map(_same_dense, _parts(one), _parts(other)))


def _same_dense(one: Tensor, other: Tensor) -> bool:
    one, other = (tensor.detach().resolve_conj().resolve_neg() for tensor in (one, other))
    one, other = (tensor.contiguous().flatten() for tensor in (one, other))
    return one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _parts(tensor: Tensor) -> list[Tensor]:
    """The dense tensors that a tensor is made of."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


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


def _snapshot(model: nn.Module) -> list[tuple[Any, Any]]:
    """All that the model's modules hold and a forward may change, each with a copy of its content."""
    found: dict[int, tuple[Any, Any]] = {}
    level: list[Any] = list(model.modules())
    for _ in range(_DEPTH):
        below: list[Any] = []
        for value in level:
            if id(value) in found:
                continue
            content = _content(value)
            if content is not None:
                found[id(value)] = value, content
                below += _inside(content)
        level = below
    return list(found.values())


def _content(value: Any) -> Any:
    """A copy of what the value holds, None where nothing in it can change."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, (list, tuple, deque)):
        return list(value)
    if isinstance(value, set):
        return set(value)
    if isinstance(value, _NOT_STATE):
        return None
    if (state := _random_state(value)) is not None:
        return _RandomState(state)
    if isinstance(value, Tensor):
        return None if value.is_meta or is_fake(value) else value.detach().clone()
    if "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].ndarray):
        return value.copy()
    return dict(vars(value)) if _is_plain(value) else None


@dataclass(frozen=True)
class _RandomState:
    """Where a random number generator stood."""

    state: Any


def _random_state(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    return getattr(getattr(value, "bit_generator", None), "state", None)  # numpy's


def _set_random_state(value: Any, state: Any) -> None:
    if isinstance(value, torch.Generator):
        value.set_state(state)
    elif isinstance(value, random.Random):
        value.setstate(state)
    else:
        value.bit_generator.state = state


def _is_plain(value: Any) -> bool:
    """Whether it is a module, or an object of the user's or of a library, which its attributes make up."""
    if isinstance(value, nn.Module):
        return True
    home = type(value).__module__.partition(".")[0]
    foreign = home in ("torch", "te_transform") or (home in sys.stdlib_module_names and home not in _HOLDERS)
    return hasattr(value, "__dict__") and not foreign


def _inside(content: Any) -> list[Any]:
    if isinstance(content, dict):
        return list(content.values())
    return list(content) if isinstance(content, (list, set)) else []


def _is_unchanged(value: Any, content: Any) -> bool:
    if isinstance(content, _RandomState):
        return False
    if isinstance(value, Tensor):
        return same_bits(value, content)
    if isinstance(content, (dict, list, set)):
        return [*map(id, _flat(_held(value)))] == [*map(id, _flat(content))]
    return value.shape == content.shape and value.tobytes() == content.tobytes()


def _flat(content: Any) -> list[Any]:
    return [*content, *content.values()] if isinstance(content, dict) else list(content)


def _held(value: Any) -> Any:
    return value if isinstance(value, (*_CONTAINERS, tuple)) else vars(value)


def _restore(value: Any, content: Any) -> None:
    if isinstance(content, _RandomState):
        _set_random_state(value, content.state)
    elif isinstance(value, Tensor):
        with torch.inference_mode(value.is_inference()), torch.no_grad():
            if value.shape == content.shape:
                value.copy_(content)
            else:  # somebody has resized it, or given it other memory
                value.data = content
    elif isinstance(content, (dict, list, set)):
        held = _held(value)
        held.clear()
        held.extend(content) if isinstance(content, list) else held.update(content)
    else:
        value[...] = content
