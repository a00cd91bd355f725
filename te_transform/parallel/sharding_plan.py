"""The plan of a sharded graph: which values are sharded, and which nodes compute on shards."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, fx

from te_transform.graph import ops
from te_transform.graph.nodes import is_tensor_node, shape_of, value, writes
from te_transform.parallel.collectives import Ranks, Shards
from te_transform.parallel.sharding import Refusal, ShardingStep, step


class ShardingPlan:
    """The decision for each node of a canonical graph, made on whole values: on shards, or on whole values.

    Attributes:
        shapes: of the whole values.
        shards: of the values that are sharded.
        trained: the values that may have a gradient.
        entered: whole values whose gradient has a term on each rank.
        steps: how each node is computed on shards, in the order of the graph; None: on whole values.

    Raises:
        Refusal: the graph writes in place to a value that would be sharded.
    """

    def __init__(self, graph: fx.Graph, shards: Mapping[str, Shards], ranks: Ranks, sequence: bool):
        self.ranks, self.sequence = ranks, sequence
        parameters = [node for node in graph.nodes if node.op == "placeholder" and node.name in shards]
        self.shards = {node: shards[node.name] for node in parameters}
        self.shapes = {n: tuple(shape_of(n)) for n in graph.nodes if is_tensor_node(n)}
        self.trained = _values_with_gradient(graph)
        self.entered: set[fx.Node] = set()
        nodes = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr")]
        self.steps = {node: self._step(node) for node in nodes}

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """Return the shape of a value on this rank."""
        return self.ranks.shape(self.shapes[node], self.shards.get(node))

    def _step(self, node: fx.Node) -> ShardingStep | None:
        """Return how a node is computed on shards, or None. Note the shards of its result."""
        try:
            how = None if node.op == "output" else step(node, self.shards, self.ranks.count)
        except Refusal:
            how = None
        if writes(node) and any(argument in self.shards for argument in node.all_input_nodes):
            raise Refusal("the model writes in place to what would be sharded")
        if how is None:
            whole = not any(argument in self.shards for argument in node.all_input_nodes)
            if node.target in ops.NORMS and whole and self._is_entered(node):
                self.entered.add(node)
            return None
        shards = self._tokens(self.shapes[node]) if how.is_term and self.sequence else how.shards
        if shards is not None:
            self.shards[node] = shards
        return how

    def _is_entered(self, norm: fx.Node) -> bool:
        """Return True if only linears that are divided by columns read a norm.

        The ranks' terms of the gradient are then summed before the norm, and the norm is fused with the
        linears.
        """
        return bool(norm.users) and all(
            user.target is ops.linear and user.args[0] is norm and self._is_divided_by_columns(user)
            for user in norm.users
        )

    def _is_divided_by_columns(self, linear: fx.Node) -> bool:
        weight = linear.args[1]
        source = weight.args[0] if weight not in self.shards and weight.all_input_nodes else weight
        shards = self.shards.get(source)
        return shards is not None and (shards.dim == -2) == (source is weight)

    def _tokens(self, shape: tuple[int, ...]) -> Shards | None:
        """Return shards of the longest divisible dimension before the last: the sequence, or the batch."""
        sizes = {size: i for i, size in reversed([*enumerate(shape[:-1])]) if size % self.ranks.count == 0}
        longest = max(sizes, default=0)
        return Shards(sizes[longest] - len(shape), (longest,)) if longest else None


def _values_with_gradient(graph: fx.Graph) -> set[fx.Node]:
    """Return the values that may have a gradient."""
    values = {n for n in graph.nodes if n.op == "placeholder" and getattr(value(n), "requires_grad", 0)}
    for node in graph.nodes:
        if any(argument in values for argument in node.all_input_nodes):
            tensor = value(node)
            if not isinstance(tensor, Tensor) or tensor.is_floating_point():
                values.add(node)
    return values
