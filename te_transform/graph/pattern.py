"""Patterns over fx graphs: small expressions that look like the code they find.

    Linear(Norm(Var("x")))                  a linear that reads a norm that reads anything
    Call(torch.mul, Var("w"), Cast(...))    any operation by its target, arguments by position

`find` returns every match and, for the report, how far each miss got and what stopped it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, combinations
from typing import Any

import torch
from torch import fx

from te_transform.graph import ops


@dataclass(frozen=True)
class Match:
    """What a pattern found: `bound` values by name (nodes, constants, tags) and the `nodes` it covers, root
    first."""

    bound: dict[str, Any] = field(default_factory=dict)
    nodes: tuple[fx.Node, ...] = ()

    @property
    def root(self) -> fx.Node:
        return self.nodes[0]

    def bind(self, name: str, value: Any) -> Match | None:
        """The match with `name` bound too, or None where it is bound to something else already."""
        if name in self.bound:
            known = self.bound[name]
            return self if known is value or (type(known) is type(value) and known == value) else None
        return replace(self, bound={**self.bound, name: value})


@dataclass(frozen=True)
class Miss:
    """A match that did not come to be: the nodes that fitted, root first, and what stood where `wanted` was
    needed."""

    nodes: tuple[fx.Node, ...]
    found: Any
    wanted: Pattern


Misses = list[Miss] | None  # None: nobody asks why


def note(misses: Misses, so_far: Match, found: Any, wanted: Pattern) -> None:
    """Append a miss to `misses`, if somebody asks why."""
    if misses is not None:
        misses.append(Miss(so_far.nodes, found, wanted))


def _either(roots: Iterable[frozenset[Callable]]) -> frozenset[Callable]:
    roots = list(roots)
    return frozenset().union(*roots) if all(roots) else frozenset()


class Pattern:
    """Anything that can be asked to `match` a node or constant; alternatives are yielded one by one."""

    depth = 0  # calls on the longest way down
    roots: frozenset[Callable] = frozenset()  # a node that matches has one of these targets; empty: any

    def match(self, value: Any, so_far: Match, misses: Misses) -> Iterator[Match]:
        raise NotImplementedError


@dataclass(frozen=True)
class Var(Pattern):
    """Any value for which `where` holds; the same name twice means the same value twice."""

    name: str
    where: Callable[[Any], bool] = lambda value: True

    def __repr__(self) -> str:
        return f"one value for the {self.name}"

    def match(self, value: Any, so_far: Match, misses: Misses) -> Iterator[Match]:
        bound = so_far.bind(self.name, value) if self.where(value) else None
        if bound is not None:
            yield bound
        else:
            note(misses, so_far, value, self)


class Call(Pattern):
    """A call of one of `targets`, with no keywords, whose leading arguments match `args`; `role` is its name
    in rules.

    With `commute` the first two arguments may come in either order.
    """

    def __init__(self, targets: Any, *args: Any, role: str | None = None, commute: bool = False):
        self.targets = targets if isinstance(targets, tuple) else (targets,)
        self.args = tuple(a if isinstance(a, Pattern) else Is(a) for a in args)
        self.role, self.commute, self.roots = role, commute, frozenset(self.targets)
        self.depth = 1 + max((a.depth for a in self.args), default=0)

    def __repr__(self) -> str:
        return " or ".join(t.__name__ for t in self.targets)

    def match(self, value: Any, so_far: Match, misses: Misses) -> Iterator[Match]:
        called = isinstance(value, fx.Node) and value.op == "call_function" and value.target in self.targets
        if not called or value.kwargs:
            note(misses, so_far, value, self)
            return
        here = replace(so_far, nodes=(*so_far.nodes, value))
        here = here.bind(self.role, value) if self.role else here
        if here is None or len(value.args) < len(self.args):
            return
        yield from self._match_args(value.args, here, misses)
        if self.commute:
            yield from self._match_args((value.args[1], value.args[0], *value.args[2:]), here, misses)

    def _match_args(self, values: tuple, so_far: Match, misses: Misses) -> Iterator[Match]:
        partial = [so_far]
        for pattern, value in zip(self.args, values, strict=False):
            partial = [after for before in partial for after in pattern.match(value, before, misses)]
        yield from partial


@dataclass(frozen=True)
class Is(Pattern):
    """Exactly this constant (numbers compare by value, so 2 fits 2.0)."""

    constant: Any

    def match(self, value: Any, so_far: Match, misses: Misses) -> Iterator[Match]:
        # a symbolic size is no constant, and to compare it would put a guard on it
        if not isinstance(value, (fx.Node, torch.SymInt)) and value == self.constant:
            yield so_far
        else:
            note(misses, so_far, value, self)


@dataclass(frozen=True)
class Near(Pattern):
    """A number that was rounded when it was written down: sqrt(2 / pi) in seven digits or in sixteen."""

    constant: float
    tolerance: float = 1e-5

    def match(self, value: Any, so_far: Match, misses: Misses) -> Iterator[Match]:
        if type(value) in (int, float) and abs(value - self.constant) <= self.tolerance * abs(self.constant):
            yield so_far
        else:
            note(misses, so_far, value, self)


class AnyOrder(Pattern):
    """`operands` combined by nested calls of `target`, in any order and grouping: AnyOrder(torch.mul, a, b,
    c)."""

    def __init__(self, target: Callable, *operands: Pattern):
        self.target, self.operands, self.roots = target, operands, frozenset((target,))
        self.depth = len(operands) - 1 + max(operand.depth for operand in operands)

    def __repr__(self) -> str:
        return self.target.__name__

    def match(self, value: Any, so_far: Match, misses: Misses) -> Iterator[Match]:
        for call in self._calls:
            yield from call.match(value, so_far, misses)

    @cached_property
    def _calls(self) -> list[Call]:
        """One call for each way to part the operands in two."""
        numbers = range(len(self.operands))
        parts = [set(c) for size in numbers[1:] for c in combinations(numbers, size)]
        return [Call(self.target, self._some(part), self._some({*numbers} - part)) for part in parts]

    def _some(self, numbers: set[int]) -> Pattern:
        chosen = [self.operands[i] for i in sorted(numbers)]
        return chosen[0] if len(chosen) == 1 else AnyOrder(self.target, *chosen)


class Each(Pattern):
    """A list or tuple whose items match `items`, one by one: the argument of torch.cat."""

    def __init__(self, *items: Pattern):
        self.items, self.depth = items, max((item.depth for item in items), default=0)

    def match(self, value: Any, so_far: Match, misses: Misses) -> Iterator[Match]:
        if not isinstance(value, (list, tuple)) or len(value) != len(self.items):
            note(misses, so_far, value, self)
            return
        partial = [so_far]
        for pattern, item in zip(self.items, value, strict=True):
            partial = [after for before in partial for after in pattern.match(item, before, misses)]
        yield from partial


class OneOf(Pattern):
    """Any of several patterns; a keyword binds its name to the tag: OneOf(act, kind=dict(gelu=A, silu=B))."""

    def __init__(self, *patterns: Pattern, **tagged: dict[str, Pattern]):
        (self.name, choices), *rest = tagged.items() if tagged else ((None, {}),)
        assert not rest, "OneOf takes one tag name"
        self.choices = [(None, p) for p in patterns] + list(choices.items())
        self.depth = max(p.depth for _, p in self.choices)
        self.roots = _either(p.roots for _, p in self.choices)

    def match(self, value: Any, so_far: Match, misses: Misses) -> Iterator[Match]:
        for tag, pattern in self.choices:
            for match in pattern.match(value, so_far, misses):
                tagged = match.bind(self.name, tag) if tag else match
                if tagged is not None:
                    yield tagged


class Maybe(Pattern):
    """`inner`, or one call (or more) of `targets` around it: Maybe(torch.Tensor.to, x) sees through casts."""

    def __init__(self, targets: Any, inner: Pattern):
        self.targets, self.inner = targets if isinstance(targets, tuple) else (targets,), inner
        self.depth, self.roots = inner.depth, _either((frozenset(self.targets), inner.roots))

    def match(self, value: Any, so_far: Match, misses: Misses) -> Iterator[Match]:
        yield from self.inner.match(value, so_far, misses)
        if isinstance(value, fx.Node) and value.op == "call_function" and value.target in self.targets:
            yield from self.match(value.args[0], replace(so_far, nodes=(*so_far.nodes, value)), misses)


@dataclass(frozen=True)
class Read(Pattern):
    """What `inner` finds is only read: it stays where it is, and others may read it too.

    Values that are written to in between are not looked through.
    """

    inner: Pattern

    def match(self, value: Any, so_far: Match, misses: list[Miss]) -> Iterator[Match]:
        for match in self.inner.match(value, replace(so_far, nodes=()), misses):
            found = (held for name, held in match.bound.items() if name not in so_far.bound)
            read = (node for node in (*match.nodes, *found) if isinstance(node, fx.Node))
            if not any(node.meta.get("written") for node in read):
                yield replace(match, nodes=so_far.nodes)


@dataclass(frozen=True)
class Siblings:
    """All calls of `target` that read one value in one region: q, k and v, or gate and up.

    Not a tree, so `find` groups the graph's nodes; the match binds `role` to the tuple of nodes, in the order
    of the graph. Calls that `meet` gives the same answer for are siblings by themselves.
    """

    target: Callable
    role: str
    meet: Callable[[fx.Node], Any] = field(default=lambda node: None)


def within(pattern: Pattern | Siblings) -> list[Pattern | Siblings]:
    """The pattern, and all that it is made of, each part once, although alternatives share theirs; what a
    class of somebody else's holds is not known."""
    found: dict[int, Pattern | Siblings] = {}
    waiting = [pattern]
    while waiting:
        part = waiting.pop()
        if id(part) in found:
            continue
        found[id(part)] = part
        choices = (choice for _, choice in getattr(part, "choices", ()))
        held = (getattr(part, name, ()) for name in ("args", "operands", "items"))
        inner = chain(*held, choices, (getattr(part, "inner", None),))
        waiting += reversed([part for part in inner if isinstance(part, Pattern)])
    return list(found.values())


