"""The blocks of a model as they are drawn: repeated ones once, each operation above those that read it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import networkx
from torch import fx

from te_transform.graph.nodes import called, name_in_model
from te_transform.plan.rule import Outcome
from te_transform.report.drawing import argument, block_of, by_block, described, detail, module_of
from te_transform.report.places import collapse

_WHOLE = "the graph"


@dataclass(frozen=True)
class Operation:
    """One operation, drawn in a row and a column of its block.

    `rule` is the fusion whose call it is, "" for what was captured; `reads` are the places, in the block, of
    the operations it reads.
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
    """One part of the model, before and after; `name` stands for `count` parts that are the same in both.

    `refused` are the sites in it that were, by their paths in the part.
    """

    name: str
    count: int
    before: tuple[Operation, ...]
    after: tuple[Operation, ...]
    refused: tuple[Outcome, ...]


def blocks_of(before: fx.Graph, after: fx.Graph, refused: Iterable[Outcome] = ()) -> list[Block]:
    """The blocks in the order of the graph; equal ones, as the layers of a model are, become one.

    A graph without numbered parts, as that of a layer which all layers share, is one block.
    """
    sites: dict[str, list[Outcome]] = {}
    for site in refused:
        block = block_of(site.path)
        sites.setdefault(block, []).append(replace(site, path=site.path.removeprefix(block).strip(".")))
    members = [_members(graph) for graph in (before, after)]
    alike: dict[tuple, list[str]] = {}
    for path in dict.fromkeys(chain(*members)):
        kinds = [_kind(path, nodes.get(path, ())) for nodes in members]
        alike.setdefault((*kinds, tuple(sites.get(path, ()))), []).append(path)
    return [
        Block(_named(paths), len(paths), *(_laid_out(nodes.get(paths[0], ())) for nodes in members), told)
        for (*_, told), paths in alike.items()
    ]


def _members(graph: fx.Graph) -> dict[str, list[fx.Node]]:
    nodes = [node for node in graph.nodes if not name_in_model(node) and node.op != "output"]
    numbered = any(part.isdecimal() for node in nodes for part in module_of(node).split("."))
    return by_block(nodes) if numbered or not nodes else {_WHOLE: nodes}


def _named(paths: Sequence[str]) -> str:
    return _WHOLE if paths == [_WHOLE] else ", ".join(pattern for pattern, _ in collapse(paths))


def _kind(path: str, nodes: Sequence[fx.Node]) -> tuple:
    """What two blocks have in common that are drawn as one."""
    places = {node: place for place, node in enumerate(nodes)}

    def told(argument: fx.Node) -> str:
        return f"%{places[argument]}" if argument in places else described(argument)

    operations = (
        (
            _rule(node) or called(node),
            described(node),
            module_of(node).removeprefix(path),
            str(fx.node.map_arg((node.args, node.kwargs), told)),
        )
        for node in nodes
    )
    return _unnumbered(path), tuple(operations)


def _unnumbered(path: str) -> tuple[str, ...]:
    return tuple("*" if part.isdecimal() else part for part in path.split("."))


def _rule(node: fx.Node) -> str:
    return node.meta.get("fused", "")


def _title(node: fx.Node) -> str:
    return _rule(node) or (argument(node) if node.op == "placeholder" else called(node))


def _reads(node: fx.Node, places: dict[fx.Node, int]) -> tuple[int, ...]:
    return tuple(places[source] for source in node.all_input_nodes if source in places)


def _laid_out(nodes: Sequence[fx.Node]) -> tuple[Operation, ...]:
    """Each node in the row above the first that reads it, in the order of the columns that it reads."""
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
        Operation(_title(node), described(node), _rule(node), detail(node), *laid)
        for node, laid in zip(nodes, zip(reads, rows, columns, strict=True), strict=True)
    )


def _mean(numbers: Iterable[float]) -> float:
    found = list(numbers)
    return sum(found) / len(found) if found else 0.0
