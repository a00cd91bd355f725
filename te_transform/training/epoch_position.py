"""The position in the epoch of a loader, at which training resumes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from te_transform.training.length_schedule import CurriculumError


@dataclass
class EpochPosition:
    """The number of batches that a loader has returned in an epoch.

    Attributes:
        batches: the number of batches of the current epoch.
        skipped: the number of batches that the next iteration skips after a resume.
    """

    batches: int = 0
    skipped: int = 0

    def resume(self, loader: Any, batches: int, state: Any) -> None:
        """Resume after this many batches of an epoch. `state` is the loader's own state, or None."""
        self.batches = batches
        if keeps_position(loader) and state is not None:
            loader.load_state_dict(state)
        elif loader is not None:
            self.skipped = batches

    def map(self, loader: Iterable[Any], function: Callable[[Any], Any]) -> Iterator[Any]:
        """Yield `function(batch)` for each batch of the rest of the epoch.

        Raises:
            CurriculumError: after a resume, the epoch has fewer batches than were skipped.
        """
        skipped, self.skipped = self.skipped, 0
        self.batches = self.batches if keeps_position(loader) or skipped else 0
        number = 0
        for number, batch in enumerate(loader, start=1):
            if number > skipped:
                result = function(batch)
                self.batches += 1
                yield result
        if number < skipped:
            raise CurriculumError(
                f"expected an epoch of at least the {skipped} batches before the checkpoint, got {number}; "
                "resume with the loader and the batch size of the checkpoint"
            )
        self.batches = 0


def keeps_position(loader: Any) -> bool:
    """Return True if a loader has its own state. Loaders of accelerate may have only the method."""
    return hasattr(loader, "state_dict") and getattr(loader, "use_stateful_dataloader", True)
