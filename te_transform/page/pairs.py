"""Pair each operation of the converted graph with the captured operations that it replaces."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor, fx

from te_transform.graph import ops
from te_transform.graph.nodes import called, changes_state, may_be_view, name_in_model, value
from te_transform.report.drawing import is_fused


@dataclass(eq=False)
class NodePair:
    """Operations that compute the same values before and after; either side may be empty.

    `order` sorts pairs by data flow.
    """

    before: list[fx.Node] = field(default_factory=list)
    after: list[fx.Node] = field(default_factory=list)
    order: float = 0.0

    @property
    def node(self) -> fx.Node:
        """The operation whose module the pair belongs to."""
        return (self.after or self.before)[0]


def shown_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes of a graph without the model's own tensors and the output."""
    return [node for node in graph.nodes if not name_in_model(node) and node.op != "output"]


def paired(before: fx.Graph, after: fx.Graph) -> list[NodePair]:
    """Return all operations of both graphs in pairs, in the order of data flow.

    A fused op is paired with the captured operations that it replaces, and with the items of its result.
    Other operations are paired by their captured operation, or by their name.
    """
    pairs: dict[fx.Node, NodePair] = {}
    for place, node in enumerate(shown_nodes(after)):
        whole = _without_item(node)
        pairs[node] = pairs[whole] if is_fused(whole) and whole is not node else NodePair(order=place)
        pairs[node].after.append(node)
    fused = {name: pair for node, pair in pairs.items() for name in _replaced_by(node)}
    kept = {_origin_of(node): pair for node, pair in pairs.items()}
    pairs_of_readers: dict[fx.Node, NodePair] = {}
    nodes = shown_nodes(before)
    for place, node in reversed([*enumerate(nodes)]):
        readers = {pairs_of_readers[user] for user in node.users if user in pairs_of_readers}
        pair = fused.get(node.meta.get("origin", "")) or kept.get(_origin_of(node))
        if pair is None and len(readers) == 1 and is_fused((only := next(iter(readers))).node):
            pair = only
        if pair is None:
            pair = NodePair(order=_just_before(readers, place))
        pairs_of_readers[node] = pair
        pair.before.insert(0, node)
    for node in reversed(shown_nodes(after)):  # weights are joined at the start of the graph
        if node.target is ops.join:
            pairs[node].order = _just_before({pairs[user] for user in node.users if user in pairs}, 0)
    return sorted(dict.fromkeys([*pairs.values(), *pairs_of_readers.values()]), key=lambda pair: pair.order)


def _just_before(readers: Iterable[NodePair], place: float) -> float:
    return min((pair.order for pair in readers), default=place) - 0.5


def _replaced_by(node: fx.Node) -> Iterator[str]:
    outcome = node.meta.get("outcome")
    return iter(() if outcome is None else outcome.inside)


def _origin_of(node: fx.Node) -> str:
    return node.meta.get("origin") or node.name


def rule_of(node: fx.Node) -> str:
    """Return the rule of a fused op, "" for other nodes."""
    return node.meta.get("fused", "") if node.op == "call_module" else ""


def inactive_reason(node: fx.Node) -> str:
    """Return why a fused op runs unfused in a call of the example's sizes, "" if it is active or not fused.

    The joined weights and the columns of a merged product share its reason.
    """
    if node.target is ops.columns:
        node = _without_item(node.args[0])
    elif node.target is ops.join:
        node = next(iter(node.users), node)
    outcome = node.meta.get("outcome")
    return "" if outcome is None else outcome.inactive


def _without_item(node: fx.Node) -> fx.Node:
    """Return the call whose result has the node as an item, or the node itself."""
    is_item = node.target is operator.getitem and isinstance(value(node.args[0]), tuple)
    return node.args[0] if is_item else node


def is_bookkeeping(node: fx.Node) -> bool:
    """Return True for views, items of tuples, modes and sizes, which compute nothing."""
    if node.op == "placeholder" or is_merged(node):
        return False
    computes = isinstance(value(node), (Tensor, tuple)) and called(node) != "getitem"
    return may_be_view(node) or changes_state(node) or not computes


def is_merged(node: fx.Node) -> bool:
    """Return True for a product of several linears, its joined weights, and the columns of each linear."""
    if node.target is ops.columns:
        source = node.args[0]
        return (
            isinstance(source, fx.Node) and bool(rule_of(whole := _without_item(source))) and is_merged(whole)
        )
    reads_joined = any(source.target is ops.join for source in node.all_input_nodes)
    return node.target is ops.join or (bool(rule_of(node)) and reads_joined)
