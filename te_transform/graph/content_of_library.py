"""Snapshots of objects written in C, from Python's standard library and from numpy."""

from __future__ import annotations

import contextlib
import ctypes
import decimal
import io
import mmap
import queue
import random
import sys
import types
import warnings
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import torch

from te_transform.graph.content import Content, are_the_same
from te_transform.graph.errors import in_full


class _State(Content):
    """A snapshot of an object whose whole state can be read and written."""

    __slots__ = ("state",)

    def __init__(self, value: Any):
        super().__init__(value)
        with contextlib.suppress(ValueError):  # such as a closed object
            self.state = self.read()

    def read(self) -> Any:
        """Return a copy of the state."""
        raise NotImplementedError

    def write(self) -> None:
        """Set the object to the state."""
        raise NotImplementedError

    def is_as_it_was(self) -> bool:
        """Return True if the state is unchanged."""
        return self.read() == self.state

    def put_back(self) -> None:
        if hasattr(self, "state") and not self.is_as_it_was():
            self.write()


class OfBytes(_State):
    """The items of a bytearray, an array of Python, or a mapped file."""

    __slots__ = ()

    def read(self) -> Any:
        return self.value[:]

    def is_as_it_was(self) -> bool:
        return bytes(self.value) == bytes(self.state)  # as bytes, since NaN != NaN

    def write(self) -> None:
        self.value[:] = self.state


class OfView(_State):
    """The memory behind a memoryview."""

    __slots__ = ()

    def __init__(self, value: memoryview):
        super().__init__(value)
        with contextlib.suppress(ValueError):
            self.inside = [value.obj]

    def read(self) -> Any:
        return None if self.value.readonly or not self.value.c_contiguous else self.value.tobytes()

    def write(self) -> None:
        self.value.cast("B")[:] = self.state


class OfBuffer(_State):
    """The content and the position of an in-memory file."""

    __slots__ = ()

    def read(self) -> Any:
        return self.value.__getstate__()

    def write(self) -> None:
        self.value.__setstate__(self.state)


class OfFile(_State):
    """The read position of a file."""

    __slots__ = ()

    def read(self) -> Any:
        return self.value.tell()

    def write(self) -> None:
        self.value.seek(self.state)


class OfQueue(_State):
    """The items of a queue.SimpleQueue, which can only be read by removing them."""

    __slots__ = ()

    def __init__(self, value: queue.SimpleQueue):
        super().__init__(value)
        self.inside = self.state

    def read(self) -> Any:
        items = self._taken_out()
        for item in items:
            self.value.put(item)
        return items

    def _taken_out(self) -> list[Any]:
        items = []
        with contextlib.suppress(queue.Empty):
            while True:
                items.append(self.value.get_nowait())
        return items

    def is_as_it_was(self) -> bool:
        return are_the_same(self.read(), self.state)

    def write(self) -> None:
        self._taken_out()
        for item in self.state:
            self.value.put(item)


class OfCTypes(_State):
    """The memory of a ctypes value, array, structure or union."""

    __slots__ = ()

    def read(self) -> Any:
        if isinstance(self.value, ctypes._SimpleCData):
            return self.value.value
        return ctypes.string_at(ctypes.addressof(self.value), ctypes.sizeof(self.value))

    def write(self) -> None:
        if isinstance(self.value, ctypes._SimpleCData):
            self.value.value = self.state
        else:
            ctypes.memmove(ctypes.addressof(self.value), self.state, len(self.state))


class OfDecimal(_State):
    """The settings of a context of decimal numbers, and the signals that it has counted."""

    __slots__ = ()

    def read(self) -> Any:
        names = "prec", "rounding", "Emin", "Emax", "capitals", "clamp"
        settings = {name: getattr(self.value, name) for name in names}
        return settings, dict(self.value.flags), dict(self.value.traps)

    def write(self) -> None:
        settings, flags, traps = self.state
        for name, setting in settings.items():
            setattr(self.value, name, setting)
        self.value.flags.update(flags)
        self.value.traps.update(traps)