def targets_of(pattern: Pattern | Siblings) -> tuple[Any, ...]:
    """What it matches calls of, if it is one of those that do."""
    one = getattr(pattern, "target", None)
    return getattr(pattern, "targets", ()) if one is None else (one,)


def spelled_as(function: Callable) -> Callable | None:
    """The op that stands for a function of PyTorch in the canonical form; None where that has no other."""
    name = getattr(function, "__name__", "")
    op = ops.sdpa if name == "scaled_dot_product_attention" else getattr(ops, name, None)
    return op if op is not function and getattr(op, "__module__", None) == ops.__name__ else None


def Linear(x: Any = None, role: str = "linear") -> Call:
    return Call(ops.linear, *_input(x), role=role)


def Norm(x: Any = None, role: str = "norm") -> Call:
    return Call(ops.NORMS, *_input(x), role=role)


def _input(x: Any) -> tuple:
    return () if x is None else (x,)


def find(pattern: Pattern | Siblings, graph: fx.Graph, misses: list[Miss] | None = None) -> Iterator[Match]:
    """Every match of `pattern`, in the graph's order, each looked for when it is asked for.

    So what was rewritten meanwhile is seen as it is now. Misses that fitted at their root go to `misses`.
    """
    if isinstance(pattern, Siblings):
        yield from _find_siblings(pattern, graph)
        return
    for node in list(graph.nodes):
        if node._erased or (pattern.roots and node.target not in pattern.roots):
            continue
        stopped: Misses = None if misses is None else []
        match = next(pattern.match(node, Match(), stopped), None)
        if match is not None:
            yield match
        elif stopped and any(miss.nodes for miss in stopped):
            misses.append(max(stopped, key=lambda miss: len(miss.nodes)))


def _find_siblings(pattern: Siblings, graph: fx.Graph) -> list[Match]:
    groups: dict[tuple, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is pattern.target:
            groups.setdefault((node.args[0], node.meta.get("region"), pattern.meet(node)), []).append(node)
    return [Match({pattern.role: tuple(nodes)}, tuple(nodes)) for nodes in groups.values() if len(nodes) > 1]
