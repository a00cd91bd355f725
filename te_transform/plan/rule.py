"""What a fusion is: frozen data that rules declare and the report repeats."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from te_transform.backends.op import FusedOp
from te_transform.graph import ops
from te_transform.graph.nodes import argument, is_model_tensor, path_of, shape_of, value
from te_transform.graph.pattern import Match, Pattern, Siblings


@dataclass(frozen=True)
class Rule:
    """One rewrite: where it applies, why it may not, what stands there afterwards, and what that is called
    with.

    `refuse` and `build` are called with the match's roles by parameter name: an Operation, a tuple of them
    for Siblings, a tag for OneOf; `backend` and the other options of convert() are there to be asked for too,
    by their names. A parameter with a default is left to it where the match has no such role. What `refuse`
    yields are reasons for the report; None leaves the place alone without a word, because nothing is to be
    gained there.

    `build` returns the fused op: a module without parameters. `reads` names the arguments of its call, in
    order: "x" is what the pattern's Var of that name found, "norm.weight" an argument of the operation in a
        role.
    `hands_out` names operations whose values the model may return too: the op returns a tuple of what the
    match computes and of these.
    `shares` names operations whose values others may read too. Where somebody does, the op returns such a
    tuple as well: `build` may ask for `shared`, the names of these.
    `example` makes a small model that the rule rewrites, and its inputs: `te-transform explain` draws it.
    """

    name: str
    pattern: Pattern | Siblings
    refuse: Callable[..., Iterator[str | None]]
    build: Callable[..., nn.Module] | None = None
    reads: tuple[str, ...] = ()
    hands_out: tuple[str, ...] = ()
    needs_kernels: bool = False  # whether only a backend with kernels of its own gains from it
    example: Callable[[], tuple[nn.Module, Any]] | None = None
    shares: tuple[str, ...] = ()

    def __reduce__(self) -> tuple:
        """By the name that its module has for it: patterns may hold functions that cannot be pickled."""
        home = sys.modules[self.refuse.__module__]
        name = next((name for name, held in vars(home).items() if held is self), None)
        if name is None:
            raise TypeError(
                f"rule {self.name!r} is no global of {home.__name__}, a converted model that is pickled "
                "whole needs its rules to be: give the rule a name there"
            )
        return _named, (home.__name__, name)

    def __deepcopy__(self, memo: dict) -> Rule:
        return self  # frozen


def _named(home: str, name: str) -> Rule:
    return getattr(import_module(home), name)


@dataclass(frozen=True)
class Deviation:
    """How far a value of a fused op is off, and the captured operations', relative and against fp64; a
    gradient is measured by the largest of the same backward."""

    name: str
    converted: float
    original: float
    allowed: float


@dataclass(frozen=True)
class Outcome:
    """One line of the report: a rule at one place of the model, fused or refused with every reason.

    Where they can be predicted, `seconds` is what its operations take of an H100's time in a call, as the
    model has them, and `fused_seconds` what they take fused; `kept` is how many bytes the fused op keeps for
    its backward. `precision` says, where there is a recipe, whether its products run in it, and why not.
    `deviations` are those of the fused op on the values of the first call, where it was checked. `inactive`
    says why a fused place runs as it was captured in a call of the example's sizes, "" if it does not.
    """

    rule: str
    path: str
    status: Literal["fused", "refused"]
    reasons: tuple[str, ...] = ()
    weights: int = field(default=0, compare=False)  # how many numbers the weights of its linears hold
    seconds: float | None = field(default=None, compare=False)
    fused_seconds: float | None = field(default=None, compare=False)
    kept: int | None = field(default=None, compare=False)
    precision: str = field(default="", compare=False)
    deviations: tuple[Deviation, ...] = field(default=(), compare=False)
    inside: frozenset[str] = field(default=frozenset(), compare=False, repr=False)  # the captured operations
    inactive: str = field(default="", compare=False)

    @property
    def saved(self) -> float:
        """The seconds of a call that fusing the place saves, or would save, by the prediction; 0 where there
        is none."""
        known = self.seconds is not None and self.fused_seconds is not None
        return self.seconds - self.fused_seconds if known else 0.0

    def below(self, path: str) -> Outcome:
        """The same at a place below `path`."""
        return replace(self, path=".".join(filter(None, (path, self.path))))


@dataclass(frozen=True)
class Operation:
    """One operation of a match as rules see it: its arguments by the names that the op in graph/ops.py gives
    them.

    `linear.weight.shape`, `norm.eps`, `norm.bias is None`: tensors are fake ones, of the right shape and
    dtype.
    """

    role: str
    node: fx.Node

    def __getattr__(self, name: str) -> Any:
        found = argument(self.node, name)
        held = value(found)
        return held if isinstance(held, Tensor) else found

    @property
    def value(self) -> Any:
        """What it computes: a fake tensor."""
        return value(self.node)

    @property
    def op(self) -> str:
        """The name of the op."""
        return self.node.target.__name__

    @property
    def path(self) -> str:
        """The path of the module whose forward made the call."""
        return path_of(self.node)

    @property
    def spelled(self) -> tuple[str, ...]:
        """The names of the captured calls that the op stands for."""
        return self.node.meta.get("spelled", ())

    @property
    def width(self) -> int:
        """The size of the last dimension of what it computes."""
        return shape_of(self.node)[-1]

    def sources(self, name: str) -> tuple[Any, ...]:
        """The nodes that the argument `name` is read from: a parameter, the parameters that were joined to
        it, or whatever computes it; nothing where it is None."""
        return stored_in(argument(self.node, name))


def stored_in(found: Any) -> tuple[Any, ...]:
    """The nodes of the model's tensors that make a weight, looking through ops.join, torch.t and reshapes."""
    if found is None:
        return ()
    if isinstance(found, fx.Node) and found.target is ops.join:
        held = (argument for argument in found.args if isinstance(argument, fx.Node))  # a number is zeros
        return tuple(part for argument in held for part in stored_in(argument))
    if isinstance(found, fx.Node) and found.target is torch.t and is_model_tensor(found.args[0]):
        return (found.args[0],)
    return (reshaped(found),)


