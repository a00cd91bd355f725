"""A captured graph for one rank of a tensor-parallel group: with the shards of the parameters in the place of
the whole ones, and with the exchanges between ranks that this takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn

from te_transform.canonicalize import canonicalize
from te_transform.graph import edit, ops
from te_transform.graph.bound import module_of
from te_transform.graph.nodes import MADE_ANEW, is_random, is_tensor_node, shape_of, value, writes
from te_transform.parallel.collectives import (
    CommonRandom,
    Move,
    OwnRandom,
    Ranks,
    Redistribution,
    ShardedCrossEntropy,
    ShardedEmbedding,
    Shards,
)
from te_transform.parallel.sharding import Local, Refusal, Step, step


class Unshardable(Exception):
    """A graph that cannot be computed on shards, not even with values that are gathered for it."""


@dataclass
class ShardedGraph:
    """A captured graph on shards.

    Args:
        module: the graph; its arguments are those of the captured one.
        moves: for some of the arguments, by their names, how a rank's share of a parameter is brought into
            the placement that the graph reads it in.
        common_random: whether it draws random numbers that have to be the same on each rank.
    """

    module: fx.GraphModule
    moves: dict[str, Move] = field(default_factory=dict)
    common_random: bool = False


def on_shards(
    captured: fx.GraphModule, shards: Mapping[str, Shards], ranks: Ranks, sequence: bool
) -> ShardedGraph:
    """The graph on one of the ranks.

    Args:
        captured: the graph, of whole values.
        shards: of those placeholders, by their names, that are sharded.
        ranks: the group, seen from this process.
        sequence: whether what residuals are added to, and norms read, is sharded as well, by tokens.

    Raises:
        Unshardable: it writes in place to what would be sharded.
    """
    return _Sharding(captured, shards, ranks, sequence).made()


class _Sharding:
    """First what is sharded is decided, on whole values; then the graph is edited, node by node."""

    def __init__(self, captured: fx.GraphModule, shards: Mapping[str, Shards], ranks: Ranks, sequence: bool):
        self.graph = canonicalize(captured.graph)
        self.module = module_of(captured, self.graph)
        self.ranks, self.sequence = ranks, sequence
        self.nodes = [node for node in self.graph.nodes if node.op not in ("placeholder", "get_attr")]
        parameters = [node for node in self.graph.nodes if node.op == "placeholder" and node.name in shards]
        self.held = {node: shards[node.name] for node in parameters}
        self.shapes = {n: tuple(shape_of(n)) for n in self.graph.nodes if is_tensor_node(n)}  # whole ones
        self.trained = self._trained()
        self.entered: set[fx.Node] = set()  # whole values of whose gradient each rank has a term
        self.steps = {node: self._step(node) for node in self.nodes}
        self.origin: dict[fx.Node, fx.Node] = {}  # of what stands for a node now
        self.moved: dict[tuple, fx.Node] = {}  # what was brought into another placement already
        self.made_graph = ShardedGraph(self.module)
        for node in parameters:
            self._note_shape(node)

    def made(self) -> ShardedGraph:
        """Edit the graph in order; every value is settled before its readers."""
        for node in self.nodes:
            found = self.steps[node]
            if found is None:
                self._put_whole(node)
            else:
                self._put(node, found)
        self._move_parameters_outside()
        self.graph.lint()
        self.module.recompile()
        return self.made_graph

    def _note_shape(self, node: fx.Node) -> None:
        shape = self.ranks.shape(self.shapes[node], self.held.get(node))
        node.meta["example_value"] = edit.with_shape(value(node), shape)

    def _trained(self) -> set[fx.Node]:
        """The values that may have a gradient."""
        found = {
            n for n in self.graph.nodes if n.op == "placeholder" and getattr(value(n), "requires_grad", 0)
        }
        for node in self.graph.nodes:
            if any(argument in found for argument in node.all_input_nodes):
                held = value(node)
                if not isinstance(held, Tensor) or held.is_floating_point():
                    found.add(node)
        return found

    def _step(self, node: fx.Node) -> Step | None:
        """How a node is computed on shards, None: on whole values. Its result is noted in `held`."""
        try:
            found = None if node.op == "output" else step(node, self.held, self.ranks.count)
        except Refusal:
            found = None
        if writes(node) and any(argument in self.held for argument in node.all_input_nodes):
            raise Unshardable("the model writes in place to what would be sharded")
        if found is None:
            whole = not any(argument in self.held for argument in node.all_input_nodes)
            if node.target in ops.NORMS and whole and self._is_entered(node):
                self.entered.add(node)
            return None
        shards = self._tokens(self.shapes[node]) if found.is_term and self.sequence else found.shards
        if shards is not None:
            self.held[node] = shards
        return found

    def _put(self, node: fx.Node, found: Step) -> None:
        args = list(node.args)
        for place, new in found.args.items():
            args[place] = self._local(node, new)
        moved = {argument: self._argument(node, argument, found) for argument in node.all_input_nodes}
        args = fx.node.map_aggregate(tuple(args), lambda a: moved.get(a, a) if isinstance(a, fx.Node) else a)
        self._call(node, args)
        if found.is_term:
            self._sum(node)
        elif found.shards is not None and draws(node):
            self._draw_apart(node)

    def _local(self, node: fx.Node, new: Any) -> Any:
        return self.ranks.shape(self.shapes[node], new.shards) if isinstance(new, Local) else new

    def _call(self, node: fx.Node, args: tuple) -> None:
        if node.target is F.embedding:
            op = ShardedEmbedding(self.ranks, self.held[node.args[1]], (*args, None)[2])
            edit.read_shards(node, args[:2], self._named("embedding", node, op))
        elif node.target is ops.cross_entropy:
            op = ShardedCrossEntropy(self.ranks, self.held[node.args[0]])
            edit.read_shards(node, args, self._named("cross_entropy", node, op))
        else:
            edit.read_shards(node, args)

    def _put_whole(self, node: fx.Node) -> None:
        """A call on whole values."""
        for argument in node.all_input_nodes:
            if argument in self.held:
                edit.read_instead(node, argument, self._move(argument, Redistribution.GATHER, node))
            elif node in self.entered and argument in self.trained:
                edit.read_instead(node, argument, self._move(argument, Redistribution.ENTER, node))
        if draws(node):
            self.made_graph.common_random = True

    def _is_entered(self, norm: fx.Node) -> bool:
        """Whether only linears that are divided by columns read a norm: then the ranks' terms of its gradient
        may as well be summed up in front of it, and the norm be fused with the linears."""
        return bool(norm.users) and all(
            user.target is ops.linear and user.args[0] is norm and self._is_divided_by_columns(user)
            for user in norm.users
        )

    def _is_divided_by_columns(self, linear: fx.Node) -> bool:
        weight = linear.args[1]
        source = weight.args[0] if weight not in self.held and weight.all_input_nodes else weight
        shards = self.held.get(source)
        return shards is not None and (shards.dim == -2) == (source is weight)

    def _argument(self, node: fx.Node, argument: fx.Node, found: Step) -> fx.Node:
        """What the node reads in the place of an argument."""
        named = self.origin.get(argument, argument)
        if named in found.lead:
            whole = self._move(argument, Redistribution.GATHER, node) if argument in self.held else argument
            return self._move(whole, Redistribution.LEAD, node)
        if named in found.share:
            return self._move(argument, Redistribution.SHARE, node, found.share[named])
        if named in found.pick:
            return self._move(argument, Redistribution.PICK, node)
        if named in found.gather:
            return self._move(argument, Redistribution.GATHER_ENTER, node)
        enters = found.shards is not None and argument not in self.held and argument in self.trained
        if enters and argument not in self.entered:
            return self._move(argument, Redistribution.ENTER, node)
        return argument

    def _move(
        self, source: fx.Node, way: Redistribution, at: fx.Node, shards: Shards | None = None
    ) -> fx.Node:
        """`source` in another placement, in front of `at`."""
        gathers = way in (Redistribution.GATHER, Redistribution.GATHER_ENTER)
        shards = self.held[source] if gathers or way is Redistribution.PICK else shards
        key = source, way, shards
        if key not in self.moved:
            op = Move(way, self.ranks, shards)
            if isinstance(value(source), (tuple, list)):
                raise Unshardable("pieces of what is sharded are read together")
            node = edit.insert_call(self.graph, at, self._name(way, shards, op), (source,), like=source)
            self.shapes[node] = self.shapes[source]
            if not gathers and shards is not None:
                self.held[node] = replace(shards, copies=1) if way is Redistribution.PICK else shards
            self._note_shape(node)
            self.moved[key] = node
        return self.moved[key]

    def _sum(self, node: fx.Node) -> None:
        """The sum of the ranks' terms, in the place of what each of them computes: whole, or sharded by
        tokens."""
        shards = self.held.pop(node, None)
        way = Redistribution.SUM if shards is None else Redistribution.SUM_SHARE
        name = self._name(way, shards, Move(way, self.ranks, shards))
        total = self._stand_in(node, name)
        if shards is not None:
            self.held[total] = shards
        self._note_shape(total)

    def _stand_in(self, node: fx.Node, name: str) -> fx.Node:
        """A call on what a node computes, whose result all that read the node read instead."""
        made = edit.insert_call(self.graph, node.next, name, (node,), like=node)
        edit.replace_uses(node, made)
        self.origin[made], self.shapes[made] = node, self.shapes[node]
        if node in self.trained:
            self.trained.add(made)
        return made

    def _tokens(self, shape: tuple[int, ...]) -> Shards | None:
        """The longest of the dimensions in front of the last that the ranks divide: the sequence, where that
        is longer than the batch."""
        sizes = {size: i for i, size in reversed([*enumerate(shape[:-1])]) if size % self.ranks.count == 0}
        longest = max(sizes, default=0)
        return Shards(sizes[longest] - len(shape), (longest,)) if longest else None

    def _draw_apart(self, node: fx.Node) -> None:
        """Let the ranks draw random numbers of their own for their shards."""
        own, first = OwnRandom(self.ranks), node.args[0]
        begin = edit.insert_call(self.graph, node, self._named("own_random", node, own), (first,), like=first)
        edit.read_instead(node, first, begin)
        end = self._stand_in(node, self._named("common_random", node, CommonRandom(own)))
        self.held[end] = self.held[node]

    def _name(self, way: Redistribution, shards: Shards | None, op: nn.Module) -> str:
        """The name of a move, the same for equal ones: equal layers are then equal graphs."""
        at = "" if shards is None else "_".join(map(str, ("", -shards.dim, *shards.parts)))
        at += "" if shards is None or shards.copies == 1 else f"_for_{shards.copies}"
        name = f"ranks_{way.name.lower()}{at}"
        if not hasattr(self.module, name):
            self.module.add_submodule(name, op)
        return name

    def _named(self, what: str, node: fx.Node, op: nn.Module) -> str:
        name = f"{what}_{node.name}"
        self.module.add_submodule(name, op)
        return name

    def _move_parameters_outside(self) -> None:
        """Bring parameters into the placement that they are read in before the graph runs, where all of their
        readers want the same: they are parameters in the graph then, which can be fused."""
        for node in [node for node in self.graph.nodes if node.op == "placeholder"]:
            held = value(node)
            if not isinstance(held, nn.Parameter):
                continue
            shape = self.ranks.shape(self.shapes[node], self.held.get(node))
            user = next(iter(node.users), None)
            if len(node.users) == 1 and user.op == "call_module":
                op = self.module.get_submodule(user.target)
                if isinstance(op, Move):
                    self.made_graph.moves[node.name] = op
                    shape = shape_of(user)
                    edit.bypass(self.graph, user, node)
            node.meta["example_value"] = edit.with_shape(held, shape)  # parameters lie without gaps
            node.meta[MADE_ANEW] = self._is_made_anew(node)

    def _is_made_anew(self, parameter: fx.Node) -> bool:
        """Whether what the graph is given of a parameter is computed in each call."""
        shards, move = self.held.get(parameter), self.made_graph.moves.get(parameter.name)
        is_part = shards is None or shards.is_plain
        return not is_part or (move is not None and move.way is not Redistribution.ENTER)


def draws(node: fx.Node) -> bool:
    """Whether the node of a canonical graph draws random numbers."""
    if node.target is ops.dropout:
        return node.args[1] != 0 and node.args[2] is not False
    if node.target is ops.sdpa:
        return node.args[4] != 0
    return is_random(node)
