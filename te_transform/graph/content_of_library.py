"""Snapshots of objects written in C, from Python's standard library and from numpy."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import decimal
import io
import mmap
import operator
import queue
import random
import sys
import types
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from te_transform.graph.content import Content, are_the_same, home_of
from te_transform.graph.errors import in_full


class Whole(Content):
    """The state of an object that can be read and written as a whole.

    Args:
        value: the object.
        read: returns a copy of its state.
        write: sets the object to a state.
        is_same: compares two states.
        leads: returns the values that the object refers to.
    """

    __slots__ = ("is_same", "read", "state", "write")

    def __init__(
        self,
        value: Any,
        read: Callable[[Any], Any],
        write: Callable[[Any, Any], Any],
        is_same: Callable[[Any, Any], bool] = operator.eq,
        leads: Callable[[Any], Iterable[Any]] = lambda value: (),
    ):
        super().__init__(value)
        self.read, self.write, self.is_same = read, write, is_same
        with contextlib.suppress(ValueError):  # such as a closed object
            self.inside, self.state = leads(value), read(value)

    def put_back(self) -> None:
        if hasattr(self, "state") and not self.is_same(self.read(self.value), self.state):
            self.write(self.value, self.state)


def _set_items(value: Any, items: bytes) -> None:
    value[:] = array(value.typecode, items) if isinstance(value, array) else items


def _view(value: memoryview) -> bytes | None:
    return None if value.readonly or not value.c_contiguous else value.tobytes()


def _queued(value: queue.SimpleQueue) -> list[Any]:
    """Return the items of a queue, which can only be read by removing them."""
    _fill(value, items := _taken_out(value))
    return items


def _fill(value: queue.SimpleQueue, items: Iterable[Any]) -> None:
    _taken_out(value)
    for item in items:
        value.put(item)


def _taken_out(value: queue.SimpleQueue) -> list[Any]:
    items = []
    with contextlib.suppress(queue.Empty):
        while True:
            items.append(value.get_nowait())
    return items


def _memory(value: Any) -> bytes:
    return ctypes.string_at(ctypes.addressof(value), ctypes.sizeof(value))


def _set_memory(value: Any, state: bytes) -> None:
    ctypes.memmove(ctypes.addressof(value), state, len(state))


def _decimal_state(value: decimal.Context) -> Any:
    """Return the settings of a context of decimal numbers, and the signals that it has counted."""
    return decimal.Context.__reduce__(value)[1]


def _set_decimal_state(value: decimal.Context, state: Any) -> None:
    decimal.Context.__init__(value, *state)


class OfArray(Content):
    """The elements of a numpy array, which may be objects, and the array whose memory it views."""

    __slots__ = ("is_writable", "numbers")

    def __init__(self, value: Any):
        super().__init__(value)
        self.numbers, self.is_writable = self._plain().copy(), value.flags.writeable
        viewed = () if _is_of_file(value) else (value.base,)
        self.inside = *viewed, *(self.numbers.flat if value.dtype.hasobject else ())

    def _plain(self) -> Any:
        return self.value.view(sys.modules["numpy"].ndarray)  # a masked array hides elements

    def put_back(self) -> None:
        if self.value.shape != self.numbers.shape:
            self.value.resize(self.numbers.shape, refcheck=False)
        if self._plain().tobytes() != self.numbers.tobytes():
            if not self.value.flags.writeable:
                self.value.flags.writeable = True
            self._plain()[...] = self.numbers
        if self.value.flags.writeable != self.is_writable:
            self.value.flags.writeable = self.is_writable


def _is_of_file(array: Any) -> bool:
    """Return True if an array views a mapped file, which may be larger than memory."""
    return isinstance(array, (sys.modules["numpy"].memmap, mmap.mmap)) or (
        array is not None and _is_of_file(getattr(array, "base", None))
    )


class Copied(Content):
    """A copy of an iterator or a hash object, whose state cannot be restored: a forward uses the copy."""

    __slots__ = ("copy",)

    def __init__(self, value: Any):
        super().__init__(value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.copy = _copy_of(value)


def copied(value: Any) -> Content:
    """Return the copy of an iterator or a hash object, or the reason why it cannot be copied."""
    try:
        return Copied(value)
    except Exception as error:
        return Unsaved(value, f"which cannot be copied ({in_full(error)})")


def _copy_of(value: Any) -> Any:
    """Return a copy that shares the iterated values but copies inner iterators."""
    if hasattr(value, "hexdigest"):
        return value.copy()
    if not isinstance(value, Iterator):
        return value
    make, arguments, *state = value.__reduce__()
    twin = make(*map(_copy_of, arguments))
    if state and state[0] is not None:
        parts = state[0]  # iterators such as itertools.cycle() fill lists
        twin.__setstate__(tuple(map(_copy_of_state, parts)) if isinstance(parts, tuple) else parts)
    return twin


def _copy_of_state(part: Any) -> Any:
    return [*part] if type(part) is list else _copy_of(part)


class Unsaved(Content):
    """State that cannot be restored, and the reason."""

    __slots__ = ("why",)

    def __init__(self, value: Any, why: str = "which cannot be copied"):
        super().__init__(value)
        self.why = why


_EXTERNAL_STATE = "which has state outside of this process"
_HANDLES = (
    "multiprocessing.queues", "multiprocessing.connection", "multiprocessing.managers", "socket", "sqlite3",
)  # fmt: skip


def _of_file(value: io.IOBase) -> Content | None:
    streams = sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__
    if value.closed or any(value is stream for stream in streams):
        return None
    with contextlib.suppress(OSError):
        if value.readable() and value.seekable() and not value.writable():
            return Whole(value, lambda file: file.tell(), lambda file, at: file.seek(at))
    return Unsaved(value, _EXTERNAL_STATE)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _set_storage(value: torch.UntypedStorage, state: torch.Tensor) -> None:
    if value.nbytes() != state.nbytes:
        value.resize_(state.nbytes)
    _bytes_of(value).copy_(state)


def _of_future(value: Any) -> Content:
    if not value.done():
        return Unsaved(value, "which cannot be reset")
    content = Content(value)
    with contextlib.suppress(BaseException):  # the future has an error instead of a result
        content.inside = [value.value() if isinstance(value, torch.futures.Future) else value.result()]
    return content


def _in_cell(value: types.CellType) -> list[Any]:
    try:
        return [value.cell_contents]
    except ValueError:  # the variable has no value
        return []


def _set_cell(value: types.CellType, state: list[Any]) -> None:
    del value.cell_contents
    for item in state:
        value.cell_contents = item


_OF_ERROR = "args", "__cause__", "__context__", "__traceback__"


def _in_error(value: BaseException) -> list[Any]:
    return [getattr(value, name) for name in _OF_ERROR]


def _set_error(value: BaseException, state: list[Any]) -> None:
    for name, attribute in zip(_OF_ERROR, state, strict=True):
        setattr(value, name, attribute)


def _by(*how: Callable[..., Any], **more: Callable[..., Any]) -> Callable[[Any], Content]:
    """Return the function that takes a snapshot with these arguments of Whole."""
    return lambda value: Whole(value, *how, **more)


_LIBRARY_READERS: tuple[tuple[tuple[type, ...], Callable[[Any], Content | None]], ...] = (
    ((bytearray, array, mmap.mmap), _by(bytes, _set_items)),
    ((memoryview,), _by(_view, lambda v, state: _set_items(v.cast("B"), state), leads=lambda v: [v.obj])),
    ((io.BytesIO, io.StringIO), _by(lambda v: v.__getstate__(), lambda v, state: v.__setstate__(state))),
    ((io.IOBase,), _of_file),
    ((queue.SimpleQueue,), _by(_queued, _fill, is_same=are_the_same, leads=_queued)),
    ((ctypes._SimpleCData,), _by(lambda v: v.value, lambda v, state: setattr(v, "value", state))),
    ((ctypes.Array, ctypes.Structure, ctypes.Union), _by(_memory, _set_memory)),
    ((torch.UntypedStorage,), _by(lambda v: _bytes_of(v).clone(), _set_storage, is_same=torch.equal)),
    ((torch.futures.Future, asyncio.Future), _of_future),
    ((types.CellType,), _by(_in_cell, _set_cell, is_same=are_the_same, leads=_in_cell)),
    ((BaseException,), _by(_in_error, _set_error, is_same=are_the_same, leads=_in_error)),
    ((torch.Generator,), _by(torch.Generator.get_state, torch.Generator.set_state, is_same=torch.equal)),
    ((random.SystemRandom,), lambda value: None),  # without a state
    ((random.Random,), _by(lambda v: v.getstate(), lambda v, state: v.setstate(state))),
    ((decimal.Context,), _by(_decimal_state, _set_decimal_state)),
    ((types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType), Unsaved),
)


def _reader_of_numpy(kind: type, numpy: Any) -> Callable[[Any], Content] | None:
    """Return the function that takes a snapshot of objects of a class of numpy, or None."""
    if issubclass(kind, numpy.ndarray):
        return OfArray
    if home_of(kind) == "numpy" and hasattr(kind, "__next__") and not kind.__dictoffset__:
        return Unsaved
    if issubclass(kind, numpy.random.RandomState):
        read, write = partial(kind.get_state, legacy=False), kind.set_state
    elif issubclass(kind, (numpy.random.Generator, numpy.random.BitGenerator)):
        read, write = lambda v: _bits_of(v).state, lambda v, state: setattr(_bits_of(v), "state", state)
    elif issubclass(kind, numpy.random.SeedSequence):
        read, write = lambda v: v.__reduce__()[2], lambda v, state: v.__setstate__(state)
    else:
        return None
    # states may have arrays, which == compares number by number
    return _by(read, write, is_same=lambda one, other: False, leads=_seeds_of)


def _bits_of(value: Any) -> Any:
    return getattr(value, "bit_generator", value)


def _seeds_of(value: Any) -> list[Any]:
    """Return the seeds of a generator of numpy, which count the generators that they have spawned."""
    return [seeds for seeds in (getattr(_bits_of(value), "seed_seq", None),) if seeds is not None]


def kind_of(kind: type) -> Callable[[Any], Content | None] | None:
    """Return the function that takes a snapshot of objects of a C class, or None if there is none."""
    if home_of(kind) in _HANDLES:
        return partial(Unsaved, why=_EXTERNAL_STATE)
    reader = next((content for kinds, content in _LIBRARY_READERS if issubclass(kind, kinds)), None)
    if reader is None and (numpy := sys.modules.get("numpy")) is not None:
        reader = _reader_of_numpy(kind, numpy)
    is_in_c = home_of(kind).partition(".")[0] in ("builtins", "itertools", "_csv", "torch")
    if reader is None and ((is_in_c and hasattr(kind, "__next__")) or hasattr(kind, "hexdigest")):
        reader = copied
    return reader
