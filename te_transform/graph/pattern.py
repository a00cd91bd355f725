"""Patterns over fx graphs: small expressions that resemble the code that they match.

    Linear(Norm(Var("x")))                  a linear of a norm of any value
    Call(torch.mul, Var("w"), Cast(...))    any operation by its target, arguments by position

`find` returns every match. For the report, it also collects misses: how much matched, and what did not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, combinations
from typing import Any

import torch
from torch import fx

from te_transform.graph import ops
from te_transform.graph.grouped import grouped
from te_transform.graph.marks import is_mark
from te_transform.graph.nodes import is_tensor_node


@dataclass(frozen=True)
class Match:
    """A match: the `bound` values by name (nodes, constants, tags) and the matched `nodes`, root first."""

    bound: dict[str, Any] = field(default_factory=dict)
    nodes: tuple[fx.Node, ...] = ()

    @property
    def root(self) -> fx.Node:
        return self.nodes[0]

    def bind(self, name: str, value: Any) -> Match | None:
        """Return the match with `name` bound to `value`, or None if `name` has a different value."""
        if name in self.bound:
            known = self.bound[name]
            return self if known is value or (type(known) is type(value) and known == value) else None
        return replace(self, bound={**self.bound, name: value})


@dataclass(frozen=True)
class Miss:
    """A failed match: the nodes that matched, root first, and the `value` instead of `wanted`."""

    nodes: tuple[fx.Node, ...]
    value: Any
    wanted: Pattern


Misses = list[Miss] | None  # None: misses are not collected


def note(misses: Misses, so_far: Match, value: Any, wanted: Pattern) -> None:
    """Append a miss to `misses`, unless `misses` is None."""
    if misses is not None:
        misses.append(Miss(so_far.nodes, value, wanted))


def _either(roots: Iterable[frozenset[Callable]]) -> frozenset[Callable]:
    roots = list(roots)
    return frozenset().union(*roots) if all(roots) else frozenset()


class Pattern:
    """A base class for patterns; `match` compares a node or constant and yields every alternative."""

    depth = 0  # calls on the longest path
    roots: frozenset[Callable] = frozenset()  # possible targets of a matching node; empty: any

    def match(self, value: Any, so_far: Match, misses: Misses) -> Iterator[Match]:
        raise NotImplementedError


@dataclass(frozen=True)
class Var(Pattern):
    """A pattern for any value for which `where` is True; equal names must match equal values."""

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
    """A pattern for a call of one of `targets` without keywords, whose leading arguments match `args`.

    The match binds `role`, the name that rules use, to the call. With `commute`, the first two arguments may
    come in either order.
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
        yield from _match_each(self.args, value.args, here, misses)
        if self.commute:
            swapped = (value.args[1], value.args[0], *value.args[2:])
            yield from _match_each(self.args, swapped, here, misses)


def _match_each(
    patterns: Sequence[Pattern], values: Sequence[Any], so_far: Match, misses: Misses
) -> list[Match]:
    """Return the matches of each pattern with the value at its position; further values may be any."""
    matches = [so_far]
    for pattern, value in zip(patterns, values, strict=False):
        matches = [after for before in matches for after in pattern.match(value, before, misses)]
    return matches


@dataclass(frozen=True)
class Is(Pattern):
    """A pattern for this constant; numbers compare by value, so 2 matches 2.0."""

    constant: Any

    def match(self, value: Any, so_far: Match, misses: Misses) -> Iterator[Match]:
        # a symbolic size is not a constant, and a comparison would add a guard
        if not isinstance(value, (fx.Node, torch.SymInt)) and value == self.constant:
            yield so_far
        else:
            note(misses, so_far, value, self)


_SEVEN_DIGITS = 1e-6


@dataclass(frozen=True)
class Near(Pattern):
    """A pattern for a number with rounding: sqrt(2 / pi) with 7 digits or with 16.

    With 5 or 6 digits, the match binds `few_digits` to True: in float32, the error shows.
    """

    constant: float
    tolerance: float = 1e-5

    def match(self, value: Any, so_far: Match, misses: Misses) -> Iterator[Match]:
        error = abs(value / self.constant - 1) if type(value) in (int, float) else math.inf
        if error <= self.tolerance:
            yield (
                so_far
                if error <= _SEVEN_DIGITS
                else replace(so_far, bound=so_far.bound | {"few_digits": True})
            )
        else:
            note(misses, so_far, value, self)


class AnyOrder(Pattern):
    """A pattern for nested calls of `target` over `operands`, in any order and grouping.

    Example: AnyOrder(torch.mul, a, b, c).
    """

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
        """One call for each split of the operands into two parts."""
        numbers = range(len(self.operands))
        parts = [set(c) for size in numbers[1:] for c in combinations(numbers, size)]
        return [Call(self.target, self._some(part), self._some({*numbers} - part)) for part in parts]

    def _some(self, numbers: set[int]) -> Pattern:
        chosen = [self.operands[i] for i in sorted(numbers)]
        return chosen[0] if len(chosen) == 1 else AnyOrder(self.target, *chosen)


class Each(Pattern):
    """A pattern for a list or tuple whose items match `items`, such as the argument of torch.cat."""

    def __init__(self, *items: Pattern):
        self.items, self.depth = items, max((item.depth for item in items), default=0)

    def match(self, value: Any, so_far: Match, misses: Misses) -> Iterator[Match]:
        if not isinstance(value, (list, tuple)) or len(value) != len(self.items):
            note(misses, so_far, value, self)
        else:
            yield from _match_each(self.items, value, so_far, misses)


