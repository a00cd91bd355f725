"""A word and how models spell it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from te_transform import rewrite
from te_transform.pattern import Match, Pattern
from te_transform.trace import Recording


@dataclass(frozen=True)
class Spelling:
    """A pattern, and the call that says the same: target and arguments, or None where it only looks alike."""

    pattern: Pattern
    call: Callable[[Recording, Match], tuple[Callable, tuple] | None]


def write(recording: Recording, spellings: Sequence[Spelling]) -> None:
    """Put the word for every match, the largest first: the graph is read from its end."""
    writes = [node for node in recording.graph.nodes if rewrite.writes(node)]
    for node in reversed(recording.graph.nodes):
        call = next(_calls(recording, node, spellings, writes), None)
        if call is not None:
            rewrite.replace(recording, *call)


def _calls(
    recording: Recording, node: fx.Node, spellings: Sequence[Spelling], writes: list[fx.Node]
) -> Iterator[tuple[tuple[fx.Node, ...], Callable, tuple]]:
    for spelling in spellings:
        for match in spelling.pattern.match(node, Match(), []):
            # the word reads its arguments where the last of the match stood, so nothing may write in between
            if match.nodes and not any(min(match.nodes) < w < node for w in writes):
                call = spelling.call(recording, match)
                if call is not None:
                    yield match.nodes, *call
