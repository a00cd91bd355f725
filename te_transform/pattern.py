"""Patterns over fx graphs: small expressions that look like the code they find.

    Linear(Norm(Var("x")))                  a linear that reads a norm that reads anything
    Call(torch.mul, Var("w"), Cast(...))    any operation by its target, arguments by position

`find` returns every match and, for the report, how far each miss got and what stopped it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_transform import vocabulary


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


class Pattern:
    """Anything that can be asked to `match` a node or constant; alternatives are yielded one by one."""

    depth = 0  # calls on the longest way down

    def match(self, value: Any, so_far: Match, misses: list[Miss]) -> Iterator[Match]:
        raise NotImplementedError


@dataclass(frozen=True)
class Var(Pattern):
    """Any value for which `where` holds; the same name twice means the same value twice."""

    name: str
    where: Callable[[Any], bool] = lambda value: True

    def match(self, value: Any, so_far: Match, misses: list[Miss]) -> Iterator[Match]:
        bound = so_far.bind(self.name, value) if self.where(value) else None
        if bound is not None:
            yield bound
        else:
            misses.append(Miss(so_far.nodes, value, self))


class Call(Pattern):
    """A call of one of `targets`, with no keywords, whose leading arguments match `args`; `role` is its name
    in rules.

    With `commute` the first two arguments may come in either order.
    """

    def __init__(self, targets: Any, *args: Any, role: str | None = None, commute: bool = False):
        self.targets = targets if isinstance(targets, tuple) else (targets,)
        self.args = tuple(a if isinstance(a, Pattern) else Is(a) for a in args)
        self.role, self.commute = role, commute
        self.depth = 1 + max((a.depth for a in self.args), default=0)

    def __repr__(self) -> str:
        return " or ".join(t.__name__ for t in self.targets)

    def match(self, value: Any, so_far: Match, misses: list[Miss]) -> Iterator[Match]:
        called = isinstance(value, fx.Node) and value.op == "call_function" and value.target in self.targets
        if not called or value.kwargs:
            misses.append(Miss(so_far.nodes, value, self))
            return
        here = replace(so_far, nodes=(*so_far.nodes, value))
        here = here.bind(self.role, value) if self.role else here
        if here is None or len(value.args) < len(self.args):
            return
        yield from self._match_args(value.args, here, misses)
        if self.commute:
            yield from self._match_args((value.args[1], value.args[0], *value.args[2:]), here, misses)

    def _match_args(self, values: tuple, so_far: Match, misses: list[Miss]) -> Iterator[Match]:
        partial = [so_far]
        for pattern, value in zip(self.args, values, strict=False):
            partial = [after for before in partial for after in pattern.match(value, before, misses)]
        yield from partial


@dataclass(frozen=True)
class Is(Pattern):
    """Exactly this constant (numbers compare by value, so 2 fits 2.0)."""

    constant: Any

    def match(self, value: Any, so_far: Match, misses: list[Miss]) -> Iterator[Match]:
        # a symbolic size is no constant, and to compare it would put a guard on it
        if not isinstance(value, (fx.Node, torch.SymInt)) and value == self.constant:
            yield so_far
        else:
            misses.append(Miss(so_far.nodes, value, self))


@dataclass(frozen=True)
class Near(Pattern):
    """A number that was rounded when it was written down: sqrt(2 / pi) in seven digits or in sixteen."""

    constant: float
    tolerance: float = 1e-5

    def match(self, value: Any, so_far: Match, misses: list[Miss]) -> Iterator[Match]:
        if type(value) in (int, float) and abs(value - self.constant) <= self.tolerance * abs(self.constant):
            yield so_far
        else:
            misses.append(Miss(so_far.nodes, value, self))


class AnyOrder(Pattern):
    """`operands` combined by nested calls of `target`, in any order and grouping: AnyOrder(torch.mul, a, b,
    c)."""

    def __init__(self, target: Callable, *operands: Pattern):
        self.target, self.operands = target, operands

    def __repr__(self) -> str:
        return self.target.__name__

    def match(self, value: Any, so_far: Match, misses: list[Miss]) -> Iterator[Match]:
        if len(self.operands) == 1:
            yield from self.operands[0].match(value, so_far, misses)
            return
        numbers = range(len(self.operands))
        for left in (set(c) for size in numbers[1:] for c in combinations(numbers, size)):
            first = AnyOrder(self.target, *(self.operands[i] for i in numbers if i in left))
            second = AnyOrder(self.target, *(self.operands[i] for i in numbers if i not in left))
            yield from Call(self.target, first, second).match(value, so_far, misses)


class Each(Pattern):
    """A list or tuple whose items match `items`, one by one: the argument of torch.cat."""

    def __init__(self, *items: Pattern):
        self.items = items

    def match(self, value: Any, so_far: Match, misses: list[Miss]) -> Iterator[Match]:
        if not isinstance(value, (list, tuple)) or len(value) != len(self.items):
            misses.append(Miss(so_far.nodes, value, self))
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

    def match(self, value: Any, so_far: Match, misses: list[Miss]) -> Iterator[Match]:
        for tag, pattern in self.choices:
            for match in pattern.match(value, so_far, misses):
                tagged = match.bind(self.name, tag) if tag else match
                if tagged is not None:
                    yield tagged


class Maybe(Pattern):
    """`inner`, or one call (or more) of `targets` around it: Maybe(torch.Tensor.to, x) sees through casts."""

    def __init__(self, targets: Any, inner: Pattern):
        self.targets, self.inner = targets if isinstance(targets, tuple) else (targets,), inner
        self.depth = inner.depth

    def match(self, value: Any, so_far: Match, misses: list[Miss]) -> Iterator[Match]:
        yield from self.inner.match(value, so_far, misses)
        if isinstance(value, fx.Node) and value.op == "call_function" and value.target in self.targets:
            yield from self.match(value.args[0], replace(so_far, nodes=(*so_far.nodes, value)), misses)


@dataclass(frozen=True)
class Siblings:
    """All calls of `target` that read one value, made by children of one module: q, k and v, or gate and up.

    Not a tree, so `find` groups the graph's nodes; the match binds `role` to the tuple of nodes, in recorded
    order.
    """

    target: Callable
    role: str


def Linear(x: Any = None, role: str = "linear") -> Call:
    return Call(vocabulary.linear, *_input(x), role=role)


def Norm(x: Any = None, role: str = "norm") -> Call:
    return Call((vocabulary.layer_norm, vocabulary.rms_norm), *_input(x), role=role)


def _input(x: Any) -> tuple:
    return () if x is None else (x,)


def find(pattern: Pattern | Siblings, graph: fx.Graph, misses: list[Miss] | None = None) -> list[Match]:
    """Every match of `pattern` in `graph`, in the graph's order; misses that fitted at their root go to
    `misses`."""
    if isinstance(pattern, Siblings):
        return _find_siblings(pattern, graph)
    found = []
    for node in graph.nodes:
        stopped: list[Miss] = []
        match = next(pattern.match(node, Match(), stopped), None)
        if match is not None:
            found.append(match)
        elif misses is not None and any(miss.nodes for miss in stopped):
            misses.append(max(stopped, key=lambda miss: len(miss.nodes)))
    return found


def _find_siblings(pattern: Siblings, graph: fx.Graph) -> list[Match]:
    groups: dict[tuple, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is pattern.target:
            call = node.meta["call"]
            groups.setdefault((node.args[0], call.parent if call else None), []).append(node)
    return [Match({pattern.role: tuple(nodes)}, tuple(nodes)) for nodes in groups.values() if len(nodes) > 1]


def argument(node: fx.Node, name: str) -> Any:
    """The argument a vocabulary call passes for the parameter `name`, its default where it passes none.

    Raises:
        AttributeError: the word has no such parameter.
    """
    parameters = _parameters(node.target)
    if name not in parameters:
        raise AttributeError(
            f"{node.target.__name__} has no argument {name!r}, it has {', '.join(parameters)}"
        )
    index = list(parameters).index(name)
    return node.args[index] if index < len(node.args) else node.kwargs.get(name, parameters[name].default)


@cache
def _parameters(word: Callable) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(word).parameters)


def is_tensor_node(value: Any) -> bool:
    return isinstance(value, fx.Node) and "tensor_meta" in value.meta


def shape_of(value: fx.Node) -> torch.Size:
    return value.meta["tensor_meta"].shape


def dtype_of(value: fx.Node) -> torch.dtype:
    return value.meta["tensor_meta"].dtype


def same_shape(one: Any, other: Any) -> bool:
    """Whether two shapes are equal whatever the symbolic sizes in them are; asks without leaving a guard."""
    return len(one) == len(other) and all(
        statically_known_true(a == b) for a, b in zip(one, other, strict=True)
    )
