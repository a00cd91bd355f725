"""Where every weight goes: declared once per rule, run both ways.

A rule declares moves between roles, Same("norm.weight", "fused.layer_norm_weight"). Bound to a match they
become Layouts, one for each fused parameter: the original parameters it is made of, row block by row block. A
ledger is the dict {fused parameter: Layout}; `forward` turns an original checkpoint into a fused one,
`backward` turns it back, bitwise, and both work on anything shaped like the parameters: gradients and
optimizer moments too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as sentences name it: bfloat16."""
    return str(dtype).removeprefix("torch.")


def is_quantised(tensor: Tensor) -> bool:
    """Whether it is one of TE's tensors, which hold their values in FP8 alone."""
    return hasattr(tensor, "_quantizer")


def exact(tensor: Tensor) -> Tensor:
    """The tensor, in the dtype it says it has: dequantised where that is not how it is held."""
    return tensor.dequantize() if is_quantised(tensor) else tensor


class LedgerError(ValueError):
    """A rule's moves do not cover the fused module, or do not fit it."""


@dataclass(frozen=True)
class Same:
    """The target is the source: the Parameter itself moves, with its ties and its optimizer state."""

    source: str
    target: str


@dataclass(frozen=True)
class Concat:
    """The target is the sources of a tuple role, one below the other, in the role's order."""

    source: str
    target: str


@dataclass(frozen=True)
class SwapHalves:
    """The target is the source with its second half of rows first: a gate and its activated partner change
    places."""

    source: str
    target: str


Move = Same | Concat | SwapHalves


@dataclass(frozen=True)
class Piece:
    """One original parameter inside a fused one: `rows` of it, as stored or transposed."""

    name: str
    rows: int
    transposed: bool = False

    def stored(self, block: Tensor) -> Tensor:
        """The block of the fused parameter, a view of it, as the original module stores it (and back
        again)."""
        return block.t() if self.transposed else block


@dataclass(frozen=True)
class Layout:
    """A fused parameter's make-up: pieces below each other, then, if `order` is given, rows[order]."""

    pieces: tuple[Piece, ...]
    order: tuple[int, ...] | None = None

    @cached_property
    def is_same(self) -> bool:
        """Whether the fused parameter is one original parameter as it stands."""
        return len(self.pieces) == 1 and not self.pieces[0].transposed and self.order is None

    @cached_property
    def is_whole(self) -> bool:
        """Whether the fused parameter is one original parameter, as it stands or transposed."""
        return len(self.pieces) == 1 and self.order is None

    def halves_swapped(self) -> Layout:
        """The same rows, the second half first: by the order of the pieces where they split so, else by
        permutation."""
        rows = sum(piece.rows for piece in self.pieces)
        for piece, _, stop in self.spans:
            if 2 * stop == rows and self.order is None:
                middle = self.pieces.index(piece) + 1
                return Layout((*self.pieces[middle:], *self.pieces[:middle]))
        order = self.order or tuple(range(rows))
        return Layout(self.pieces, (*order[rows // 2 :], *order[: rows // 2]))

    @cached_property
    def spans(self) -> tuple[tuple[Piece, int, int], ...]:
        """Each piece with the rows, before `order`, that it fills."""
        edges = pairwise(accumulate((piece.rows for piece in self.pieces), initial=0))
        return tuple((piece, *edge) for piece, edge in zip(self.pieces, edges, strict=True))

    def join(self, originals: Mapping[str, Tensor]) -> Tensor:
        """The fused tensor of these original ones."""
        if self.is_same:
            return originals[self.pieces[0].name]
        rows = torch.cat([piece.stored(originals[piece.name]) for piece in self.pieces])
        return rows if self.order is None else rows[list(self.order)]

    def part(self, fused: Tensor, name: str) -> Tensor:
        """The original tensor `name` inside `fused`: a view, or a copy where the rows were permuted."""
        if self.is_same:
            return fused
        piece, start, stop = next(span for span in self.spans if span[0].name == name)
        if self.order is not None:
            where = torch.empty(len(self.order), dtype=torch.long)
            where[list(self.order)] = torch.arange(len(self.order))
            return piece.stored(fused[where[start:stop]])
        return piece.stored(fused[start:stop])


def forward(ledger: Mapping[str, Layout], originals: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Fused tensors, and all that no layout names as it is, from original ones.

    Raises:
        LedgerError: an original that a layout needs is missing.
    """
    used = {piece.name for layout in ledger.values() for piece in layout.pieces}
    missing = sorted(used - originals.keys())
    if missing:
        raise LedgerError(f"the checkpoint lacks {missing}, the fused parameters are made of them")
    kept = {name: tensor for name, tensor in originals.items() if name not in used}
    return kept | {target: layout.join(originals) for target, layout in ledger.items()}


def backward(ledger: Mapping[str, Layout], fused: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The original tensors, from fused ones: the inverse of `forward`."""
    kept = {name: tensor for name, tensor in fused.items() if name not in ledger}
    parts = {
        piece.name: layout.part(fused[target], piece.name).contiguous()
        for target, layout in ledger.items()
        for piece in layout.pieces
    }
    return kept | parts