_RESHAPES = (torch.reshape, torch.unsqueeze, torch.squeeze, "squeeze")


def reshaped(weight: Any) -> Any:
    """Return the tensor of the model that a node has all numbers of, in their order, or else the node."""
    whole = weight
    while isinstance(whole, fx.Node) and whole.target in _RESHAPES:
        whole = whole.args[0]
    return whole if is_model_tensor(whole) and value(whole).is_contiguous() else weight


def roles(match: Match) -> dict[str, Any]:
    """The match's bound names as rules see them."""

    def seen(role: str, found: Any) -> Any:
        if isinstance(found, tuple):
            return tuple(seen(role, item) for item in found)
        # an operation that is only read, not covered, is the match's input whatever it is
        covered = isinstance(found, fx.Node) and found in match.nodes
        is_op = covered and getattr(found.target, "__module__", "") == ops.__name__
        return Operation(role, found) if is_op else found

    return {role: seen(role, found) for role, found in match.bound.items()}


class RuleError(RuntimeError):
    """A function of a rule cannot be called on a match, or returns what it should not."""


def ask(rule: Rule, what: Literal["refuse", "build"], known: dict[str, Any]) -> Any:
    """Call a function of `rule` with those of the `known` values that its parameters name.

    Raises:
        RuleError: it asks for something that the match does not have, it raised, or made no fused op.
    """
    function = getattr(rule, what)
    parameters = inspect.signature(function).parameters.values()
    wanted = [p.name for p in parameters if p.name in known or p.default is p.empty]
    if missing := [name for name in wanted if name not in known]:
        raise RuleError(
            f"{what}() of the rule {rule.name!r} asks for {missing[0]!r}, a role of its pattern or an option "
            f"is needed, one of {', '.join(known)}: give what some alternatives lack a default"
        )
    try:
        found = function(**{name: known[name] for name in wanted})
    except Exception as error:
        raise _raised(rule, what, error) from error
    if what == "build" and not isinstance(found, FusedOp):
        raise RuleError(f"build() of the rule {rule.name!r} returned {found!r}, a FusedOp is needed")
    return found


def _raised(rule: Rule, what: str, error: Exception) -> RuleError:
    said, needed = f"{type(error).__name__}: {error}", "reasons are" if what == "refuse" else "a FusedOp is"
    return RuleError(f"{what}() of the rule {rule.name!r} raised {said}, {needed} needed")


def reasons_of(rule: Rule, known: dict[str, Any]) -> list[str | None]:
    """What refuse() of `rule` yields.

    Raises:
        RuleError: it asks for something that the match does not have, raised, or yields no sentences.
    """
    found = ask(rule, "refuse", known)
    if isinstance(found, str) or not isinstance(found, Iterable):
        raise RuleError(
            f"refuse() of the rule {rule.name!r} returned {found!r}, an iterator of reasons is needed: yield "
            "each of them"
        )
    try:
        found = list(found)
    except Exception as error:
        raise _raised(rule, "refuse", error) from error
    if wrong := [reason for reason in found if reason is not None and not isinstance(reason, str)]:
        raise RuleError(f"refuse() of the rule {rule.name!r} yielded {wrong[0]!r}, a sentence is needed")
    return found
