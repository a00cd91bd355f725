"""The frozen data types of a fusion: rules declare them, and the report prints them."""

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
from te_transform.canonicalize.op import Forms
from te_transform.graph import ops
from te_transform.graph.errors import in_full
from te_transform.graph.nodes import argument, is_model_tensor, path_below, path_of, shape_of, value
from te_transform.graph.pattern import Match, Pattern, Siblings


@dataclass(frozen=True)
class Rule:
    """A rewrite of one pattern into one fused op.

    `refuse` and `build` are called with the values that their parameters name. These may be roles of the
    match: an Operation, a tuple of Operations for Siblings, a tag for OneOf. They may also be `backend` and
    the other options of convert(). A parameter with a default keeps it if the match has no such role.

    Args:
        name: The name of the rule in the report.
        pattern: The pattern that the rule rewrites.
        refuse: A function that yields reasons not to rewrite a match; the report prints them. If it yields
            None, the match is left alone and not reported, because there is nothing to gain.
        build: A function or class that returns the fused op, a module without parameters.
        reads: The arguments of the op's call, in order. "x" is the value bound by the pattern's Var of that
            name, "norm.weight" an argument of the operation with the role `norm`.
        hands_out: Roles whose values the model may also return. The op returns a tuple of the result of the
            match and these values.
        needs_kernels: True if only a backend with its own kernels gains from the rule.
        example: A function that returns a small model that the rule rewrites, and its inputs;
            `te-transform explain` shows it.
        shares: Roles whose values other operations may also read. If any do, the op returns a tuple with
            these values too; `build` may take a parameter `shared` with their names.
        forms: Canonical forms that the pattern needs, if canonicalize/ does not have them.
        requires: What a model needs for the rule. The report prints it if the user asks for the rule, by an
            option of its name, and nothing matches.
    """

    name: str
    pattern: Pattern | Siblings
    refuse: Callable[..., Iterator[str | None]]
    build: Callable[..., nn.Module] | None = None
    reads: tuple[str, ...] = ()
    hands_out: tuple[str, ...] = ()
    needs_kernels: bool = False
    example: Callable[[], tuple[nn.Module, Any]] | None = None
    shares: tuple[str, ...] = ()
    forms: Forms | None = None
    requires: str = ""

    def __reduce__(self) -> tuple:
        """Pickle the rule by its global name: patterns may hold functions that cannot be pickled."""
        home = sys.modules[self.refuse.__module__]
        name = next((name for name, attribute in vars(home).items() if attribute is self), None)
        if name is None:
            raise TypeError(
                f"expected the rule {self.name!r} to be a global of {home.__name__}, to pickle a converted "
                "model, got a rule without a name there; assign it to a global"
            )
        return _imported_rule, (home.__name__, name)

    def __deepcopy__(self, memo: dict) -> Rule:
        return self  # frozen


def _imported_rule(home: str, name: str) -> Rule:
    return getattr(import_module(home), name)


@dataclass(frozen=True)
class Deviation:
    """The relative errors against fp64 of one value: of the fused op, and of the captured operations.

    The error of a gradient is relative to the largest gradient of the same backward.
    """

    name: str
    converted: float
    original: float
    allowed: float


@dataclass(frozen=True)
class Outcome:
    """One line of the report: a match of a rule in the model, fused, or refused with every reason.

    Attributes:
        seconds: The predicted H100 time per call of the operations as the model has them, if known.
        fused_seconds: The predicted H100 time per call of the fused op, if known.
        kept: The bytes that the fused op saves for its backward, if known.
        precision: With a recipe, whether the products run in it, and why not.
        deviations: The errors of the fused op on the values of the first call, if it was checked.
        inactive: Why a fused site runs unfused at the example's sizes, or "".
    """

    rule: str
    path: str
    status: Literal["fused", "refused"]
    reasons: tuple[str, ...] = ()
    weights: int = field(default=0, compare=False)  # elements in the weights of its linears
    seconds: float | None = field(default=None, compare=False)
    fused_seconds: float | None = field(default=None, compare=False)
    kept: int | None = field(default=None, compare=False)
    precision: str = field(default="", compare=False)
    deviations: tuple[Deviation, ...] = field(default=(), compare=False)
    inside: frozenset[str] = field(default=frozenset(), compare=False, repr=False)  # the captured operations
    inactive: str = field(default="", compare=False)

    @property
    def saved(self) -> float:
        """The predicted seconds per call that fusing saves, or would save; 0 without a prediction."""
        known = self.seconds is not None and self.fused_seconds is not None
        return self.seconds - self.fused_seconds if known else 0.0

    def below(self, path: str) -> Outcome:
        """Return the outcome with its path prefixed by `path`."""
        return replace(self, path=path_below(path, self.path))


