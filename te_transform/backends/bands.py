"""Masks that let each query see a band of keys around its own place, and no more of a sequence than its first
keys, or its own document: sliding windows, batches that are padded, and documents one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from te_transform.graph.bound import F

# Kernels take so many queries at once, and are planned for packed sequences up to a multiple of it.
PLANNED_LENGTHS = 128


class Band(NamedTuple):
    """Which keys each query sees.

    Attributes:
        before, after: how far before and after its own place, both inclusive, None without an end.
        padded: whether sequences are, at their end: queries see only the first keys of each.
        blind: whether some query sees no key.
        documents: where sequences are made of documents, of which queries see their own alone, how many
            there are at most, and `longest` how long they are at most; else both are 0. What is padded at
            the start of a sequence is one of them, whose queries see nothing.
    """

    before: int | None
    after: int | None
    padded: bool
    blind: bool
    documents: int = 0
    longest: int = 0


class Banded(NamedTuple):
    """A boolean mask [..., 1, queries, keys] with what it is, see Band.

    `ends` is int32, and the first of it 0: where sequences are padded the keys of each of them, counted on
    from sequence to sequence, [batch or 1, plus 1]; where they are made of documents, where the next of these
    begins, likewise counted on, [documents + 1].
    """

    mask: Tensor
    ends: Tensor | None
    before: int | None
    after: int | None
    padded: bool
    blind: bool
    documents: int = 0
    longest: int = 0

    @property
    def band(self) -> Band:
        """What it is: torch.fx prints no tuple within a tuple into a graph's code."""
        return Band(*self[2:])


class Seeing(NamedTuple):
    """A floating mask under which every query sees a key: no row of it is hidden as a whole."""

    mask: Tensor


def banded(mask: Tensor, band: Band) -> Banded:
    """A mask that is known to be such a band."""
    keep, ends = kept(mask), None
    if band.documents:
        begun = _begins(keep).flatten().cumsum(0)
        numbers = torch.arange(1, band.documents + 1, dtype=torch.int64, device=mask.device)
        ends = F.pad(torch.searchsorted(begun, numbers, out_int32=True), (0, 1), value=len(begun))
    elif band.padded:
        ends = F.pad(_lengths(keep).cumsum(0, dtype=torch.int32), (1, 0))
    return Banded(keep, ends, *band)


def tensor_of(mask: Tensor | Banded | Seeing | None) -> Tensor | None:
    """The mask itself."""
    return mask.mask if isinstance(mask, (Banded, Seeing)) else mask


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


def within_documents(ends: Tensor, batch: int, length: int) -> Tensor:
    """The boolean mask [batch, 1, length, length] of documents that lie one behind the other."""
    places = torch.arange(batch * length, dtype=torch.int64, device=ends.device)
    own = torch.bucketize(places, ends, right=True).view(batch, 1, length, 1)
    return own == own.mT


def sees_itself(keep: Tensor) -> Tensor:
    """Whether each query sees the key in its own place, [batch or 1, length], of as many queries as keys."""
    return keep.diagonal(dim1=-2, dim2=-1).reshape(-1, keep.shape[-1])


def measure(keep: Tensor) -> Tensor:
    """What band_of() needs of what a mask [..., queries, keys] keeps, computed where the mask is.

    Returns:
        Six integers: whether it is a band, how far it reaches before and after a query's place, the shortest
        and the longest sequence, and whether every query sees something. With as many queries as keys four
        more, see _documents().
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
    facts = [same, before, after, lengths.amin(), lengths.amax(), sees.all()]
    if queries == keys:
        facts += _documents(keep, band)
    return torch.stack([fact.long() for fact in facts])


def _documents(keep: Tensor, band: Tensor) -> list[Tensor]:
    """Of what a mask keeps, and a band that has it all: whether it is that within documents, how many there
    are, the length of the longest, and that of the longest which is seen."""
    begins, own = _begins(keep), sees_itself(keep)
    places = torch.arange(begins.numel(), dtype=torch.int64, device=keep.device).view_as(begins)
    starts = torch.where(begins, places, 0).flatten().cummax(0).values.view_as(begins)
    # what is blind neither sees nor is seen: its documents have a number that no query's has
    seen, seeing = torch.where(own, starts, -1), torch.where(own, starts, -2)
    within = band & (seeing.view(-1, 1, keep.shape[-1], 1) == seen.view(-1, 1, 1, keep.shape[-1]))
    counted = places - starts + 1
    return [(keep == within).all(), begins.sum(), counted.amax(), torch.where(own, counted, 0).amax()]


def _begins(keep: Tensor) -> Tensor:
    """Where a document begins, [batch or 1, length]: with a query that does not see the one before it; of
    queries that see nothing, with the first."""
    own, before = sees_itself(keep), keep.diagonal(-1, -2, -1).reshape(-1, keep.shape[-1] - 1)
    return F.pad(~before & (own[:, 1:] | own[:, :-1]), (1, 0), value=True)


def band_of(measured: Sequence[int], queries: int, keys: int) -> Band | None:
    """What measure() has found of a mask; None where it is no band, hides a sequence as a whole, or hides a
    query's own place, which a kernel's band does not."""
    same, before, after, shortest, longest, all_see, *documents = measured
    if min(before, after) < 0:
        return None
    if same and shortest:
        # a query sees nothing before its own sequence, or beyond it: such an end is none
        reach = (None if before >= queries - 1 else before, None if after >= longest - 1 else after)
        return Band(*reach, shortest < keys, not all_see)
    if not documents or not documents[0]:
        return None
    count, longest, longest_seen = documents[1:]
    reach = (None if end >= longest_seen - 1 else end for end in (before, after))
    # rounded up: kernels are planned, and compiled graphs made, for each number of them
    return Band(*reach, False, not all_see, _power(count), _power(max(longest, PLANNED_LENGTHS)))


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


def _lengths(keep: Tensor) -> Tensor:
    """The number of keys that any query of each sequence sees, int32 [batch]."""
    return keep.any(-2).sum(-1, dtype=torch.int32).flatten()


def _places(queries: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    query, key = (torch.arange(size, dtype=torch.int64, device=device) for size in (queries, keys))
    return query.unsqueeze(-1), key