class OfSeeds(_State):
    """The number of children that a SeedSequence of numpy has spawned, with its other state."""

    __slots__ = ()

    def read(self) -> Any:
        return self.value.n_children_spawned, self.value.__reduce__()[2]

    def is_as_it_was(self) -> bool:
        return self.value.n_children_spawned == self.state[0]

    def write(self) -> None:
        self.value.__setstate__(self.state[1])


class OfRandom(Content):
    """The state of a random number generator."""

    __slots__ = ("state",)

    def __init__(self, value: Any):
        super().__init__(value)
        bits = getattr(value, "bit_generator", value)
        self.inside = [seeds] if (seeds := getattr(bits, "seed_seq", None)) is not None else ()
        if isinstance(value, torch.Generator):
            self.state = value.get_state()
        elif isinstance(value, random.Random):
            self.state = value.getstate()
        elif hasattr(value, "set_state"):  # numpy's RandomState
            self.state = value.get_state(legacy=False)
        else:  # numpy's Generator or BitGenerator
            self.state = getattr(value, "bit_generator", value).state

    def put_back(self) -> None:
        if isinstance(self.value, random.Random):
            self.value.setstate(self.state)
        elif hasattr(self.value, "set_state"):
            self.value.set_state(self.state)
        else:
            getattr(self.value, "bit_generator", self.value).state = self.state


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
    made = make(*map(_copy_of, arguments))
    if state and state[0] is not None:
        parts = state[0]  # iterators such as itertools.cycle() fill lists
        made.__setstate__(tuple(map(_copy_of_state, parts)) if isinstance(parts, tuple) else parts)
    return made


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


def _of_handle(value: Any) -> Content:
    return Unsaved(value, _EXTERNAL_STATE)


def _of_file(value: io.IOBase) -> Content | None:
    streams = sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__
    if value.closed or any(value is stream for stream in streams):
        return None
    with contextlib.suppress(OSError):
        if value.readable() and value.seekable() and not value.writable():
            return OfFile(value)
    return Unsaved(value, _EXTERNAL_STATE)


def _of_random(value: random.Random) -> Content | None:
    return None if isinstance(value, random.SystemRandom) else OfRandom(value)


_LIBRARY_READERS: tuple[tuple[tuple[type, ...], Callable[[Any], Content | None]], ...] = (
    ((bytearray, array, mmap.mmap), OfBytes),
    ((memoryview,), OfView),
    ((io.BytesIO, io.StringIO), OfBuffer),
    ((io.IOBase,), _of_file),
    ((queue.SimpleQueue,), OfQueue),
    ((ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union), OfCTypes),
    ((torch.Generator,), OfRandom),
    ((random.Random,), _of_random),
    ((decimal.Context,), OfDecimal),
    ((types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType), Unsaved),
)


def kind_of(kind: type) -> Callable[[Any], Content | None] | None:
    """Return the function that takes a snapshot of objects of a C class, or None if there is none."""
    if kind.__module__ in _HANDLES:
        return _of_handle
    found = next((content for kinds, content in _LIBRARY_READERS if issubclass(kind, kinds)), None)
    if found is None and (numpy := sys.modules.get("numpy")) is not None:
        generators = numpy.random.RandomState, numpy.random.Generator, numpy.random.BitGenerator
        found = OfRandom if issubclass(kind, generators) else None
        found = OfSeeds if issubclass(kind, numpy.random.SeedSequence) else found
        found = OfArray if issubclass(kind, numpy.ndarray) else found
    is_in_c = kind.__module__.partition(".")[0] in ("builtins", "itertools", "_csv", "torch")
    if found is None and ((is_in_c and hasattr(kind, "__next__")) or hasattr(kind, "hexdigest")):
        found = copied
    return found
