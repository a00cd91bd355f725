"""Integers on a GPU that the CPU knows, so that the user's code before blocks does not wait for the GPU.

transformers asks in each forward whether positions are those of packed sequences. If no positions are given,
it makes them by torch.arange(). The GPU computes the answer, and the CPU waits until all earlier work is
done. Then the GPU waits for the CPU, which is not ahead for the first blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode

from te_transform.backends.tracing import traced
from te_transform.execution.modes import NOTHING, UntilGraph, is_dispatch_mode_on

MAX_ELEMENTS = 2**17  # of a tensor; an operation on as many takes the CPU about 0.1 ms
_MAKES = {"arange", "full", "ones", "zeros"}
_COMPUTES = {
    "__and__", "__eq__", "__getitem__", "__invert__", "__or__", "__rsub__", "add", "all", "any", "cumsum",
    "diff", "expand", "ge", "gt", "le", "lt", "mul", "ne", "reshape", "sub", "sum", "unsqueeze", "view",
}  # fmt: skip
_ANSWERS = {"__bool__", "__index__", "__int__", "equal", "is_nonzero", "item", "tolist"}
_READS = {"__len__", "clone", "dim", "embedding", "float", "new_ones", "numel", "size", "to", "where"}
_READ_ATTRIBUTES = {"device", "dtype", "is_nested", "layout", "ndim", "requires_grad", "shape"}


class KnownIntegers(UntilGraph):
    """A mode that also computes integers on the CPU, and answers the user's questions about them there.

    It knows integers and booleans that were made from numbers, until they are written to. It forgets all of
    them once one is given to a function that is not listed above, which may pass on its memory.

    Args:
        asked: the number of questions to answer, or infinite. Torch calls after the last one are passed on.
        note: receives the number of answers at the end.

    Attributes:
        known: each known tensor by its id, with its copy and the contents that were copied. The tensors stay
            alive until the first block: torch.utils.swap_tensors() refuses tensors with weak references.
    """

    def __init__(self, asked: float = inf, note: Callable[[int], object] = int):
        super().__init__()
        self.asked, self.note, self.answers = asked, note, 0
        self.known: dict[int, tuple[Tensor, Tensor, tuple[int, int]]] = {}

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.known.clear()
        if not any(error):
            self.note(self.answers)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # torch.compile() of a user's function traces this method
        if self.answers >= self.asked or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        given = (*args, *kwargs.values())
        if name in _MAKES and not any(isinstance(each, Tensor) for each in given):
            return self._noted(func(*args, **kwargs), func, args, {**kwargs, "device": "cpu"})
        if not self.known or not self._knows_any(given):
            return func(*args, **kwargs)
        if name not in _COMPUTES and name not in _ANSWERS:
            if not _only_reads(func, name):
                self.known.clear()
            return func(*args, **kwargs)
        try:
            copies, options = self._copied(args), {key: self._copied(value) for key, value in kwargs.items()}
        except KeyError:
            return func(*args, **kwargs)
        if name in _ANSWERS:
            self.answers += 1
            return func(*copies, **options)
        return self._noted(func(*args, **kwargs), func, copies, options)

    def _noted(self, out: Any, func: Callable[..., Any], args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
        """Return `out`, and note its copy, computed by `func`, if it has few integers or booleans."""
        is_exact = type(out) is Tensor and not (out.is_floating_point() or out.is_complex())
        if is_exact and is_on_gpu(out) and not out.is_inference() and out.numel() <= MAX_ELEMENTS:
            self.known[id(out)] = out, func(*args, **kwargs), _contents(out)
        return out

    def _knows_any(self, given: Iterable[Any]) -> bool:
        """Return True if one of these values is known, or one in a list."""
        known = self.known
        return any(
            id(each) in known or (isinstance(each, (list, tuple)) and self._knows_any(each)) for each in given
        )

    def _copied(self, given: Any) -> Any:
        """Return a value with the copies of its tensors.

        Raises:
            KeyError: a tensor is not known, or has other contents.
        """
        if isinstance(given, Tensor):
            _, copy, contents = self.known[id(given)]
            if _contents(given) != contents:
                raise KeyError
            return copy
        return type(given)(map(self._copied, given)) if type(given) in (list, tuple) else given


def _contents(tensor: Tensor) -> tuple[int, int]:
    """Return what changes if a tensor is written to, or swapped with another one."""
    return tensor._cdata, tensor._version


def _only_reads(func: Callable[..., Any], name: str) -> bool:
    """Return True if a function neither writes to its arguments nor gives away their memory."""
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", None) in _READ_ATTRIBUTES
    return name in _READS


def is_on_gpu(tensor: Tensor) -> bool:
    """Return True if the CPU waits for the numbers of this tensor."""
    return tensor.device.type != "cpu"


class Questions:
    """The questions that the forwards of a model ask about integers before their first block.

    The first call shows their number. In later calls with the same arguments, the mode does nothing after the
    last question, because its work takes CPU time in each torch call.
    """

    def __init__(self) -> None:
        self.asked: dict[Hashable, int] = {}

    def answered(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> AbstractContextManager[Any]:
        """Return a context for the user's code before the first block, in a call with these arguments."""
        given = (*args, *kwargs.values())
        may_wait = any(isinstance(each, Tensor) and is_on_gpu(each) for each in given)
        if not may_wait or traced() or is_dispatch_mode_on():
            return NOTHING
        if isinstance(_get_current_function_mode(), KnownIntegers):
            return NOTHING
        names = tuple(name for name, value in kwargs.items() if value is not None)
        key = type(module), module.training, tuple(value is None for value in args), names
        asked = self.asked.get(key, inf)
        return KnownIntegers(asked, partial(self.asked.setdefault, key)) if asked else NOTHING