class OneOf(Pattern):
    """A choice of patterns; a keyword binds its name to the tag: OneOf(act, kind=dict(gelu=A, silu=B))."""

    def __init__(self, *patterns: Pattern, **tagged: dict[str, Pattern]):
        (self.name, choices), *rest = tagged.items() if tagged else ((None, {}),)
        assert not rest, "expected one tag name in OneOf, got several"
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
    """A pattern for `inner`, also inside calls of `targets`: Maybe(torch.Tensor.to, x) skips casts."""

    def __init__(self, targets: Any, inner: Pattern):
        self.targets, self.inner = targets if isinstance(targets, tuple) else (targets,), inner
        self.depth, self.roots = inner.depth, _either((frozenset(self.targets), inner.roots))

    def match(self, value: Any, so_far: Match, misses: Misses) -> Iterator[Match]:
        yield from self.inner.match(value, so_far, misses)
        if isinstance(value, fx.Node) and value.op == "call_function" and value.target in self.targets:
            yield from self.match(value.args[0], replace(so_far, nodes=(*so_far.nodes, value)), misses)


@dataclass(frozen=True)
class Read(Pattern):
    """A pattern for values that a rule reads but does not replace, and that may have other readers.

    Values with in-place writes do not match.
    """

    inner: Pattern

    def match(self, value: Any, so_far: Match, misses: list[Miss]) -> Iterator[Match]:
        for match in self.inner.match(value, replace(so_far, nodes=()), misses):
            values = (bound for name, bound in match.bound.items() if name not in so_far.bound)
            read = (node for node in (*match.nodes, *values) if isinstance(node, fx.Node))
            if not any(node.meta.get("written") for node in read):
                yield replace(match, nodes=so_far.nodes)


@dataclass(frozen=True)
class Siblings:
    """A group of calls of `target` that read the same value in the same region: q, k and v, or gate and up.

    `find` groups the graph's nodes, since siblings are not a tree. The match binds `role` to the tuple of
    nodes, in graph order. `meet` splits a group: only calls with the same result of `meet` are siblings.
    """

    target: Callable
    role: str
    meet: Callable[[fx.Node], Any] = field(default=lambda node: None)


def within(pattern: Pattern | Siblings) -> list[Pattern | Siblings]:
    """Return the pattern and all its parts, each part once, even if alternatives share the part.

    The parts of third-party pattern classes are unknown.
    """
    patterns: dict[int, Pattern | Siblings] = {}
    waiting = [pattern]
    while waiting:
        part = waiting.pop()
        if id(part) in patterns:
            continue
        patterns[id(part)] = part
        choices = (choice for _, choice in getattr(part, "choices", ()))
        groups = (getattr(part, name, ()) for name in ("args", "operands", "items"))
        inner = chain(*groups, choices, (getattr(part, "inner", None),))
        waiting += reversed([part for part in inner if isinstance(part, Pattern)])
    return list(patterns.values())


def targets_of(pattern: Pattern | Siblings) -> tuple[Any, ...]:
    """Return the call targets of a pattern, or () if the pattern has none."""
    one = getattr(pattern, "target", None)
    return getattr(pattern, "targets", ()) if one is None else (one,)


def spelled_as(function: Callable) -> Callable | None:
    """Return the canonical op for a PyTorch function, or None if there is no such op."""
    name = getattr(function, "__name__", "")
    op = ops.sdpa if name == "scaled_dot_product_attention" else getattr(ops, name, None)
    return op if op is not function and getattr(op, "__module__", None) == ops.__name__ else None


X = Var("x", is_tensor_node)  # a tensor of the graph


def Linear(x: Any = None, role: str = "linear") -> Call:
    return Call(ops.linear, *_input(x), role=role)


def Norm(x: Any = None, role: str = "norm") -> Call:
    return Call(ops.NORMS, *_input(x), role=role)


def _input(x: Any) -> tuple:
    return () if x is None else (x,)


def find(pattern: Pattern | Siblings, graph: fx.Graph, misses: list[Miss] | None = None) -> Iterator[Match]:
    """Yield every match of `pattern`, in graph order.

    No match is partly inside of a marked layer, because a call may leave the layer out.
    The search is lazy and sees rewrites between matches. Misses that matched at their root go to `misses`.
    """
    marks = [node for node in graph.nodes if is_mark(node)]

    def part(node: fx.Node) -> int:
        return sum(mark < node for mark in marks)

    if isinstance(pattern, Siblings):
        yield from _find_siblings(pattern, graph, part)
        return
    for node in list(graph.nodes):
        if node._erased or (pattern.roots and node.target not in pattern.roots):
            continue
        stopped: Misses = None if misses is None else []
        matches = pattern.match(node, Match(), stopped)
        match = next((match for match in matches if len({*map(part, match.nodes)}) < 2), None)
        if match is not None:
            yield match
        elif stopped and any(miss.nodes for miss in stopped):
            misses.append(max(stopped, key=lambda miss: len(miss.nodes)))


def _find_siblings(pattern: Siblings, graph: fx.Graph, part: Callable[[fx.Node], int]) -> list[Match]:
    calls = graph.find_nodes(op="call_function", target=pattern.target)
    groups = grouped(((n.args[0], n.meta.get("region"), part(n), pattern.meet(n)), n) for n in calls)
    return [Match({pattern.role: tuple(nodes)}, tuple(nodes)) for nodes in groups.values() if len(nodes) > 1]
