"""The protocol of models that are divided among ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import fx, nn

from te_transform.execution.cuda_graph_pair import CudaGraphPair


class RankGroup(Protocol):
    """The ranks of a divided model, for the recording of its calls."""

    def agreed(self, why: str | None) -> str | None:
        """Return why an action is impossible on this rank or another, or None. Synchronize all ranks."""

    def freed_before_end(self, recording: CudaGraphPair) -> None:
        """Free a recording with collectives before their process group is destroyed."""


class Division(Protocol):
    """A division of a model's parameters, see parallel/divided.py."""

    ranks: RankGroup

    def graph(
        self, captured: fx.GraphModule, fuse: Callable[[fx.GraphModule], Callable[..., Any]]
    ) -> Callable[..., Any]:
        """Return the function that dynamo calls instead of a captured graph."""

    def standing_in(self, modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
        """Replace the parameters of these modules by stand-ins, for a call that is captured."""

    def whole(self, modules: Iterable[nn.Module], repeats: bool = False) -> AbstractContextManager[None]:
        """Replace the shards by whole parameters, for a call of the user's own code.

        Args:
            modules: the modules whose parameters are replaced.
            repeats: True if a backward will repeat parts of this code.
        """

    def sentences(self) -> Iterator[str]:
        """Yield sentences for the report: what is divided among the ranks, and why the rest is not."""

    def collect(self) -> None:
        """Replace the shards by whole parameters permanently."""
