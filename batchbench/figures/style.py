"""What figures share: style and colours, names of points, axes, panels, and bands that stand for many values."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from batchbench.figures.bands import Values, bands
from batchbench.results import Result
from batchbench.sheets import escaped
from batchbench.units import show_blocks

# Read once: a style file's settings over those of the caller, within `mpl.rc_context(STYLE)`.
STYLE = mpl.rc_params_from_file(str(Path(__file__).with_name("batchbench.mplstyle")), use_default_template=False)
# Okabe-Ito colours of clearly different lightness; every use has a second cue (marker, hatch, text).
DARK, MID, LIGHT, ALERT = "#0072B2", "#E69F00", "#C9DDEB", "#000000"

LINES: list[dict[str, Any]] = [
    {"marker": marker, "linestyle": style, "color": colour, "markersize": size, "markerfacecolor": "none"}
    for size, marker, style, colour in (
        (12, "o", "-", DARK), (11, "s", "--", MID), (10, "^", ":", "0.2"), (9, "D", "-.", "#009E73"),
        (8, "v", "-", "0.6"), (7, "X", "--", "#CC79A7"), (6, "P", ":", DARK), (5, "<", "-.", MID),
    )
]  # fmt: skip


def title(result: Result) -> str:
    name = str(result.run["scenario"]["name"])
    short = name if len(name) <= 40 else f"{name[:39]}…"
    return f"{short} (fast numerics)" if result.run["engine"].get("numerics") == "fast" else short


def choice_name(label: str) -> str:
    return escaped(label) or "as the scenario says"


def point_name(result: Result, point: int) -> str:
    about = result.tables["pools"].iloc[point]
    label = escaped(about["choices"])
    return f"pool of {show_blocks(int(about['pool_blocks']))}" + (f", {label}" if label else "")


def records(frame: pd.DataFrame) -> list[Any]:
    """Rows with their columns as attributes; missing values compare false with every number."""
    return list(frame.itertuples(index=False))


def pool_axis(axes: Axes, pools: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> None:
    """A tick per pool; a label only where it does not run into the last one."""
    axes.set_xscale("log", base=2)
    room = np.log2(pools[-1] / pools[0]) / 14
    labels, last = [], -np.inf
    for size in pools:
        fits = np.log2(size) - last > room
        labels.append(str(size) if fits else "")
        last = np.log2(size) if fits else last
    axes.set_xticks(pools, labels)
    axes.xaxis.set_minor_locator(NullLocator())


def thousands(value: float, _: int) -> str:
    """1500 -> 1.5k: long numbers would run into each other."""
    for limit, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:g}{letter}"
    return f"{value:g}"


def count_axis(axis: Any, ticks: int = 6) -> None:
    """Whole numbers, few enough not to touch."""
    axis.set_major_locator(MaxNLocator(ticks, integer=True, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(thousands))


def panels(
    result: Result, height: float, ratios: Sequence[float] = (1,), *, sharey: bool = False
) -> tuple[Figure, Any]:
    """A titled cell per point, each with an axes per ratio above one another: [cell, axes]. `finish` completes them.

    height: of a cell's axes, in inches. Laid out by hand and not shared: automatic layout and shared axes take minutes
    for a hundred cells.
    """
    names = [point_name(result, point) for point in result.tables["pools"]["point"]]
    columns = _columns(len(names))
    rows = -(-len(names) // columns)
    left, between, width = 0.8, 0.25 if sharey else 0.8, max(9.9, 2.7 * columns)
    each = (width - left - 0.2 - between * (columns - 1)) / columns
    titles = [textwrap.wrap(name, max(12, int(each / 0.075))) for name in names]  # of 8 points, at most
    above, below = 0.12 + 0.16 * max(map(len, titles)), 0.45  # of each cell: title; ticks and label
    whole = rows * (height + above + below) + 0.55
    figure = Figure(figsize=(width, whole))
    outer = figure.add_gridspec(
        rows, columns, left=left / width, right=1 - 0.2 / width, bottom=below / whole, top=1 - (0.55 + above) / whole,
        wspace=between / each, hspace=(above + below) / height,
    )  # fmt: skip
    cells = np.empty((len(names), len(ratios)), dtype=object)
    for place, name in enumerate(names):
        inner = outer[place // columns, place % columns].subgridspec(len(ratios), 1, height_ratios=ratios, hspace=0.18)
        for part in range(len(ratios)):
            axes = figure.add_subplot(inner[part])
            axes.tick_params(labelbottom=part == len(ratios) - 1, labelleft=not sharey or place % columns == 0)
            cells[place, part] = axes
        cells[place, 0].set_title("\n".join(titles[place]), fontsize=10 if len(name) < 24 else 8)
    return figure, cells


def finish(figure: Figure, cells: Any, end: float, label: str, text: str) -> None:
    """Give every cell of panels the same x axis, from 0; name it where nothing is below; and the figure its title."""
    for axes in cells.flat:
        axes.set_xlim(0, end)
        count_axis(axes.xaxis)
    for axes in cells[-_columns(len(cells)) :, -1]:
        axes.set_xlabel(label)
    figure.suptitle(text, y=1 - 0.08 / figure.get_figheight(), va="top")


def _columns(count: int) -> int:
    return min(count, 3 if count <= 12 else 4 if count <= 24 else 6)


def bars(axes: Axes, y: Values, left: Values, width: Values, height: float, **style: Any) -> PolyCollection:
    """Horizontal bars, quickly: one artist for all of them."""
    low, high, right = y - height / 2, y + height / 2, left + width
    corners = np.stack([left, low, right, low, right, high, left, high], axis=-1).reshape(-1, 4, 2)
    drawn = PolyCollection(list(corners), **style)
    axes.add_collection(drawn)
    return drawn


def draw_state(axes: Axes, start: Values, values: Values, end: float, pixels: int, look: dict[str, Any]) -> bool:
    """A state over time: as it was, or, of more values than pixels, its bands (True).

    start: from when on each value holds, ascending. look: colour, hatch and linestyle.
    """
    if len(values) <= pixels:
        x, y = np.append(start, end), np.append(values, values[-1:])
        axes.step(x, y, where="post", color=look["color"], linestyle=look["linestyle"], linewidth=1.4)
        return False
    found = bands(start, values, end, pixels // 2)
    low, high = (np.append(side, side[-1]) for side in (found.low, found.high))
    fill: dict[str, Any] = {"step": "post", "facecolor": look["color"], "alpha": 0.4, "edgecolor": "0.2"}
    axes.fill_between(found.edges, low, high, hatch=look["hatch"], linewidth=0, **fill)
    line: dict[str, Any] = {"baseline": None, "color": look["color"], "linestyle": look["linestyle"]}
    axes.stairs(found.mean, found.edges, linewidth=1.2, **line)
    return True
