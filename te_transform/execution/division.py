"""The protocol of models that are divided among ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import fx, nn


class Ranks(Protocol):
    """The ranks that a model is divided among, as what records its calls knows them."""

    def agreed(self, why: str | None) -> str | None:
        """Return why something cannot be done, on this rank or on another one; waits for all of them."""

    def freed_before_end(self, recording: Any) -> None:
        """Free a recording of exchanges between the ranks before their group ends."""


class Division(Protocol):
    """A division of a model's parameters, see parallel/divided.py."""

    ranks: Ranks

    def graph(
        self, captured: fx.GraphModule, fuse: Callable[[fx.GraphModule], Callable[..., Any]]
    ) -> Callable[..., Any]:
        """Return what dynamo calls in the place of a captured graph."""

    def standing_in(self, modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
        """Put stand-ins in the places of these modules' parameters, for a call that is captured."""

    def whole(self, modules: Iterable[nn.Module], repeats: bool = False) -> AbstractContextManager[None]:
        """Put whole parameters in the places of the shards, for a call of the user's own code.

        Args:
            modules: whose parameters they are.
            repeats: whether a backward is going to repeat parts of that code.
        """

    def told(self) -> Iterator[str]:
        """Yield what is divided among the ranks, and why not more, in sentences for the report."""

    def collect(self) -> None:
        """Put whole parameters in the places of the shards for good."""
