"""Find the parameters that the ranks of a tensor-parallel group divide, and the reasons against others.

Linears that read the same value are divided by columns (rows of the weight). The linears that read their
results, directly or through other operations, are divided by rows. In between, each rank computes its own
columns or heads. Only the results of the last linears are summed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from te_transform.graph import edit, ops
from te_transform.graph.nodes import is_parameter, path_of, reached, shape_of, writes
from te_transform.parallel.collectives import Redistribution, Shards
from te_transform.parallel.sharding import Refusal, step
from te_transform.plan.options import skipped_by

_STACKED = "a grouped product reads a stack of weights, but only linears can be divided"
_SAME_COLUMNS = (ops.cast, torch.Tensor.contiguous, torch.transpose, torch.reshape)


@dataclass(frozen=True)
class Place:
    """A part of the model that is divided among the ranks, or the reasons why it is not.

    `what` is "attention", "mlp", "head", "embedding" or "experts". `indivisible` is True if a mesh of another
    size could divide it.
    """

    what: str
    path: str
    reasons: tuple[str, ...] = ()
    indivisible: bool = False


@dataclass
class ShardLayout:
    """The sharded parameters, and the report's lines.

    The parameters are placeholders of a graph, or their names in the model.
    """

    shards: dict[Any, Shards] = field(default_factory=dict)
    places: list[Place] = field(default_factory=list)


@dataclass
class _Region:
    """Linears divided by columns, the linears that read their results, and the nodes between them."""

    columns: dict[fx.Node, Shards]
    rows: dict[fx.Node, Shards] = field(default_factory=dict)
    between: dict[fx.Node, Shards] = field(default_factory=dict)

    @property
    def what(self) -> str:
        if any(node.target is ops.sdpa for node in self.between):
            return "attention"
        return "mlp" if self.rows else "head"


def lay_out(graph: fx.Graph, ranks: int, skip: tuple[str, ...] = ()) -> ShardLayout:
    """Find the parameters of a canonical graph that can be divided among this many ranks."""
    laying_out = _LayingOut(graph, ranks, skip)
    for node in graph.nodes:
        if node.target is ops.linear and laying_out.stored(node.args[1]) not in laying_out.layout.shards:
            laying_out.try_region(node)
    for node in graph.nodes:
        if node.target is F.embedding:
            laying_out.try_embedding(node)
    experts = dict.fromkeys(path_of(node) for node in graph.nodes if node.target is ops.grouped_mm)
    laying_out.layout.places += [Place("experts", path, (_STACKED,)) for path in experts]
    return laying_out.layout


class _LayingOut:
    def __init__(self, graph: fx.Graph, ranks: int, skip: tuple[str, ...]):
        self.graph, self.ranks, self.skip, self.layout = graph, ranks, skip, ShardLayout()
        self.tried: set[fx.Node] = set()  # linears of regions that were refused

    def stored(self, weight: fx.Node) -> fx.Node | None:
        """Return the parameter behind a linear's weight, or behind its transpose."""
        source = weight.args[0] if weight.target is torch.t else weight
        return source if is_parameter(source) else None

    def try_region(self, linear: fx.Node) -> None:
        """Divide the linear by its columns, with all linears that must be divided with it."""
        if linear in self.tried:
            return
        refused, seeds = None, {linear}
        # the pieces of one product for q, k and v, and the number of ranks that have the same keys
        attempts = [(1, 1), (3, 1), (2, 1)]
        if self._attention(linear) is not None:
            attempts += [(1, copies) for copies in range(2, self.ranks + 1) if self.ranks % copies == 0]
        for pieces, copies in attempts:
            try:
                region = self._closed({linear}, pieces, copies)
                self._accept(region)
                return
            except Refusal as refusal:
                refused = refused or refusal
                seeds |= set(refusal.whole)
        path, attention = edit.innermost(path_of(node) for node in seeds), self._attention(linear)
        if attention is None:
            self.tried |= seeds
            self.layout.places.append(Place("linear", path, (refused.reason,), refused.indivisible))
            return
        seeds = {node for argument in attention.args[:3] for node in self._makers(argument)} | seeds
        self.tried |= seeds | {node for node in _dependents(attention) if node.target is ops.linear}
        path = edit.innermost(path_of(node) for node in seeds)
        heads = "" if self._skipped(linear) else self._indivisible_heads(attention)
        self.layout.places.append(Place("attention", path, (heads or refused.reason,), bool(heads)))

    def _closed(self, seeds: set[fx.Node], pieces: int, copies: int) -> _Region:
        """Return the region of these linears and of other linears whose shards it needs."""
        while True:
            try:
                return self._region({node: self._parts(node, pieces, copies) for node in seeds})
            except Refusal as refusal:
                more = {node for value in refusal.whole for node in self._makers(value)} - seeds
                if not more:
                    refusal.whole = tuple(seeds)
                    raise
                seeds |= more

    def _region(self, columns: dict[fx.Node, Shards]) -> _Region:
        """Return the region that begins with these linears.

        Raises:
            Refusal: an operation between the linears cannot be computed on shards.
        """
        region = _Region(columns)
        for node in columns:
            self._check_own(node)
        for node in self.graph.nodes:
            if node in columns:
                region.between[node] = columns[node]
            elif any(argument in region.between for argument in node.all_input_nodes):
                self._take(node, region)
        self._check_ends(region)
        return region

    def _take(self, node: fx.Node, region: _Region) -> None:
        if node.op == "output":
            return
        if node.target is ops.linear and node.args[0] in region.between:
            self._check_own(node)
            if region.between[node.args[0]].dim != -1:
                raise Refusal("a linear does not read them as columns, but only columns can be divided")
            region.rows[node] = region.between[node.args[0]]
        elif writes(node):
            raise Refusal("the model writes in place to them, but their values must stay")
        else:
            how = step(node, region.between, self.ranks)
            shared = [arg for arg, (change, _) in how.moves.items() if change is Redistribution.SHARE]
            if needed := tuple(arg for arg in shared if any(self._makers(arg))):
                raise Refusal(
                    f"a {node.target.__name__} reads a whole value too, but needs shards", whole=needed
                )
            if how.shards is not None:
                region.between[node] = how.shards

    def _check_ends(self, region: _Region) -> None:
        for node, shards in region.columns.items():
            if region.rows and not shards.is_even(self.ranks):
                raise Refusal(
                    f"a linear makes {shards.size} columns, which {self.ranks} ranks do not divide",
                    indivisible=True,
                )
            if not region.rows:
                width = shape_of(node.args[0])[-1]
                if shards.size <= width:
                    raise Refusal(
                        f"{shards.size} columns leave the model, but a linear must read them, or they must "
                        f"be more than the {width} input columns"
                    )
                if shards.length(self.ranks - 1, self.ranks) == 0:
                    raise Refusal(
                        f"a linear makes {shards.size} columns, but {self.ranks} ranks need one each",
                        indivisible=True,
                    )

    def _check_own(self, linear: fx.Node) -> None:
        weight = self.stored(linear.args[1])
        if weight is None:
            raise Refusal("the weight of a linear is computed, but only parameters can be divided")
        if weight in self.layout.shards:
            raise Refusal("a linear is divided with others already")
        if (glob := self._skipped(linear)) is not None:
            raise Refusal(f"a linear is skipped by skip={glob!r}: leave it out of skip= to have it divided")

    def _skipped(self, linear: fx.Node) -> str | None:
        """Return the glob that skips the linear or a module that holds it."""
        return skipped_by(path_of(linear), self.skip)

    def _makers(self, value: fx.Node) -> Iterator[fx.Node]:
        """Return undivided linears whose results lead to `value` without another linear."""
        for node in reached([value], lambda node: () if node.target is ops.linear else node.all_input_nodes):
            if node.target is ops.linear and self.stored(node.args[1]) not in (None, *self.layout.shards):
                yield node

    def _attention(self, linear: fx.Node) -> fx.Node | None:
        """Return the attention that reads a linear's result without another linear in between."""
        return next((node for node in _dependents(linear) if node.target is ops.sdpa), None)

    def _indivisible_heads(self, attention: fx.Node) -> str:
        query, key = attention.args[:2]
        for node, kind in ((query, ""), (key, "key/value ")):
            heads = shape_of(node)[-3]
            if heads % self.ranks:
                many = f"{heads} {kind}head" + "s" * (heads != 1)
                said = f"attention has {many}, which {self.ranks} ranks do not divide"
                others = "nor do they divide the ranks", "and keys and values have no linears of their own"
                return f"{said}, {others[self.ranks % heads == 0]}" if kind else said
        return ""

    def _parts(self, linear: fx.Node, pieces: int, copies: int) -> Shards:
        """Return the parts of a linear's output: its column slices, or equal parts."""
        size = shape_of(linear)[-1]
        cuts = sorted({0, size, *self._cuts(linear)})
        if len(cuts) > 2:
            return Shards(-1, tuple(stop - start for start, stop in pairwise(cuts)))
        if size % pieces:
            raise Refusal(f"a linear makes {size} columns, but must make {pieces} equal parts")
        return Shards(-1, (size // pieces,) * pieces, copies if self._makes_keys(linear) else 1)

    def _makes_keys(self, linear: fx.Node) -> bool:
        """Return True if the linear makes keys or values of attention, and no queries."""
        attention = self._attention(linear)
        if attention is None:
            return False
        queries, keys, values = (set(self._makers(argument)) for argument in attention.args[:3])
        return linear in keys | values and linear not in queries

    def _cuts(self, node: fx.Node) -> Iterator[int]:
        for user in node.users:
            if user.target is ops.columns:
                yield from user.args[1:]
            elif user.target in _SAME_COLUMNS and shape_of(user)[-1] == shape_of(node)[-1]:
                yield from self._cuts(user)

    def _accept(self, region: _Region) -> None:
        for node, shards in region.columns.items():
            self._put(node.args[1], shards.on(-2))
            bias = node.args[2] if len(node.args) > 2 else None
            if is_parameter(bias):
                self.layout.shards[bias] = shards
        for node, shards in region.rows.items():
            self._put(node.args[1], shards)
        path = edit.innermost(path_of(node) for node in (*region.columns, *region.rows))
        self.layout.places.append(Place(region.what, path))

    def _put(self, weight: fx.Node, shards: Shards) -> None:
        """Shard the parameter behind a linear's weight [out, in], which may be the parameter's transpose."""
        if weight.target is torch.t:
            weight, shards = weight.args[0], shards.on(-3 - shards.dim)
        self.layout.shards[weight] = shards

    def try_embedding(self, node: fx.Node) -> None:
        """Divide an embedding table by its rows, if it is a long table that an input of the model indexes."""
        ids, table = node.args[:2]
        if not is_parameter(table) or not _is_input(ids):
            return
        rows, width = shape_of(table)
        if table not in self.layout.shards and rows <= width:
            return
        shards = self.layout.shards.get(table, Shards(-2, (rows,)))
        try:
            step(node, {table: shards}, self.ranks)
            if shards.length(self.ranks - 1, self.ranks) == 0:
                raise Refusal(f"there are {rows} rows, but {self.ranks} ranks need one each")
        except Refusal as refusal:
            self.layout.places.append(Place("embedding", path_of(node), (refusal.reason,)))
            return
        self.layout.shards[table] = shards
        self.layout.places.append(Place("embedding", path_of(node)))


def _dependents(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that depend on a value, up to the next linears."""
    return reached(node.users, lambda node: () if node.target is ops.linear else node.users)


def _is_input(ids: fx.Node) -> bool:
    while ids.op in ("call_function", "call_method") and len(ids.all_input_nodes) == 1:
        (ids,) = ids.all_input_nodes
    return ids.op == "placeholder" and not is_parameter(ids)
