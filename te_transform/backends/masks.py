"""What an attention mask is, found out for the sizes and the data at hand by evaluating it, never
extrapolated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import is_fake
from torch.utils.weak import WeakIdKeyDictionary

from te_transform.backends.stamp import Stamp

CAUSAL, FULL = "causal", "full"
_FEW = 256  # answers that are kept: one for each length that a generation goes through
Answer = str | None


class Mask(nn.Module):
    """The op of a captured graph that makes an attention mask, or says that it is none, or the causal one.

    The answer is remembered for as long as what the mask is made of stays the same. Sizes are numbers, and
    model tensors have a stamp. Of data, which is new at each call, one look is taken: where a tensor holds
    one value throughout, as the padding mask of a batch without padding does, that value is part of what an
    answer is remembered by; otherwise the mask itself is looked at, once for each tensor, so that blocks that
    are captured alone and get the same mask share one look.

    Args:
        make: the captured operations that make the mask, as a module that returns a tuple of it and, where
            it was filled with a finite number, of what it hides.
        stored: for each argument whether it is a tensor of the model.
    """

    def __init__(self, make: fx.GraphModule, stored: Sequence[bool]):
        super().__init__()
        self.make, self.stored = make, tuple(stored)
        self.answers: dict[tuple, Answer] = {}
        self.looked: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.contents: list[Tensor | None] = [None] * len(self.stored)
        self.changes = 0  # of model tensors on the CPU, whose contents are compared

    def forward(self, *arguments: Any) -> Tensor | str:
        """The mask, or "causal" or "full" where it is that."""
        if _have_no_numbers(arguments):
            return self._made(arguments)
        keys = [self._key(*each) for each in zip(range(len(arguments)), arguments, self.stored, strict=True)]
        if None in keys:
            return self._looked_at(arguments, keys)
        key = (*keys, self.changes)
        if key not in self.answers:
            if len(self.answers) >= _FEW:
                self.answers.clear()
            self.answers[key] = what_is(*self.make(*arguments))
        return self.answers[key] or self._made(arguments)

    def _made(self, arguments: Sequence[Any]) -> Tensor:
        return self.make(*arguments)[0]

    def _key(self, index: int, argument: Any, stored: bool) -> tuple | None:
        """What the argument is, as part of a key; None for data that has to be looked at itself."""
        if not isinstance(argument, Tensor):
            return (argument,)
        about = (argument.shape, argument.dtype, argument.device)
        if stored:
            return (*about, *self._content(index, argument))
        if argument.numel() == 0:
            return about
        low, high = argument.aminmax() if argument.dtype != torch.bool else (argument.all(), argument.any())
        # the two numbers in one transfer: the GPU is waited for once
        low, high = torch.stack((low, high)).tolist()
        return (*about, low) if low == high else None

    def _content(self, index: int, tensor: Tensor) -> tuple:
        """A stamp, which misses a write through .data; on the CPU the contents tell."""
        if tensor.device.type != "cpu":
            return (Stamp.of(tensor),)
        before = self.contents[index]
        if before is None or not _holds(tensor, before):
            self.contents[index] = _held(tensor)
            self.changes += 1
        return ()

    def _looked_at(self, arguments: Sequence[Any], keys: Sequence[tuple | None]) -> Tensor | str:
        data = [argument for argument, key in zip(arguments, keys, strict=True) if key is None]
        rest = tuple(key for key in keys if key is not None)
        alone = len(data) == 1 and not data[0].is_inference()
        known = self.looked.get(data[0]) if alone else None
        seen = (Stamp.of(data[0]), self.changes, rest) if alone else None
        if known is None or known[0] != seen or not _holds(data[0], known[1]):
            mask, *hidden = self.make(*arguments)
            known = (seen, _held(data[0]), what_is(mask, *hidden))
            if alone:
                self.looked[data[0]] = known
            return known[2] or mask
        return known[2] or self._made(arguments)


def _held(tensor: Tensor) -> Tensor | None:
    """What tells of a write that a stamp misses, on the CPU: the contents."""
    return tensor.detach().clone() if tensor.device.type == "cpu" else None


def _holds(tensor: Tensor, held: Tensor | None) -> bool:
    return held is None or (held.shape == tensor.shape and torch.equal(held, tensor))


def _have_no_numbers(arguments: Sequence[Any]) -> bool:
    """Whether the call is one of shapes alone, on fake tensors or on the meta device."""
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    if any(tensor.is_meta or is_fake(tensor) for tensor in tensors):
        return True
    return torch._C._len_torch_dispatch_stack() > 0 and active_fake_mode() is not None


def what_is(mask: Tensor, hidden: Tensor | None = None) -> Answer:
    """Whether a mask [..., queries, keys] hides nothing, or just what lies ahead.

    True keeps in a boolean mask; a floating one is added to the scores, so that 0 keeps, and what hides is so
    low that beside any other score its probability is zero. A row that `hidden` hides everywhere is kept as
    a whole, see ops.kept, but not with the scores that it had: a mask with such a row is neither.
    """
    with torch.no_grad():
        if hidden is not None and bool(hidden.all(-1).any()):
            return None
        keep = mask if mask.dtype is torch.bool else mask == 0
        if bool(keep.all()):
            return FULL
        queries, keys = mask.shape[-2:]
        causal = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril()
        if queries != keys or not bool((keep == causal).all()):
            return None
        hides = mask.dtype is torch.bool or bool((mask.masked_fill(keep, -torch.inf) <= _lowest(mask)).all())
        return CAUSAL if hides else None


def _lowest(mask: Tensor) -> float:
    return torch.finfo(mask.dtype).min
