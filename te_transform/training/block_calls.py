"""Skipped calls of whole blocks: FSDP does not gather the parameters of a block that is not called.

The output of a dropped block is assembled from its arguments. Calls that run show the form of the output:
one leaf is the stream after the block, and the other leaves are arguments or constants. A block is called as
long as its form is unknown, or if it returns other values. Its graph then leaves the layer out.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

ends: ContextVar[tuple[Any, Any] | None] = ContextVar("ends", default=None)
"""The stream before and after the last layer that ran as a graph of its own."""

_Form = tuple[TreeSpec, list[Any]]  # of an output: the position of an argument, or a constant, per leaf


class BlockCalls:
    """The forms of the outputs of a model's blocks, by block and by the structure of the arguments."""

    def __init__(self) -> None:
        self.forms: dict[tuple, _Form | None] = {}

    def passed(self, block: nn.Module, args: tuple, kwargs: dict) -> tuple[Any] | None:
        """Return the output of a block that adds nothing, in a tuple, or None if its form is unknown."""
        form = self.forms.get(_call_key(block, args, kwargs))
        if form is None:
            return None
        spec, sources = form
        given = tree_leaves((args, kwargs))
        leaves = [given[source] if is_given else source for is_given, source in sources]
        return (tree_unflatten(leaves, spec),)

    def learn(self, block: nn.Module, args: tuple, kwargs: dict, out: Any) -> None:
        """Learn the form of a block's output from a call."""
        noted, key = ends.get(), _call_key(block, args, kwargs)
        if noted is None or key in self.forms:
            return
        given, (leaves, spec) = tree_leaves((args, kwargs)), tree_flatten(out)
        sources = [_source_of(leaf, given, *noted) for leaf in leaves]
        is_known = None not in sources and any(leaf is noted[1] for leaf in leaves)
        self.forms[key] = (spec, sources) if is_known else None


def _source_of(leaf: Any, given: Sequence[Any], before: Any, behind: Any) -> tuple[bool, Any] | None:
    """Return the source of one output of a dropped block: the position of an argument, or a constant."""
    wanted = before if leaf is behind else leaf
    if isinstance(wanted, Tensor):
        return next(((True, index) for index, held in enumerate(given) if held is wanted), None)
    return (False, leaf) if leaf is None or isinstance(leaf, (bool, str)) else None


def _call_key(block: nn.Module, args: tuple, kwargs: dict) -> tuple:
    """Return a key of a block's calls that is equal on all ranks: it contains no sizes."""
    leaves, spec = tree_flatten((args, kwargs))
    return (
        id(block),
        spec,
        tuple(leaf if leaf is None or isinstance(leaf, bool) else type(leaf) for leaf in leaves),
    )
