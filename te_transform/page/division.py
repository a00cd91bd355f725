"""Divide a captured graph into the pieces of the model that are drawn as blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import fx

from te_transform.graph.nodes import path_below
from te_transform.page.pairs import NodePair, is_bookkeeping, paired
from te_transform.report.drawing import Part, module_text

Side = Literal["before", "after"]
_MANY = 2  # the least operations of a layer: a numbered module without modules inside


@dataclass(eq=False)
class DrawnPiece:
    """Operations of one module of a captured graph, with the module's path below the part."""

    part: Part
    path: str
    pairs: list[NodePair]

    @property
    def paths(self) -> list[str]:
        """The paths in the model, one for each module that shares the graph."""
        return [path_below(own, self.path) for own in self.part.paths]

    def nodes(self, side: Side) -> list[fx.Node]:
        """Return the operations of one side."""
        return [node for pair in self.pairs for node in getattr(pair, side)]


def divided(part: Part) -> list[DrawnPiece]:
    """Return the pieces of a captured graph, in the order of data flow.

    Each layer, which is a numbered module, is a piece, and each module beside the layers, such as an
    embedding. Code of a model before its layers and code after them are two pieces. A graph without layers is
    one piece.
    """
    pairs = [pair for pair in paired(part.before, part.after) if pair.node.op != "placeholder"]
    layers = _layer_paths(pairs)
    around = {layer[:depth] for layer in layers for depth in range(len(layer))}
    seen: set[tuple[str, ...]] = set()  # the lists of layers so far
    pieces: dict[tuple, DrawnPiece] = {}
    for pair in pairs:
        parts = _path_parts(pair)
        layer = next((parts[:depth] for depth in range(len(parts) + 1) if parts[:depth] in layers), None)
        if layer is not None:
            seen.add(layer[:-1])
            path, key = layer, (layer,)
        else:
            path = _outermost_path(parts, around)
            key = path, len(seen)
        pieces.setdefault(key, DrawnPiece(part, ".".join(path), [])).pairs.append(pair)
    return [*pieces.values()]


def _path_parts(pair: NodePair) -> tuple[str, ...]:
    """Return the parts of a pair's path. A fused op has the path of its site."""
    outcome = pair.node.meta.get("outcome")
    path = module_text(pair.node) if outcome is None else outcome.path
    return tuple(path.split(".")) if path else ()


def _layer_paths(pairs: Iterable[NodePair], start: int = 0) -> set[tuple[str, ...]]:
    """Return the paths of layers: numbered modules that have modules inside, or several operations.

    The layers of a list share names of modules inside. A numbered module that shares none, such as an encoder
    in a Sequential with a pooling, may have the layers inside. Numbers before the place `start` do not count.
    """
    inside: dict[tuple[str, ...], list[NodePair]] = {}
    for pair in pairs:
        parts = _path_parts(pair)
        depth = next((n for n, part in enumerate(parts, 1) if n > start and part.isdecimal()), 0)
        if depth:
            inside.setdefault(parts[:depth], []).append(pair)
    names = {path: _names_inside(path, own) for path, own in inside.items()}
    paths: set[tuple[str, ...]] = set()
    for path, own in inside.items():
        others = [names[other] for other in names if other[:-1] == path[:-1] and other != path]
        is_layer = not others or not names[path].isdisjoint(set().union(*others))
        size = _MANY if names[path] else sum(not is_bookkeeping(pair.node) for pair in own)
        nested = set() if is_layer else _layer_paths(own, len(path))
        paths |= nested or ({path} if size >= _MANY else set())
    return paths


def _names_inside(path: tuple[str, ...], pairs: Iterable[NodePair]) -> set[str]:
    """Return the names of the modules directly in the module at a path."""
    return {parts[len(path)] for parts in map(_path_parts, pairs) if len(parts) > len(path)}


def _outermost_path(parts: Sequence[str], around: set[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the path of the outermost module that has no layers inside, or of the code around layers."""
    depth = next((depth for depth in range(len(parts) + 1) if parts[:depth] not in around), len(parts))
    return tuple(parts[: depth if around else 0])
