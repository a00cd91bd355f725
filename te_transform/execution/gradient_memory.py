"""The memory of recorded gradients, which are returned without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from te_transform.backends.joined import local, parameter_of, parts_of


class GradientMemory:
    """The gradients that a recorded backward computes, and the detection of their holders.

    Gradients are returned in place and become `.grad` without a copy. Most steps have dropped them by the
    next forward.

    Args:
        gradients: the gradients that each replay of the backward overwrites.
        copies: True to return copies, because something other than `.grad` held a gradient.
    """

    def __init__(self, gradients: Sequence[Tensor | None], copies: bool):
        self.gradients, self.copies = gradients, copies
        storages = (grad.untyped_storage() for grad in gradients if grad is not None)
        self.storages = {storage._cdata: storage for storage in storages}
        self.alone: dict[int, int] = {}  # use counts of the storages without other holders

    def take(self) -> list[Tensor | None]:
        """Return the gradients of the last replay; see is_free()."""
        given: set[int] = set()  # two gradients may be one tensor, but autograd needs two
        gradients: list[Tensor | None] = []
        for grad in self.gradients:
            storage = None if grad is None else grad.untyped_storage()._cdata
            is_own = self.copies or storage in given
            gradients.append(None if grad is None else grad.clone() if is_own else grad.detach())
            given.add(storage)
        return gradients

    def is_free(self, arguments: Sequence[Any]) -> bool:
        """Return True if a replay may overwrite the gradients. The first call must precede all holders.

        A `.grad` that still holds a gradient, as in gradient accumulation, is replaced by a copy.

        Args:
            arguments: of the next call, whose parameters' `.grad` are replaced.
        """
        storages = self._held()
        if not storages:
            return True
        for parameter in map(parameter_of, chain.from_iterable(map(parts_of, arguments))):
            grad = None if parameter is None else parameter.grad
            if grad is not None and local(grad).untyped_storage()._cdata in storages:
                parameter.grad = grad.clone()
        grad = None  # this variable would be a holder
        return not self._held()

    def _held(self) -> set[int]:
        """Return the storages that have other holders."""
        counts = {storage: torch._C._storage_Use_Count(storage) for storage in self.storages}
        if not self.alone:
            self.alone = counts
        return {storage for storage, count in counts.items() if count > self.alone[storage]}
