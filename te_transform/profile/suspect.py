"""A slow operation, before the gain of its change is known."""

from __future__ import annotations

from typing import NamedTuple

from te_transform.profile.trials import Replacement


class Suspect(NamedTuple):
    """A slow operation of a step.

    Attributes:
        what: the name of the finding.
        label: the number of the module's label.
        evidence: what ran, as a clause.
        advice: what to change.
        taken: the cost in nanoseconds that the change affects.
        trial: the change on tensors of the same shapes, or None if it cannot be tried.
        most: the largest gain in nanoseconds; None means `taken`.
        together: True if one finding names all modules, False for a finding per kind of layer.
    """

    what: str
    label: int
    evidence: str
    advice: str
    taken: int
    trial: Replacement | None = None
    most: int | None = None
    together: bool = False
