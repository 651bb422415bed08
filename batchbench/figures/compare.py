"""The figure of a comparison: what each result costs over the points, and every request's latency over its own."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from batchbench.comparing import Comparison
from batchbench.errors import BatchbenchError, UsageError
from batchbench.figures.style import LINES, STYLE
from batchbench.results import Result
from batchbench.sheets import escaped
from batchbench.units import show_count

_COMPARED = (
    ("recompute_fraction", "Recompute", "share of forward positions [%]", 100),
    ("preemptions_per_request", "Evictions", "evictions per request", 1),
    ("mean_latency_iterations", "Latency", "mean of all requests [iterations]", 1),
)


def save_comparison(results: Sequence[Result], names: Sequence[str], found: Sequence[Comparison], path: Path) -> bool:
    """Write it in the format of the path's ending; False, and no file, if no point is of two results, so that there is
    nothing to draw. Raises UsageError for an ending that is none, or more results than can be told apart.
    """
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"figure {path}: must end in .png, .svg or .pdf")
    if len(results) > len(LINES):
        raise UsageError(f"figure {path}: {len(results)} results are too many to tell apart; {len(LINES)} at most")
    if not any(one.points for one in found):
        return False
    with mpl.rc_context(STYLE):
        figure = comparison(results, names, found)
        try:
            figure.savefig(path, metadata={"Software": None} if path.suffix == ".png" else None)
        except OSError as error:
            raise BatchbenchError(f"figure {path}: {error.strerror or error}") from None
    return True


def comparison(results: Sequence[Result], names: Sequence[str], found: Sequence[Comparison]) -> Figure:
    """Three metrics and the latency ratios, a line for each result, points in the order of the first result."""
    labels = [_label(row) for row in results[0].rows("pools")]
    upright = max(map(len, labels)) > 12 or len(labels) > 10
    ticks = [textwrap.fill(label.replace("\n", ", "), 48) for label in labels] if upright else labels
    width, height = _size(ticks) if upright else (10.5, 7.2)
    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(2, 2, sharex=True).flat
    for axes, (column, title, unit, scale) in zip(grid, _COMPARED, strict=False):
        for result, line in zip(results, LINES, strict=False):
            values = {_label(row): row[column] for row in result.rows("pools")}
            heights = [np.nan if values.get(label) is None else scale * values[label] for label in labels]
            axes.plot(range(len(labels)), heights, clip_on=False, **line)
        axes.set(title=title, ylabel=unit, ylim=(0, None))
        if axes.dataLim.ymax <= 0:
            axes.set_ylim(0, 1)
    _ratios(grid[-1], results, names, found)
    for axes in grid[-2:]:
        _name_points(axes, ticks, upright)
    _legend(figure, grid[0].get_lines(), names)
    said = f"{results[0].run['scenario']['name']}: {' and '.join(names[1:])} against {names[0]}"
    if hidden := sum(len(one.only_other) for one in found):
        said += f"\n{show_count(hidden, 'point')} that {names[0]} lacks: not drawn"
    figure.suptitle("\n".join(part for line in said.split("\n") for part in textwrap.wrap(line, int(10 * width))))
    return figure


def _size(labels: Sequence[str]) -> tuple[float, float]:
    """Width and height in inches with which labels that stand upright leave the axes as large as others do."""
    lines = max(label.count("\n") + 1 for label in labels)
    longest = max(len(line) for label in labels for line in label.split("\n"))
    return max(10.5, 2 + 2 * len(labels) * 0.12 * (lines + 0.3)), 7.2 + 0.055 * longest


def _legend(figure: Figure, lines: Sequence[Line2D], names: Sequence[str]) -> None:
    """Below, in as many columns as fit. Names are set afterwards: a legend leaves out what begins with `_`."""
    columns = int(figure.get_figwidth() / (0.8 + 0.075 * max(map(len, names))))
    places = [str(place) for place in range(len(names))]
    legend = figure.legend(lines, places, loc="outside lower center", ncols=max(1, min(3, len(names), columns)))
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_text(name)


def _ratios(axes: Axes, results: Sequence[Result], names: Sequence[str], found: Sequence[Comparison]) -> None:
    """The least, the median and the greatest ratio at each point."""
    for number, (one, result, line) in enumerate(zip(found, results[1:], LINES[1:], strict=False)):
        aside = 0.7 / max(5, len(found)) * (number - (len(found) - 1) / 2)
        for point in one.points:
            here, there = point.places
            before = results[0].point("requests", here, ["latency_iterations"])["latency_iterations"].to_numpy()
            after = result.point("requests", there, ["latency_iterations"])["latency_iterations"].to_numpy()
            low, middle, high = np.percentile(after / before, [0, 50, 100])
            axes.plot([here + aside] * 2, [low, high], color=line["color"], linewidth=1.2)
            axes.plot(here + aside, middle, marker=line["marker"], color=line["color"])
    axes.axhline(1, color="0.4", linewidth=0.8)
    axes.set(title="Each request's latency over its own", ylabel=f"ratio to {names[0]} [x]")
    axes.annotate("line: least to greatest, mark: median", (0.02, 0.97), xycoords="axes fraction", va="top", fontsize=7)


def _label(pool: dict[str, object]) -> str:
    """The pool, and the choices below it."""
    return str(pool["pool_blocks"]) + (f"\n{escaped(str(pool['choices']))}" if pool["choices"] else "")


def _name_points(axes: Axes, labels: Sequence[str], upright: bool) -> None:
    axes.set_xticks(range(len(labels)), labels, multialignment="right" if upright else "center")
    axes.tick_params(axis="x", labelsize=6 if upright else 8, rotation=90 if upright else 0)
    axes.set_xlim(-0.4, len(labels) - 0.6)
    axes.set_xlabel("pool [blocks]" + (" and choices" if any(not label.isdecimal() for label in labels) else ""))
