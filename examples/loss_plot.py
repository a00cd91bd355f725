"""Draw the losses of training runs against tokens and seconds, as an SVG that needs no package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, TOP = 340, 250, 30  # of a panel, in pixels
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#7f7f7f", "#8c564b")
HEAD = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 330" font-family="sans-serif" font-size="11"'

Points = list[dict[str, Any]]  # each with "step", "tokens", "seconds" and "loss"


def draw(runs: dict[str, Points], path: str | Path) -> None:
    """Write the curves of the runs to `path`: a panel over tokens, one over seconds."""
    losses = [point["loss"] for points in runs.values() for point in points]
    low, high = min(losses), max(losses)
    high = high if high > low else low + 1
    parts = [f"{HEAD}>", '<rect width="820" height="330" fill="white"/>']
    for left, axis in ((60, "tokens"), (460, "seconds")):
        parts += _panel(runs, left, axis, low, high)
    for i, (name, points) in enumerate(runs.items()):
        label = f"{name}: {points[-1]['loss']:.4f}"
        parts.append(f'<text x="240" y="{TOP + 12 + 16 * i}" fill="{COLORS[i % len(COLORS)]}">{label}</text>')
    Path(path).write_text("\n".join([*parts, "</svg>\n"]), encoding="utf-8")


def _panel(runs: dict[str, Points], left: int, axis: str, low: float, high: float) -> Iterator[str]:
    """Yield the axes, their numbers and the curves of one panel."""
    end, bottom = max(points[-1][axis] for points in runs.values()), TOP + HEIGHT
    yield f'<path d="M{left} {TOP}v{HEIGHT}h{WIDTH}" fill="none" stroke="#888"/>'
    yield f'<text x="{left + WIDTH / 2}" y="{bottom + 36}" text-anchor="middle">{axis}</text>'
    for i in range(5):
        x, y = left + WIDTH * i / 4, bottom - HEIGHT * i / 4
        yield f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{end * i / 4:.3g}</text>'
        yield f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{low + (high - low) * i / 4:.2f}</text>'
    for i, points in enumerate(runs.values()):
        xs = (left + WIDTH * point[axis] / end for point in points)
        ys = (bottom - HEIGHT * (point["loss"] - low) / (high - low) for point in points)
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
        color = COLORS[i % len(COLORS)]
        yield f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>'
