"""The runner's weak reference to the converted model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from te_transform.backends.joined import held_elsewhere, local, make_adjacent
from te_transform.backends.ranks import is_sharded
from te_transform.backends.storages import sole_owners_needed
from te_transform.execution.blocks import first_in_list, unwrapped
from te_transform.execution.gathered_rows import make_gathered_adjacent
from te_transform.execution.lower import ScatteredGroups


class ModelRef:
    """A weak reference to a converted model, which itself refers to its runner.

    Attributes:
        scattered: groups of its parameters that a graph joins and that are not adjacent in memory.
    """

    def __init__(self) -> None:
        self.scattered: ScatteredGroups = []
        self._model: Callable[[], nn.Module | None] | None = None
        self._list: Callable[[], nn.Module | None] | None = None
        self._first = ""  # the name of the first block in the list

    @property
    def model(self) -> nn.Module | None:
        """The model, or None before its first call, and if only parts of a copy are called."""
        return None if self._model is None else self._model()

    @property
    def first_block(self) -> nn.Module | None:
        """The model's first block, or None if it has no blocks."""
        return None if (layer := self._first_layer) is None else unwrapped(layer)

    @property
    def has_sharded_blocks(self) -> bool:
        """True if FSDP shards the first block, or a wrapper around it."""
        return is_sharded(self._first_layer) or is_sharded(self.first_block)

    @property
    def is_sharded(self) -> bool:
        """True if FSDP shards the parameters."""
        return is_sharded(self.model) or self.has_sharded_blocks

    @property
    def _first_layer(self) -> nn.Module | None:
        """The first block, or the wrapper that it is in by now."""
        layers = None if self._list is None else self._list()
        return None if layers is None else layers._modules.get(self._first)

    def meet(self, model: nn.Module) -> None:
        """Note the model at its first call."""
        if self._model is None:
            self._model = weakref.ref(model)
            if (first := first_in_list(model)) is not None:
                self._list, self._first = weakref.ref(first[0]), first[1]

    def make_adjacent(self, model: nn.Module) -> list[list[Tensor]]:
        """Make scattered groups of the model's parameters adjacent in memory, also those that FSDP2 gathers.

        Returns:
            The groups that stay scattered because their memory has other holders.
        """
        groups = make_gathered_adjacent(model, {tuple(r() for r in group) for group in self.scattered})
        own = {id(local(parameter)) for parameter in model.parameters()}
        self.scattered.clear()
        own_groups = [group for group in groups if all(id(tensor) in own for tensor in group)]
        return [[*group] for group in own_groups if not make_adjacent(group)]


def held_groups_told(model: nn.Module, groups: Sequence[Sequence[Tensor]]) -> str | None:
    """Return a sentence on the parameters that each call joins by a copy, or None.

    These parameters cannot be made adjacent, because their memory has other holders.
    """
    tensors = {id(tensor) for group in groups for tensor in held_elsewhere(group)}
    names = [name for name, parameter in model.named_parameters() if id(local(parameter)) in tensors]
    return sole_owners_needed(names) if names else None
