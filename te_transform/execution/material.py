"""The material for the report of a converted model."""

from __future__ import annotations

from typing import Any

from te_transform.execution.captured_graph import CapturedGraph


class ReportMaterial:
    """The material for the report of one converted model.

    Attributes:
        report: of the conversion, or None before the conversion has finished.
        notes: sentences about graphs that do not run as requested.
        breaks: dynamo's reasons for graph breaks.
        next_call: None, or the graphs of the next call if that call makes the report; [] before the call.
        was_called: True after a call of the model itself, not only of its parts.
    """

    def __init__(self, report: Any = None, next_call: list[CapturedGraph] | None = None):
        self.report, self.next_call = report, next_call
        self.notes: list[str] = []
        self.breaks: dict[str, str] = {}
        self.was_called = False

    def tell(self, why: str) -> None:
        """Add a sentence to the report, once."""
        if why not in self.notes:
            self.notes.append(why)

    def __deepcopy__(self, memo: dict) -> ReportMaterial:
        return ReportMaterial(self.report, self._no_graphs())

    def __reduce__(self) -> tuple:
        return ReportMaterial, (self.report, self._no_graphs())

    def _no_graphs(self) -> list[CapturedGraph] | None:
        """Return [] if a copy must make the report from its own next call, or None."""
        return None if self.next_call is None else []
