"""Calls of whole blocks that are left out: FSDP gathers no parameters of a block that is not called.

What a block returns is learned from calls that run: the stream behind it, which a dropped block replaces by
the stream in front of it, None, and arguments that it hands on. Until that is known of calls with such
arguments, and where a block returns more, the block is called, and its graph leaves the layer out.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

ends: ContextVar[tuple[Any, Any] | None] = ContextVar("ends", default=None)
"""The stream in front of the last layer that ran as a graph of its own, and behind it."""

_Form = tuple[TreeSpec, list[Any]]  # of what a block returns: a place among the arguments for each tensor


class BlockCalls:
    """The forms of what the blocks of a model return, by block and by what tells their calls apart."""

    def __init__(self) -> None:
        self.forms: dict[tuple, _Form | None] = {}

    def passed(self, block: nn.Module, args: tuple, kwargs: dict) -> tuple[Any] | None:
        """Return what a block returns that adds nothing, in a tuple, or None if that is not known."""
        form = self.forms.get(_call_key(block, args, kwargs))
        if form is None:
            return None
        spec, places = form
        given = tree_leaves((args, kwargs))
        return (tree_unflatten([given[place] if is_given else place for is_given, place in places], spec),)

    def learn(self, block: nn.Module, args: tuple, kwargs: dict, out: Any) -> None:
        """Learn from a call what a block returns."""
        noted, key = ends.get(), _call_key(block, args, kwargs)
        if noted is None or key in self.forms:
            return
        given, (leaves, spec) = tree_leaves((args, kwargs)), tree_flatten(out)
        places = [_position_of(leaf, given, *noted) for leaf in leaves]
        is_known = None not in places and any(leaf is noted[1] for leaf in leaves)
        self.forms[key] = (spec, places) if is_known else None


def _position_of(leaf: Any, given: Sequence[Any], before: Any, behind: Any) -> tuple[bool, Any] | None:
    """Return where a dropped block finds what it returns: the place of an argument, or a constant."""
    wanted = before if leaf is behind else leaf
    if isinstance(wanted, Tensor):
        return next(((True, place) for place, held in enumerate(given) if held is wanted), None)
    return (False, leaf) if leaf is None or isinstance(leaf, (bool, str)) else None


def _call_key(block: nn.Module, args: tuple, kwargs: dict) -> tuple:
    """Return what tells calls of a block apart, in the same way on all ranks: no sizes."""
    leaves, spec = tree_flatten((args, kwargs))
    return (
        id(block),
        spec,
        tuple(leaf if leaf is None or isinstance(leaf, bool) else type(leaf) for leaf in leaves),
    )
