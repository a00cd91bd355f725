"""Draw the measurements of te_speed.py: a bar for each contender, with its quartiles.

python benchmarks/plot_speed.py layer.json llama.json docs/te_speed.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from command_line import json_file, output_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def main() -> None:
    """Draw a panel for each file, named after the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", type=rows_in, nargs="+", help="files that te_speed.py --json wrote")
    parser.add_argument("plot", type=output_file, help="the picture to write")
    asked = parser.parse_args()
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(asked.rows), figsize=(6.5 * len(asked.rows), 4.5), squeeze=False)
    for panel, (title, rows) in zip(panels[0], asked.rows, strict=True):
        draw(panel, title, rows)
    figure.tight_layout()
    figure.savefig(asked.plot)


def rows_in(file: str) -> tuple[str, list[dict]]:
    """Return the name and the rows of a file."""
    return Path(file).stem, json_file(file)


def draw(panel: Axes, title: str, rows: list[dict]) -> None:
    """Draw the milliseconds of a step, the slowest contender on top."""
    rows = sorted(rows, key=lambda row: row["median"])
    bars(panel, [row["name"] for row in rows], [(row["low"], row["median"], row["high"]) for row in rows])
    panel.set_title(f"{title}, forward and backward")
    panel.set_xlabel("ms")


def bars(panel: Axes, names: list[str], values: list[tuple[float, float, float]]) -> None:
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