@dataclass(frozen=True)
class Operation:
    """An operation of a match, with its arguments as attributes, named as those of its op.

    Examples: `linear.weight.shape`, `norm.eps`, `norm.bias is None`. Tensors are fake tensors with the right
    shape and dtype.
    """

    role: str
    node: fx.Node

    def __getattr__(self, name: str) -> Any:
        given = argument(self.node, name)
        tensor = value(given)
        return tensor if isinstance(tensor, Tensor) else given

    @property
    def value(self) -> Any:
        """The result, a fake tensor."""
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
        """The names of the captured calls that the op replaces."""
        return self.node.meta.get("spelled", ())

    @property
    def width(self) -> int:
        """The size of the last dimension of the result."""
        return shape_of(self.node)[-1]

    def sources(self, name: str) -> tuple[Any, ...]:
        """Return the nodes that the argument `name` is read from.

        They are a parameter, several joined parameters, or the node that computes the argument. The tuple is
        empty if the argument is None.
        """
        return stored_in(argument(self.node, name))


def stored_in(weight: Any) -> tuple[Any, ...]:
    """Return the nodes of the model's tensors behind a weight, through ops.join, torch.t and reshapes."""
    if weight is None:
        return ()
    if isinstance(weight, fx.Node) and weight.target is ops.join:
        nodes = (
            argument for argument in weight.args if isinstance(argument, fx.Node)
        )  # a number stands for zeros
        return tuple(part for argument in nodes for part in stored_in(argument))
    whole = reshaped(weight.args[0] if isinstance(weight, fx.Node) and weight.target is torch.t else weight)
    return (whole if is_model_tensor(whole) else weight,)


_RESHAPE_TARGETS = (torch.reshape, torch.unsqueeze, torch.squeeze, "squeeze")


def reshaped(weight: Any) -> Any:
    """Return the model tensor that a node is a reshape of, or the node itself if it is not a reshape."""
    whole = weight
    while isinstance(whole, fx.Node) and whole.target in _RESHAPE_TARGETS:
        whole = whole.args[0]
    return whole if is_model_tensor(whole) and value(whole).is_contiguous() else weight


def roles(match: Match) -> dict[str, Any]:
    """Return the bound names of a match, with covered operations as Operation objects."""

    def seen(role: str, bound: Any) -> Any:
        if isinstance(bound, tuple):
            return tuple(seen(role, item) for item in bound)
        # an operation outside the match is an input, whatever its op
        covered = isinstance(bound, fx.Node) and bound in match.nodes
        return Operation(role, bound) if covered and ops.is_op(bound.target) else bound

    return {role: seen(role, bound) for role, bound in match.bound.items()}


class RuleError(RuntimeError):
    """The error for a function of a rule that raises, or has an invalid result or parameter."""


def ask(rule: Rule, what: Literal["refuse", "build"], known: dict[str, Any]) -> Any:
    """Call refuse() or build() of `rule` with the `known` values that its parameters name.

    Raises:
        RuleError: a parameter names no known value, the function raised, or build() returned no fused op.
    """
    function = getattr(rule, what)
    parameters = inspect.signature(function).parameters.values()
    wanted = [p.name for p in parameters if p.name in known or p.default is p.empty]
    if missing := [name for name in wanted if name not in known]:
        raise RuleError(
            f"expected parameters of {what}() of the rule {rule.name!r} to be roles of its pattern or "
            f"options ({', '.join(known)}), got {missing[0]!r}; give a default to roles of only some "
            "alternatives"
        )
    try:
        answer = function(**{name: known[name] for name in wanted})
    except Exception as error:
        raise _raised(rule, what, error) from error
    if what == "build" and not isinstance(answer, FusedOp):
        raise RuleError(f"expected a FusedOp from build() of the rule {rule.name!r}, got {answer!r}")
    return answer


def _raised(rule: Rule, what: str, error: Exception) -> RuleError:
    said, needed = in_full(error), "reasons" if what == "refuse" else "a FusedOp"
    return RuleError(f"expected {needed} from {what}() of the rule {rule.name!r}, got {said}")


def reasons_of(rule: Rule, known: dict[str, Any]) -> list[str | None]:
    """Return the reasons that refuse() of `rule` yields.

    Raises:
        RuleError: a parameter names no known value, the function raised, or it yields something else than
            sentences.
    """
    reasons = ask(rule, "refuse", known)
    if isinstance(reasons, str) or not isinstance(reasons, Iterable):
        raise RuleError(
            f"expected an iterator of reasons from refuse() of the rule {rule.name!r}, got {reasons!r}; "
            "yield each reason"
        )
    try:
        reasons = list(reasons)
    except Exception as error:
        raise _raised(rule, "refuse", error) from error
    if wrong := [reason for reason in reasons if reason is not None and not isinstance(reason, str)]:
        raise RuleError(f"expected sentences from refuse() of the rule {rule.name!r}, got {wrong[0]!r}")
    return reasons
