"""A captured graph for one rank of a tensor-parallel group.

It reads shards of the parameters, and contains the collectives that this requires.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch.nn.functional as F
from torch import fx, nn

from te_transform.canonicalize import canonicalize
from te_transform.canonicalize.op import Forms
from te_transform.graph import edit, ops
from te_transform.graph.bound import module_of
from te_transform.graph.nodes import MADE_ANEW, is_random, shape_of, value
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
from te_transform.parallel.sharding import Refusal, ShardingStep
from te_transform.parallel.sharding_plan import ShardingPlan


@dataclass
class ShardedGraph:
    """A captured graph on shards.

    Args:
        module: the graph; its arguments are those of the captured one.
        moves: by the names of arguments, the op that brings a rank's share into the placement that the graph
            reads.
        common_random: True if the graph draws random numbers that must be the same on each rank.
    """

    module: fx.GraphModule
    moves: dict[str, Move] = field(default_factory=dict)
    common_random: bool = False


def on_shards(
    captured: fx.GraphModule,
    shards: Mapping[str, Shards],
    ranks: Ranks,
    sequence: bool,
    forms: Sequence[Forms],
) -> ShardedGraph:
    """Return the graph of one rank.

    Args:
        captured: the graph of whole values.
        shards: of the sharded placeholders, by name.
        ranks: the group, seen from this process.
        sequence: True to shard residual streams and norms by tokens too.
        forms: the canonical forms that the rules in use need besides the usual ones.

    Raises:
        Refusal: the graph writes in place to a sharded value, or reads pieces of one together.
    """
    module = module_of(captured, canonicalize(captured.graph, forms))
    return _Sharding(module, ShardingPlan(module.graph, shards, ranks, sequence)).rank_graph()


class _Sharding:
    """The edit of a graph by a ShardingPlan, node by node."""

    def __init__(self, module: fx.GraphModule, plan: ShardingPlan):
        self.module, self.graph, self.plan, self.ranks = module, module.graph, plan, plan.ranks
        self.origin: dict[fx.Node, fx.Node] = {}  # the original node of each replacement
        self.moved: dict[tuple, fx.Node] = {}  # the moves that were inserted already
        self.made_graph = ShardedGraph(self.module)
        for node in plan.shards:
            if node.op == "placeholder":
                self._note_shape(node)

    def rank_graph(self) -> ShardedGraph:
        """Edit the graph in order; every value is settled before its readers."""
        for node, how in self.plan.steps.items():
            if how is None:
                self._put_whole(node)
            else:
                self._put(node, how)
        self._move_parameters_outside()
        self.graph.lint()
        self.module.recompile()
        return self.made_graph

    def _note_shape(self, node: fx.Node) -> None:
        node.meta["example_value"] = edit.with_shape(value(node), self.plan.shape(node))

    def _put(self, node: fx.Node, how: ShardingStep) -> None:
        args = list(node.args)
        for place, new in how.args.items():
            args[place] = new
        if how.reads_shape:
            args[1] = self.plan.shape(node)
        moved = {argument: self._argument(node, argument, how) for argument in node.all_input_nodes}
        args = fx.map_arg(tuple(args), lambda argument: moved.get(argument, argument))
        self._call(node, args)
        if how.is_term:
            self._sum(node)
        elif how.shards is not None and draws(node):
            self._draw_apart(node)

    def _call(self, node: fx.Node, args: tuple) -> None:
        if node.target is F.embedding:
            op = ShardedEmbedding(self.ranks, self.plan.shards[node.args[1]], (*args, None)[2])
            edit.read_shards(node, args[:2], self._named("embedding", node, op))
        elif node.target is ops.cross_entropy:
            op = ShardedCrossEntropy(self.ranks, self.plan.shards[node.args[0]])
            edit.read_shards(node, args, self._named("cross_entropy", node, op))
        else:
            edit.read_shards(node, args)

    def _put_whole(self, node: fx.Node) -> None:
        """Insert a call on whole values."""
        for argument in node.all_input_nodes:
            if argument in self.plan.shards:
                edit.read_instead(node, argument, self._gathered(argument, node))
            elif node in self.plan.entered and argument in self.plan.trained:
                edit.read_instead(node, argument, self._move(argument, Redistribution.ENTER, node))
        if draws(node):
            self.made_graph.common_random = True

    def _argument(self, node: fx.Node, argument: fx.Node, how: ShardingStep) -> fx.Node:
        """Return the node that replaces an argument."""
        is_sharded = argument in self.plan.shards
        if (move := how.moves.get(self.origin.get(argument, argument))) is not None:
            change, shards = move
            if change is Redistribution.LEAD and is_sharded:
                argument = self._gathered(argument, node)
            return self._move(argument, change, node, shards)
        enters = how.shards is not None and not is_sharded and argument in self.plan.trained
        if enters and argument not in self.plan.entered:
            return self._move(argument, Redistribution.ENTER, node)
        return argument

    def _gathered(self, argument: fx.Node, at: fx.Node) -> fx.Node:
        return self._move(argument, Redistribution.GATHER, at, self.plan.shards[argument])

    def _move(
        self, source: fx.Node, change: Redistribution, at: fx.Node, shards: Shards | None = None
    ) -> fx.Node:
        """Insert a move of `source` to another placement before `at`, or return an equal earlier one."""
        gathers = change in (Redistribution.GATHER, Redistribution.GATHER_ENTER)
        key = source, change, shards
        if key not in self.moved:
            if isinstance(value(source), (tuple, list)):
                raise Refusal("pieces of what is sharded are read together")
            node = edit.insert_call(self.graph, at, self._name(change, shards), (source,), like=source)
            self.plan.shapes[node] = self.plan.shapes[source]
            if not gathers and shards is not None:
                self.plan.shards[node] = (
                    replace(shards, copies=1) if change is Redistribution.PICK else shards
                )
            self._note_shape(node)
            self.moved[key] = node
        return self.moved[key]

    def _sum(self, node: fx.Node) -> None:
        """Sum the ranks' terms into a whole value, or into a value sharded by tokens."""
        shards = self.plan.shards.pop(node, None)
        change = Redistribution.SUM if shards is None else Redistribution.SUM_SHARE
        total = self._stand_in(node, self._name(change, shards))
        if shards is not None:
            self.plan.shards[total] = shards
        self._note_shape(total)

    def _stand_in(self, node: fx.Node, name: str) -> fx.Node:
        """Insert a call on a node's result, and redirect the node's readers to the call."""
        call = edit.insert_call(self.graph, node.next, name, (node,), like=node)
        edit.replace_uses(node, call)
        self.origin[call], self.plan.shapes[call] = node, self.plan.shapes[node]
        if node in self.plan.trained:
            self.plan.trained.add(call)
        return call

    def _draw_apart(self, node: fx.Node) -> None:
        """Draw different random numbers on each rank for its shards."""
        own, first = OwnRandom(self.ranks), node.args[0]
        begin = edit.insert_call(self.graph, node, self._named("own_random", node, own), (first,), like=first)
        edit.read_instead(node, first, begin)
        end = self._stand_in(node, self._named("common_random", node, CommonRandom(own)))
        self.plan.shards[end] = self.plan.shards[node]

    def _name(self, change: Redistribution, shards: Shards | None) -> str:
        """Return the name of a move. Equal moves share a name, so equal layers are equal graphs."""
        at = "" if shards is None else "_".join(map(str, ("", -shards.dim, *shards.parts)))
        at += "" if shards is None or shards.copies == 1 else f"_for_{shards.copies}"
        name = f"ranks_{change.name.lower()}{at}"
        if not hasattr(self.module, name):
            self.module.add_submodule(name, Move(change, self.ranks, shards))
        return name

    def _named(self, what: str, node: fx.Node, op: nn.Module) -> str:
        name = f"{what}_{node.name}"
        self.module.add_submodule(name, op)
        return name

    def _move_parameters_outside(self) -> None:
        """Move the parameters before the graph runs, if all of their readers need the same placement.

        The graph then reads parameters, whose readers can be fused.
        """
        for node in self.graph.find_nodes(op="placeholder"):
            parameter = value(node)
            if not isinstance(parameter, nn.Parameter):
                continue
            shape = self.plan.shape(node)
            user = next(iter(node.users), None)
            if len(node.users) == 1 and user.op == "call_module":
                op = self.module.get_submodule(user.target)
                if isinstance(op, Move):
                    self.made_graph.moves[node.name] = op
                    shape = shape_of(user)
                    edit.bypass(user, node)
            node.meta["example_value"] = edit.with_shape(parameter, shape)  # parameters are contiguous
            node.meta[MADE_ANEW] = self._is_made_anew(node)

    def _is_made_anew(self, parameter: fx.Node) -> bool:
        """Return True if a parameter's argument is computed in each call."""
        shards, move = self.plan.shards.get(parameter), self.made_graph.moves.get(parameter.name)
        is_part = shards is None or shards.is_plain
        return not is_part or (move is not None and move.change is not Redistribution.ENTER)


def draws(node: fx.Node) -> bool:
    """Return True if a canonical node draws random numbers."""
    if node.target is ops.dropout:
        return node.args[1] != 0 and node.args[2] is not False
    if node.target is ops.sdpa:
        return node.args[4] != 0
    return is_random(node)
