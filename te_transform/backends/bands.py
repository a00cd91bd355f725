"""Masks that let each query see a band of keys around its own place, and no more of a sequence than its first
keys: sliding windows, and batches that are padded at their end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Band(NamedTuple):
    """Which keys each query sees: from `before` its own place to `after` it, both inclusive, None without an
    end; where sequences are `padded`, only the first keys of each; `blind` where some query sees none."""

    before: int | None
    after: int | None
    padded: bool
    blind: bool


class Banded(NamedTuple):
    """A boolean mask [..., 1, queries, keys] with what it is, and where sequences are padded the keys of each
    of them, counted on from sequence to sequence: int32 [batch or 1, plus 1], of which the first is 0."""

    mask: Tensor
    ends: Tensor | None
    before: int | None
    after: int | None
    padded: bool
    blind: bool

    @property
    def band(self) -> Band:
        """What it is: torch.fx prints no tuple within a tuple into a graph's code."""
        return Band(self.before, self.after, self.padded, self.blind)


def banded(mask: Tensor, band: Band) -> Banded:
    """A mask that is known to be such a band."""
    keep = kept(mask)
    ends = F.pad(_lengths(keep).cumsum(0, dtype=torch.int32), (1, 0)) if band.padded else None
    return Banded(keep, ends, *band)


def tensor_of(mask: Tensor | Banded | None) -> Tensor | None:
    """The mask itself."""
    return mask.mask if isinstance(mask, Banded) else mask


def kept(mask: Tensor) -> Tensor:
    """What a mask keeps: True in a boolean one; a floating one is added to the scores, so that 0 does."""
    return mask if mask.dtype is torch.bool else mask == 0


def within(band: Band, ends: Tensor | None, queries: int, keys: int, device: torch.device) -> Tensor:
    """The boolean mask [batch or 1, 1, queries, keys] that such a band is."""
    query, key = _places(queries, keys, device)
    mask = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device)
    if band.before is not None:
        mask = mask & (key >= query - band.before)
    if band.after is not None:
        mask = mask & (key <= query + band.after)
    return mask if ends is None else mask & (key < ends.diff().view(-1, 1, 1, 1))


def measure(keep: Tensor) -> Tensor:
    """What band_of() needs of what a mask [..., queries, keys] keeps, computed where the mask is.

    Returns:
        Six integers: whether it is a band, how far it reaches before and after a query's place, the shortest
        and the longest sequence, and whether every query sees something.
    """
    queries, keys = keep.shape[-2:]
    query, key = _places(queries, keys, keep.device)
    sees, narrow = keep.any(-1, keepdim=True), keep.to(torch.uint8)
    first = narrow.argmax(-1, keepdim=True)
    last = keys - 1 - narrow.flip(-1).argmax(-1, keepdim=True)
    before = torch.where(sees, query - first, -keys).amax()
    after = torch.where(sees, last - query, -queries).amax()
    lengths = _lengths(keep)
    band = (key >= query - before) & (key <= query + after)
    same = (keep == band & (key < lengths.view(-1, 1, 1, 1))).all()
    facts = (same, before, after, lengths.amin(), lengths.amax(), sees.all())
    return torch.stack([fact.long() for fact in facts])


def band_of(measured: Sequence[int], queries: int, keys: int) -> Band | None:
    """What measure() has found of a mask; None where it is no band, hides a sequence as a whole, or hides a
    query's own place, which a kernel's band does not."""
    same, before, after, shortest, longest, all_see = measured
    if not same or not shortest or min(before, after) < 0:
        return None
    # a query sees nothing before its own sequence, or beyond it: such an end is none
    open_before, open_after = before >= queries - 1, after >= longest - 1
    return Band(None if open_before else before, None if open_after else after, shortest < keys, not all_see)


def _lengths(keep: Tensor) -> Tensor:
    """The number of keys that any query of each sequence sees, int32 [batch]."""
    return keep.any(-2).sum(-1, dtype=torch.int32).flatten()


def _places(queries: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.arange(queries, device=device).unsqueeze(-1), torch.arange(keys, device=device)
