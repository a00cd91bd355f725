"""Find what draws a report as HTML: the module that is registered here, such as page/render.py."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol, cast

_modules: list[str] = []


class Renderer(Protocol):
    """The interface of a module that draws reports: each function gets a te_transform.Report."""

    def page(self, report: Any) -> str:
        """Return the report as a self-contained HTML page."""

    def notebook(self, report: Any) -> str:
        """Return the report as HTML for a cell of a notebook."""


def register_renderer(module: str) -> None:
    """Draw reports by a module with the functions of Renderer; the last registration counts.

    The module is imported when a report is first drawn.
    """
    _modules.append(module)


def renderer() -> Renderer:
    """Return the registered module.

    Raises:
        RuntimeError: no module is registered.
    """
    if not _modules:
        raise RuntimeError(
            "expected a registered renderer to draw a report as HTML, got none; call "
            "te_transform.report.renderer.register_renderer(module), or print the report"
        )
    return cast(Renderer, import_module(_modules[-1]))
