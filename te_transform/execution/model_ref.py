"""The model that was converted, as its runner knows it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from types import NoneType

from torch import Tensor, nn

from te_transform.backends.joined import held_elsewhere, local, make_adjacent
from te_transform.backends.ranks import is_sharded
from te_transform.backends.storages import sole_owners_needed
from te_transform.execution.blocks import blocks
from te_transform.execution.lower import ScatteredGroups


class ModelRef:
    """A converted model, held weakly: it holds its runner.

    Attributes:
        scattered: groups of its parameters that a graph joins and that do not lie next to each other.
    """

    def __init__(self) -> None:
        self.scattered: ScatteredGroups = []
        self._model: Callable[[], nn.Module | None] | None = None
        self._first_block: Callable[[], nn.Module | None] | None = None

    @property
    def model(self) -> nn.Module | None:
        """The model, or None before its first call, and if only parts of a copy are called."""
        return None if self._model is None else self._model()

    @property
    def first_block(self) -> nn.Module | None:
        """The model's first block, or None if it has no blocks."""
        return None if self._first_block is None else self._first_block()

    @property
    def is_sharded(self) -> bool:
        """True if FSDP shards the parameters."""
        return any(map(is_sharded, (self.model, self.first_block)))

    def modules(self) -> Iterator[nn.Module]:
        """Return its modules, none before its first call."""
        return iter(()) if (model := self.model) is None else model.modules()

    def meet(self, model: nn.Module) -> None:
        """Take note of the model at its first call."""
        if self._first_block is None:
            self._model = weakref.ref(model)
            self._first_block = next(map(weakref.ref, blocks(model)), NoneType)

    def make_adjacent(self, model: nn.Module) -> list[list[Tensor]]:
        """Lay scattered groups next to each other, those that are the model's own.

        FSDP's stand-ins are not: it frees their memory.

        Returns:
            The groups that stay scattered because somebody holds their memory.
        """
        groups = {tuple(r() for r in group) for group in self.scattered}
        own = {id(local(parameter)) for parameter in model.parameters()}
        self.scattered.clear()
        own_groups = [group for group in groups if all(id(tensor) in own for tensor in group)]
        return [[*group] for group in own_groups if not make_adjacent(group)]


def held_groups_told(model: nn.Module, groups: Sequence[Sequence[Tensor]]) -> str | None:
    """Return which parameters are joined by a copy in each call because their memory is held."""
    held = {id(tensor) for group in groups for tensor in held_elsewhere(group)}
    names = [name for name, parameter in model.named_parameters() if id(local(parameter)) in held]
    return sole_owners_needed(names) if names else None
