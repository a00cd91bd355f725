"""Sketch a block: its operations, with inputs of the model, and ports to other blocks."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import fx

from te_transform.graph.nodes import called, name_in_model, value
from te_transform.page.details import argument_text, detail
from te_transform.page.division import DrawnPiece, Side
from te_transform.page.pairs import NodePair, inactive_reason, is_bookkeeping, is_merged, rule_of
from te_transform.report.drawing import described

Kind = Literal["", "input", "port", "minor", "merged"]


@dataclass(frozen=True)
class DrawnOperation:
    """An operation of a block.

    Attributes:
        title: its name.
        value: dtype and shape of the result, or "".
        rule: the name of the rule that fused it, "" for a captured operation.
        kind: "input" of the model, "port" to or from another block, "minor" for bookkeeping, "merged" for the
            parts of a merged product, "" for others.
        detail: the text that a click shows.
        pair: the number of the pair, which the same computation has on the other side.
        reads: the positions of the operations that it reads, on the same side.
        is_inactive: True for a fused op, or a part of it, that runs unfused in a call of the example's sizes.
    """

    title: str
    value: str
    rule: str
    kind: Kind
    detail: str
    pair: int
    reads: tuple[int, ...]
    is_inactive: bool = False


def _value_name(node: fx.Node) -> str:
    """Return the name of a value in the model's code, without a trailing number."""
    return re.sub(r"_\d+$", "", node.meta.get("origin") or rule_of(node) or node.name)


def _result(node: fx.Node) -> str:
    """Return dtype and shape of the result, or of its first item."""
    items = (described(user) for user in node.users if user.target is operator.getitem and user.args[1] == 0)
    return described(node) or (next(items, "") if isinstance(value(node), tuple) else "")


class Sketch:
    """The drawing of a block: the operations of its first piece, with inputs, and ports to other blocks.

    Attributes:
        number: of the block.
        pieces: of captured graphs that the block shows as one.
        home: the number of the block and the pair of each operation of the model.
        names: of all blocks.
        pairs: the numbers of the pairs and ports in the drawing.
        sources: the numbers of the other blocks whose values this block reads.
    """

    def __init__(
        self,
        number: int,
        pieces: Sequence[DrawnPiece],
        home: dict[fx.Node, tuple[int, NodePair]],
        names: Sequence[str],
    ):
        self.number, self.pieces, self.home, self.names = number, pieces, home, names
        self.pairs: dict[object, int] = {pair: place for place, pair in enumerate(pieces[0].pairs)}
        self.sources: set[int] = set()

    def side(self, side: Side) -> tuple[DrawnOperation, ...]:
        """Return the operations of one side."""
        members = [piece.nodes(side) for piece in self.pieces]
        own = {node: pair for pair in self.pieces[0].pairs for node in getattr(pair, side)}
        outside = [*zip(*map(_read_from_outside, members), strict=False)]
        drawn = [self._entry(same) for same in outside]
        places = {node: place for place, node in enumerate((*(same[0] for same in outside), *members[0]))}
        for node in members[0]:
            kind: Kind = "merged" if is_merged(node) else "minor" if is_bookkeeping(node) else ""
            reads = tuple(places[source] for source in node.all_input_nodes if source in places)
            texts = rule_of(node) or called(node), _result(node), rule_of(node), kind, detail(node)
            is_inactive = bool(inactive_reason(node))
            drawn.append(DrawnOperation(*texts, self.pairs[own[node]], reads, is_inactive))
        inside = [{*nodes} for nodes in members]
        for same in zip(*members, strict=True):
            pair = self.pairs.setdefault(("to", own[same[0]]), len(self.pairs))
            drawn += self._exit(same, inside, pair, places[same[0]])
        return tuple(drawn)

    def _entry(self, same: Sequence[fx.Node]) -> DrawnOperation:
        """Return the port of a value from outside, given by one node for each piece."""
        node = same[0]
        _, source = self.home.get(node, (None, node.name))
        pair = self.pairs.setdefault(("from", source), len(self.pairs))
        if node.op == "placeholder":
            return DrawnOperation(argument_text(node), described(node), "", "input", detail(node), pair, ())
        numbers = dict.fromkeys(self.home[each][0] for each in same if each in self.home)
        self.sources.update(numbers.keys() - {self.number})
        origin = f"from {self._blocks(numbers, 'the layer before')}"
        return DrawnOperation(_value_name(node), origin, "", "port", f"{detail(node)}\n{origin}", pair, ())

    def _exit(
        self, same: Sequence[fx.Node], inside: Sequence[set[fx.Node]], pair: int, place: int
    ) -> Iterator[DrawnOperation]:
        """Yield a port if other blocks read a value, or if the graph returns it.

        Args:
            same: the value in each piece.
            inside: the operations of each piece.
            pair: the number of the port.
            place: the position of the value in the drawing.
        """
        readers = [u for node, own in zip(same, inside, strict=True) for u in node.users if u not in own]
        if not readers:
            return
        numbers = dict.fromkeys(self.home[user][0] for user in readers if user in self.home)
        targets = [self._blocks(numbers, "the next layer")] if numbers else []
        targets += ["the output"] * any(user.op == "output" for user in readers)
        text = f"to {', '.join(targets)}"
        yield DrawnOperation(
            _value_name(same[0]), text, "", "port", f"{detail(same[0])}\n{text}", pair, (place,)
        )

    def _blocks(self, numbers: Iterable[int], own: str) -> str:
        return ", ".join(own if number == self.number else self.names[number] for number in numbers)


def _read_from_outside(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the values that operations read from other blocks, without the model's tensors, in order."""
    own = {*nodes}
    sources = dict.fromkeys(source for node in nodes for source in node.all_input_nodes)
    return [source for source in sources if source not in own and not name_in_model(source)]
