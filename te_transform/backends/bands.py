"""Masks that are bands of keys around each query: sliding windows, padded batches, and packed documents.

A padded sequence also ends after its first keys. In packed documents, a query sees only its own document.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from te_transform.graph.bound import F

# The kernels' tile size in queries. For packed sequences, kernels are planned for multiples of this length.
PLANNED_LENGTHS = 128


class Band(NamedTuple):
    """The range of keys that each query sees.

    Attributes:
        before, after: how many positions before and after its own a query sees; None if unlimited.
        padded: True if sequences are padded at the end: queries see only the first keys of each.
        blind: True if some query sees no key.
        documents: the maximum number of documents, if sequences consist of documents; else 0. Queries see
            only their own document. Padding at the start of a sequence counts as a document whose queries
            see nothing.
        longest: the maximum length of a document, or 0 without documents.
    """

    before: int | None
    after: int | None
    padded: bool
    blind: bool
    documents: int = 0
    longest: int = 0


class Banded(NamedTuple):
    """A boolean mask [..., 1, queries, keys], and the fields of its Band.

    `ends` is int32 and begins with 0. For padded sequences, it holds the cumulative numbers of keys, [batch
    or 1, plus 1]. For documents, it holds the cumulative ends of the documents, [documents + 1].
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
        """The fields as a Band. torch.fx cannot print nested tuples into a graph's code."""
        return Band(*self[2:])


class Seeing(NamedTuple):
    """A floating-point mask under which every query sees a key: no row is fully masked."""

    mask: Tensor


def banded(mask: Tensor, band: Band) -> Banded:
    """Return the mask with the band that it is known to be."""
    keep, ends = kept_keys(mask), None
    if band.documents:
        begun = _begins(keep).flatten().cumsum(0)
        numbers = torch.arange(1, band.documents + 1, dtype=torch.int64, device=mask.device)
        ends = F.pad(torch.searchsorted(begun, numbers, out_int32=True), (0, 1), value=len(begun))
    elif band.padded:
        ends = F.pad(_lengths(keep).cumsum(0, dtype=torch.int32), (1, 0))
    return Banded(keep, ends, *band)


def tensor_of(mask: Tensor | Banded | Seeing | None) -> Tensor | None:
    """Return the mask's tensor."""
    return mask.mask if isinstance(mask, (Banded, Seeing)) else mask


def kept_keys(mask: Tensor) -> Tensor:
    """Return a boolean mask of the kept keys. A floating-point mask keeps keys where it is 0."""
    return mask if mask.dtype is torch.bool else mask == 0


def sees_itself(keep: Tensor) -> Tensor:
    """Return True for each query that sees its own position, [batch or 1, length]; queries equal keys."""
    return keep.diagonal(dim1=-2, dim2=-1).reshape(-1, keep.shape[-1])


def measure(keep: Tensor) -> Tensor:
    """Compute the input of band_of() from a boolean mask [..., queries, keys], on the mask's device.

    Returns:
        Six integers: 1 for a band, its reach before and after a query's position, the shortest and the
        longest sequence. The last is 1 if every query sees a key. If there are as many queries as keys, four
        more integers follow, see _documents().
    """
    queries, keys = keep.shape[-2:]
    query, key = (torch.arange(size, dtype=torch.int64, device=keep.device) for size in (queries, keys))
    query = query.unsqueeze(-1)
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
    """Compare the mask `keep` with documents, given a band that contains all kept keys.

    Returns:
        Four numbers: 1 for a band within documents, the number of documents, and the length of the longest.
        The last is this length without documents that are padding.
    """
    begins, own = _begins(keep), sees_itself(keep)
    positions = torch.arange(begins.numel(), dtype=torch.int64, device=keep.device).view_as(begins)
    starts = torch.where(begins, positions, 0).flatten().cummax(0).values.view_as(begins)
    # padding neither sees nor is seen: keys and queries get different numbers
    seen, seeing = torch.where(own, starts, -1), torch.where(own, starts, -2)
    within = band & (seeing.view(-1, 1, keep.shape[-1], 1) == seen.view(-1, 1, 1, keep.shape[-1]))
    counted = positions - starts + 1
    return [(keep == within).all(), begins.sum(), counted.amax(), torch.where(own, counted, 0).amax()]


def _begins(keep: Tensor) -> Tensor:
    """Return True where a document begins, [batch or 1, length].

    A document begins at a query that does not see the position before. A run of queries that see nothing
    begins at its first query.
    """
    own = sees_itself(keep)
    before = keep.diagonal(-1, -2, -1).reshape(len(own), keep.shape[-1] - 1)  # no columns for one key
    return F.pad(~before & (own[:, 1:] | own[:, :-1]), (1, 0), value=True)


def band_of(measured: Sequence[int], queries: int, keys: int) -> Band | None:
    """Return the band that measure() found, or None if the mask is not a band that kernels support.

    A kernel's band never masks a whole sequence, and never a query's own position.
    """
    same, before, after, shortest, longest, all_see, *documents = measured
    if min(before, after) < 0:
        return None
    if same and shortest:
        # a limit that lies outside of the sequence has no effect
        reach = (None if before >= queries - 1 else before, None if after >= longest - 1 else after)
        return Band(*reach, shortest < keys, not all_see)
    if not documents or not documents[0]:
        return None
    count, longest, longest_seen = documents[1:]
    reach = (None if end >= longest_seen - 1 else end for end in (before, after))
    # rounded up, because kernels are planned and graphs compiled for each number of documents
    return Band(*reach, False, not all_see, _power(count), _power(max(longest, PLANNED_LENGTHS)))


def _power(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def _lengths(keep: Tensor) -> Tensor:
    """Return the number of keys that any query of each sequence sees, int32 [batch]."""
    return keep.any(-2).sum(-1, dtype=torch.int32).flatten()
