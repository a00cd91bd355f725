"""What a fusion is: frozen data that rules declare and the report repeats."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from te_transform import vocabulary
from te_transform.pattern import Match, Pattern, Siblings, argument
from te_transform.trace import Call, Recording
from te_transform.weights import Move


@dataclass(frozen=True)
class Rule:
    """One rewrite: where it applies, why it may not, what stands there afterwards, and where the weights go.

    `refuse`, `build` and `weights` (where it is a function) are called with the match's roles by parameter
    name: an Operation, a tuple of them for Siblings, a tag for OneOf; `backend` and `approximate` (the
    option) are there to be asked for too. A parameter with a default is left to it where the match has no
    such role.
    """

    name: str
    pattern: Pattern | Siblings
    refuse: Callable[..., Iterator[str]]
    build: Callable[..., nn.Module]
    weights: tuple[Move, ...] | Callable[..., tuple[Move, ...]] = ()


@dataclass(frozen=True)
class Outcome:
    """One line of the report: a rule at one place of the model, fused or refused with every reason."""

    rule: str
    path: str
    status: Literal["fused", "refused"]
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stored:
    """A tensor of the model as an operation reads it: its name in the model, and whether it is read
    transposed."""

    name: str
    tensor: Tensor
    transposed: bool


class Operation:
    """One operation of a match as rules see it: its arguments by their vocabulary names, parameters as
    tensors.

    `linear.weight.shape`, `norm.eps`, `norm.bias is None`; `path` is the module that made the call, `word`
    the vocabulary's name of the operation, `spelled` the names of the torch calls it was recorded as.
    """

    def __init__(self, role: str, node: fx.Node, recording: Recording):
        self.role, self.node, self.recording = role, node, recording

    def __getattr__(self, name: str) -> Any:
        stored = self.stored.get(name)
        if stored is None:
            return argument(self.node, name)
        return stored.tensor.t() if stored.transposed else stored.tensor

    @property
    def word(self) -> str:
        return self.node.target.__name__

    @property
    def call(self) -> Call | None:
        return self.node.meta["call"]

    @property
    def path(self) -> str:
        return self.node.meta["path"]

    @property
    def module(self) -> nn.Module | None:
        return self.call.module if self.call else None

    @property
    def has_bias(self) -> bool:
        """Whether an attention's mask is one that is added, and not one that hides."""
        mask = argument(self.node, "mask")
        return isinstance(mask, fx.Node) and mask.meta["tensor_meta"].dtype.is_floating_point

    @property
    def spelled(self) -> tuple[str, ...]:
        return self.node.meta.get("spelled", ())

    @property
    def merged(self) -> str | None:
        """The name of the site that made this linear out of several, if one did."""
        return self.node.meta.get("merged")

    def viewed_as_if_contiguous(self, width: int) -> bool:
        """Whether a reader calls view() in a way that a slice out of a last dimension of `width` cannot
        do."""
        *lead, own = self.node.meta["tensor_meta"].shape
        slice_of = torch.empty(*lead, width, device="meta")[..., :own]
        for reader in self.node.users:
            if "view" in reader.meta.get("spelled", ()) and reader.target is torch.reshape:
                try:
                    slice_of.view(reader.args[1])
                except RuntimeError:
                    return True
        return False

    @cached_property
    def stored(self) -> dict[str, Stored]:
        """The operation's weights by argument name: those arguments that are a tensor of the model, or its
        transpose."""
        found = {}
        for name in inspect.signature(self.node.target).parameters:
            value = argument(self.node, name)
            transposed = isinstance(value, fx.Node) and value.target is torch.t
            leaf = value.args[0] if transposed else value
            if isinstance(leaf, fx.Node) and leaf.op == "get_attr":
                found[name] = Stored(leaf.target, self.recording.attributes[leaf.target], transposed)
        return found


def roles(match: Match, recording: Recording) -> dict[str, Any]:
    """The match's bound names as rules see them."""

    def seen(role: str, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(seen(role, item) for item in value)
        # an operation that is only read, not covered, is the match's input whatever it is
        covered = isinstance(value, fx.Node) and value in match.nodes
        is_word = covered and getattr(value.target, "__module__", "") == vocabulary.__name__
        return Operation(role, value, recording) if is_word else value

    return {role: seen(role, value) for role, value in match.bound.items()}


def ask(function: Callable[..., Any], known: dict[str, Any]) -> Any:
    """Call `function` with those of the `known` values that its parameters name."""
    parameters = inspect.signature(function).parameters.values()
    return function(**{p.name: known[p.name] for p in parameters if p.name in known or p.default is p.empty})
