"""Draw what te_speed.py measured: a bar for each contender, with its quartiles.

python benchmarks/plot_speed.py layer.json llama.json docs/te_speed.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt


def main() -> None:
    """One panel for each file, named after it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", nargs="+", help="files that te_speed.py --json wrote")
    parser.add_argument("plot", help="the picture to write")
    asked = parser.parse_args()
    files = [Path(name) for name in asked.rows]
    figure, panels = plt.subplots(1, len(files), figsize=(6.5 * len(files), 4.5), squeeze=False)
    for panel, file in zip(panels[0], files, strict=True):
        draw(panel, file.stem, json.loads(file.read_text()))
    figure.tight_layout()
    figure.savefig(asked.plot)


def draw(panel: plt.Axes, title: str, rows: list[dict]) -> None:
    """Milliseconds of a step, the slowest on top."""
    rows = sorted(rows, key=lambda row: row["median"])
    bars(panel, [row["name"] for row in rows], [(row["low"], row["median"], row["high"]) for row in rows])
    panel.set_title(f"{title}, forward and backward")
    panel.set_xlabel("ms")


def bars(panel: plt.Axes, names: list[str], values: list[tuple[float, float, float]]) -> None:
    """Draw medians with their quartiles (low, median, high), the first at the bottom."""
    lows, medians, highs = zip(*values, strict=True)
    spread = [
        [middle - low for low, middle in zip(lows, medians, strict=True)],
        [high - middle for high, middle in zip(highs, medians, strict=True)],
    ]
    colours = ["tab:green" if name.startswith("te_transform") else "tab:gray" for name in names]
    panel.barh(names, medians, color=colours, xerr=spread)


if __name__ == "__main__":
    main()
