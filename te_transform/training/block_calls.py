"""Skipped calls of whole blocks: FSDP does not gather the parameters of a block that is not called.

The output of a dropped block consists of its arguments and of constants. The first dropped call shows which
argument stands where. A block with other outputs is called every time, and its graph leaves the layer out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

_Form = tuple[TreeSpec, list[Any]]  # of an output: the position of an argument, or a constant, per leaf


class BlockCalls:
    """The forms of the outputs of dropped blocks, by block and by the structure of the arguments."""

    def __init__(self) -> None:
        self.forms: dict[tuple, _Form | None] = {}

    def passed(self, block: nn.Module, args: tuple, kwargs: dict) -> tuple[Any] | None:
        """Return the output of a dropped block, in a tuple, or None if its form is unknown."""
        form = self.forms.get(_call_key(block, args, kwargs))
        if form is None:
            return None
        spec, sources = form
        given = tree_leaves((args, kwargs))
        leaves = [given[source] if is_given else source for is_given, source in sources]
        return (tree_unflatten(leaves, spec),)

    def learn(self, block: nn.Module, args: tuple, kwargs: dict, out: Any) -> None:
        """Learn the form of a block's output from a dropped call."""
        given, (leaves, spec) = tree_leaves((args, kwargs)), tree_flatten(out)
        sources = [_source_of(leaf, given) for leaf in leaves]
        self.forms[_call_key(block, args, kwargs)] = None if None in sources else (spec, sources)


def _source_of(leaf: Any, given: Sequence[Any]) -> tuple[bool, Any] | None:
    """Return the source of one output of a dropped block: the position of an argument, or a constant."""
    if isinstance(leaf, Tensor):
        return next(((True, index) for index, argument in enumerate(given) if argument is leaf), None)
    return (False, leaf) if leaf is None or isinstance(leaf, (bool, str)) else None


def _call_key(block: nn.Module, args: tuple, kwargs: dict) -> tuple:
    """Return a key of a block's calls that is equal on all ranks: it contains no sizes."""
    leaves, spec = tree_flatten((args, kwargs))
    return (
        id(block),
        spec,
        tuple(leaf if leaf is None or isinstance(leaf, bool) else type(leaf) for leaf in leaves),
    )
