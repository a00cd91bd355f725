"""Replace the spellings of an op that models use by the op."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from te_transform.graph import edit
from te_transform.graph.grouped import grouped
from te_transform.graph.pattern import Match, Pattern


@dataclass(frozen=True)
class Spelling:
    """A pattern, and a function that returns the equivalent call (target, arguments) or None."""

    pattern: Pattern
    call: Callable[[fx.Graph, Match], tuple[Callable, tuple] | None]


def _leave_as_is(graph: fx.Graph) -> None:
    """Leave the graph as it is."""


@dataclass(frozen=True, eq=False)
class Forms:
    """Canonical forms that a rule's pattern needs, besides those of canonicalize/.

    Args:
        spellings: Spellings of ops.
        spell: A function that rewrites the canonical graph before the spellings. All other forms are there.
        prepare: A function that edits the captured graph before it is copied. The graph still returns the
            same values and makes the same in-place writes to its inputs.
    """

    spellings: Sequence[Spelling] = ()
    spell: Callable[[fx.Graph], None] = _leave_as_is
    prepare: Callable[[fx.Graph], None] = _leave_as_is


def write(graph: fx.Graph, spellings: Sequence[Spelling]) -> None:
    """Replace every match by its op; the graph is read from its end, so that the largest match wins."""
    by_root = grouped((target, spelling) for spelling in spellings for target in spelling.pattern.roots)
    for node in reversed(graph.nodes):
        call = next(_spelled_calls(graph, node, by_root.get(node.target, ())), None)
        if call is not None:
            edit.replace(*call)


def _spelled_calls(
    graph: fx.Graph, node: fx.Node, spellings: Sequence[Spelling]
) -> Iterator[tuple[tuple[fx.Node, ...], Callable, tuple]]:
    for spelling in spellings:
        for match in spelling.pattern.match(node, Match(), None):
            if _in_one_region(match.nodes):
                call = spelling.call(graph, match)
                if call is not None:
                    yield match.nodes, *call


def _in_one_region(nodes: Sequence[fx.Node]) -> bool:
    """Return True if no write lies between `nodes`: the op may then read its arguments at the last node."""
    return bool(nodes) and len({node.meta["region"] for node in nodes}) == 1
