"""The blocks of a model, before and after side by side; equal blocks, such as the layers, are one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import fx

from te_transform.graph.grouped import grouped
from te_transform.graph.nodes import called
from te_transform.page.division import DrawnPiece, Side, divided
from te_transform.page.pairs import inactive_reason, rule_of
from te_transform.page.sketch import DrawnOperation, Sketch
from te_transform.plan.rule import Outcome
from te_transform.report.drawing import Part, described, module_text
from te_transform.report.places import listed, unnumbered


@dataclass(frozen=True)
class Block:
    """A part of the model before and after the conversion.

    Attributes:
        paths: the module paths of all parts that are equal on both sides.
        refused: the refused sites of the part, with their paths relative to it.
        sources: the numbers of the blocks whose values the part reads.
    """

    paths: tuple[str, ...]
    before: tuple[DrawnOperation, ...]
    after: tuple[DrawnOperation, ...]
    refused: tuple[Outcome, ...]
    sources: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return listed(self.paths)

    @property
    def count(self) -> int:
        return len(self.paths)


def blocks_of(parts: Iterable[Part], refused: Sequence[Outcome] = ()) -> list[Block]:
    """Return the blocks of all captured graphs, in the order of data flow. Equal pieces are one block."""
    alike = grouped(
        ((_shape(piece), tuple(_refused_in(piece, pieces, refused))), piece)
        for pieces in map(divided, parts)
        for piece in pieces
    )
    names = [listed(path for piece in pieces for path in piece.paths) for pieces in alike.values()]
    home = {
        node: (number, pair)
        for number, pieces in enumerate(alike.values())
        for piece in pieces
        for pair in piece.pairs
        for node in (*pair.before, *pair.after)
    }
    blocks = []
    for number, ((_, sites), pieces) in enumerate(alike.items()):
        sketch = Sketch(number, pieces, home, names)
        paths = dict.fromkeys(path for piece in pieces for path in piece.paths)
        before, after = sketch.side("before"), sketch.side("after")
        blocks.append(Block(tuple(paths), before, after, sites, tuple(sorted(sketch.sources))))
    return blocks


def _refused_in(
    piece: DrawnPiece, pieces: Sequence[DrawnPiece], refused: Iterable[Outcome]
) -> Iterator[Outcome]:
    """Yield the refused sites in a piece, with relative paths. A site belongs to the innermost piece."""
    if piece is not next(other for other in pieces if other.path == piece.path):
        return  # the code after the layers, whose first piece has the sites
    others = [other.paths[0] for other in pieces if len(other.paths[0]) > len(piece.paths[0])]
    for site in refused:
        inner = _relative_path(piece.paths[0], site.path)
        is_deeper = any(_relative_path(other, site.path) is not None for other in others)
        if inner is not None and not is_deeper:
            yield replace(site, path=inner)


def _relative_path(path: str, inner: str) -> str | None:
    """Return `inner` relative to the module path `path`, or None if it lies outside the module."""
    if not path:
        return inner
    if inner == path:
        return ""
    return inner.removeprefix(f"{path}.") if inner.startswith(f"{path}.") else None


def _shape(piece: DrawnPiece) -> tuple:
    """Return a key that is equal for pieces drawn as one."""
    return unnumbered(piece.paths[0]), *(tuple(_comparable(piece, side)) for side in ("before", "after"))


def _comparable(piece: DrawnPiece, side: Side) -> Iterator[tuple]:
    """Yield the operations of one side in a form that is equal for equal pieces."""
    nodes = [(node, place) for place, pair in enumerate(piece.pairs) for node in getattr(pair, side)]
    places = {node: place for place, (node, _) in enumerate(nodes)}

    def argument(node: fx.Node) -> str:
        return f"%{places[node]}" if node in places else described(node)

    for node, pair in nodes:
        arguments = str(fx.node.map_arg((node.args, node.kwargs), argument))
        path = module_text(node)
        module = path.removeprefix(piece.path) if path.startswith(piece.path) else unnumbered(path)
        yield rule_of(node) or called(node), inactive_reason(node), described(node), module, arguments, pair
