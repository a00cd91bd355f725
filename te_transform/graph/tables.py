"""Check that token ids and positions are valid indices into the lookup tables of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from te_transform.graph.fake import faked
from te_transform.graph.preserve import preserved

# Errors of a forward on fake tensors that may succeed on real tensors.
UNKNOWN_RESULT = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
_LOOKUPS = (F.embedding, Tensor.__getitem__, torch.gather, Tensor.gather)
_MOST = 1 << 22  # maximum number of elements of a tensor with tracked values


def out_of_range(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], values: Iterable[Tensor]
) -> Exception | None:
    """Return the error of a forward on these inputs, or None if it succeeds or the outcome is unknown.

    The forward runs on fake tensors. Integer tensors from the inputs, from position buffers and from
    torch.arange() are also computed with real values. These values are compared with the rows of each table.

    Args:
        values: the input tensors on the CPU; the tensors in `args` and `kwargs` may be on meta.
    """
    # copies: a forward may write to them
    real = [t if t.is_meta or t.is_floating_point() else t.clone() for t in (*values, *model.buffers())]
    try:
        with preserved(model), torch.no_grad(), faked(model, (args, kwargs)) as (fake_args, fake_kwargs):
            fakes = (*tree_leaves((fake_args, fake_kwargs)), *model.buffers())
            with _Lookups(zip((f for f in fakes if isinstance(f, Tensor)), real, strict=True)):
                model(*fake_args, **fake_kwargs)
    except UNKNOWN_RESULT:
        return None
    except Exception as error:
        return error
    return None


def _lookup(func: Any, *args: Any, **kwargs: Any) -> tuple[Any, int, Any]:
    """Return the table, its dimension and the indices of a lookup."""
    if func is F.embedding:
        return (lambda input, weight, *_, **__: (weight, 0, input))(*args, **kwargs)
    if func is Tensor.__getitem__:
        return args[0], 0, args[1]
    return (lambda input, dim, index, **_: (input, dim, index))(*args, **kwargs)


class _Lookups(TorchFunctionMode):
    """A mode that tracks the values of integer tensors and checks every table lookup with these values."""

    def __init__(self, known: Iterator[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.known: dict[int, tuple[Tensor, Tensor]] = {}  # by id; holding the tensor keeps its id unique
        for fake, real in known:
            self._note(fake, real)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LOOKUPS:
            with unset_fake_temporarily():  # the values are real tensors
                self._check(func, args, kwargs)
        out = func(*args, **kwargs)
        if func is Tensor.__setitem__:
            self.known.pop(id(args[0]), None)
        if isinstance(out, Tensor) and not out.is_floating_point() and out.numel() <= _MOST:
            self._follow(func, args, kwargs, out)
        return out

    def _check(self, func: Any, args: Any, kwargs: Any) -> None:
        table, dim, index = _lookup(func, *args, **kwargs)
        real = self.known.get(id(index), (None, None))[1]
        if real is None or real.dtype is torch.bool or not real.numel() or not isinstance(table, Tensor):
            return
        least, most, rows = int(real.min()), int(real.max()), table.shape[dim]
        if most >= rows or least < (0 if func is F.embedding else -rows):
            index = most if most >= rows else least
            raise IndexError(f"expected an index below {rows} for a table of {rows} rows, got {index}")

    def _follow(self, func: Any, args: Any, kwargs: dict[str, Any], out: Tensor) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not all(id(tensor) in self.known for tensor in tensors):
            return
        args, kwargs = tree_map_only(Tensor, lambda tensor: self.known[id(tensor)][1], (args, kwargs))
        kwargs = {name: "cpu" if name == "device" else value for name, value in kwargs.items()}
        try:
            with unset_fake_temporarily():
                real = func(*args, **kwargs)
        except Exception:  # stop tracking the values
            return
        self._note(out, real)

    def _note(self, fake: Tensor, real: Any) -> None:
        if isinstance(real, Tensor) and not real.is_meta and not real.is_floating_point():
            with unset_fake_temporarily():
                self.known[id(fake)] = fake, real.detach().cpu()
