"""Lay out the blocks of a model for drawing: equal blocks once, each operation above its readers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import networkx
from torch import fx

from te_transform.graph.nodes import called, name_in_model
from te_transform.page.details import argument_text, detail
from te_transform.plan.rule import Outcome
from te_transform.report.drawing import Part, block_of, by_block, described, module_text
from te_transform.report.places import listed


@dataclass(frozen=True)
class DrawnOperation:
    """An operation, drawn in a row and a column of its block.

    `rule` names the rule that fused it, "" for a captured operation. `reads` are the indices, in the block,
    of the operations that it reads.
    """

    title: str
    value: str
    rule: str
    detail: str
    reads: tuple[int, ...]
    row: int
    column: float


@dataclass(frozen=True)
class Block:
    """A part of the model before and after; `paths` are the module paths of all parts that are equal in both.

    `refused` are the refused sites of the part, with their paths relative to it.
    """

    paths: tuple[str, ...]
    before: tuple[DrawnOperation, ...]
    after: tuple[DrawnOperation, ...]
    refused: tuple[Outcome, ...]

    @property
    def name(self) -> str:
        return listed(self.paths)

    @property
    def count(self) -> int:
        return len(self.paths)


def blocks_of(parts: Iterable[Part], refused: Sequence[Outcome] = ()) -> list[Block]:
    """Return the blocks of all captured graphs; equal blocks, such as the layers of a model, become one.

    A graph without numbered modules, such as the graph of one layer that all layers share, is one block.
    """
    alike: dict[tuple, tuple[list[str], list[Sequence[fx.Node]]]] = {}
    for part in parts:
        members = [_members(graph) for graph in (part.before, part.after)]
        sites = _refused_in(part, refused, is_one=all(nodes.keys() <= {""} for nodes in members))
        for path in dict.fromkeys(chain(*members)):
            nodes = [found.get(path, ()) for found in members]
            signatures = [_signature(path, each) for each in nodes]
            key = (_unnumbered(_joined(part.paths[0], path)), *signatures, tuple(sites.get(path, ())))
            paths, _ = alike.setdefault(key, ([], nodes))
            paths += [_joined(own, path) for own in part.paths]
    return [
        Block(tuple(dict.fromkeys(paths)), *map(_laid_out, nodes), told)
        for (*_, told), (paths, nodes) in alike.items()
    ]


def _refused_in(part: Part, refused: Iterable[Outcome], is_one: bool) -> dict[str, list[Outcome]]:
    """Return the refused sites of each block of a captured graph, with paths relative to the block."""
    sites: dict[str, list[Outcome]] = {}
    for site in refused:
        if (path := _below(part.paths[0], site.path)) is not None:
            block = "" if is_one else block_of(path)
            sites.setdefault(block, []).append(replace(site, path=path.removeprefix(block).strip(".")))
    return sites


def _joined(path: str, inner: str) -> str:
    return ".".join(filter(None, (path, inner)))


def _below(path: str, inner: str) -> str | None:
    """Return `inner` relative to the module path `path`, or None if it lies outside the module."""
    if not path or inner == path:
        return inner if not path else ""
    return inner.removeprefix(f"{path}.") if inner.startswith(f"{path}.") else None


def _members(graph: fx.Graph) -> dict[str, list[fx.Node]]:
    nodes = [node for node in graph.nodes if not name_in_model(node) and node.op != "output"]
    numbered = any(part.isdecimal() for node in nodes for part in module_text(node).split("."))
    return by_block(nodes) if numbered or not nodes else {"": nodes}


def _signature(path: str, nodes: Sequence[fx.Node]) -> tuple:
    """Return the operations of a block in a form that is equal for blocks drawn as one."""
    places = {node: place for place, node in enumerate(nodes)}

    def told(argument: fx.Node) -> str:
        return f"%{places[argument]}" if argument in places else described(argument)

    operations = (
        (
            _rule(node) or _spelled(node),
            described(node),
            module_text(node).removeprefix(path),
            str(fx.node.map_arg((node.args, node.kwargs), told)),
        )
        for node in nodes
    )
    return tuple(operations)


def _spelled(node: fx.Node) -> str:
    """Return the name of the call; numbers in an input's name become "*", such as a cache tensor's layer."""
    return re.sub(r"\d+", "*", called(node)) if node.op == "placeholder" else called(node)


def _unnumbered(path: str) -> tuple[str, ...]:
    return tuple("*" if part.isdecimal() else part for part in path.split("."))


def _rule(node: fx.Node) -> str:
    return node.meta.get("fused", "")


def _title(node: fx.Node) -> str:
    return _rule(node) or (argument_text(node) if node.op == "placeholder" else called(node))


def _reads(node: fx.Node, places: dict[fx.Node, int]) -> tuple[int, ...]:
    return tuple(places[source] for source in node.all_input_nodes if source in places)


def _laid_out(nodes: Sequence[fx.Node]) -> tuple[DrawnOperation, ...]:
    """Place each node in the row above its first reader, ordered by the columns of the nodes it reads."""
    places = {node: place for place, node in enumerate(nodes)}
    reads = [_reads(node, places) for node in nodes]
    graph = networkx.DiGraph((place, source) for place, sources in enumerate(reads) for source in sources)
    graph.add_nodes_from(range(len(nodes)))
    rows, columns = [0] * len(nodes), [0.0] * len(nodes)
    from_below = [*networkx.topological_generations(graph)]
    for row, generation in enumerate(reversed(from_below)):
        wanted = {place: _mean(columns[source] for source in reads[place]) for place in generation}
        ordered = sorted(generation, key=lambda place: (wanted[place], place))
        for column, place in enumerate(ordered):
            rows[place], columns[place] = row, column - (len(ordered) - 1) / 2
    return tuple(
        DrawnOperation(_title(node), described(node), _rule(node), detail(node), *laid)
        for node, laid in zip(nodes, zip(reads, rows, columns, strict=True), strict=True)
    )


def _mean(numbers: Iterable[float]) -> float:
    found = list(numbers)
    return sum(found) / len(found) if found else 0.0
