"""The figure of a comparison: what each result costs over the points, and every request's latency over its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from batchbench.comparing import Comparison
from batchbench.errors import BatchbenchError, UsageError
from batchbench.figures.style import LINES, STYLE
from batchbench.results import Result

_COMPARED = (
    ("recompute_fraction", "Recompute", "share of forward positions [%]", 100),
    ("preemptions_per_request", "Evictions", "evictions per request", 1),
    ("mean_latency_iterations", "Latency", "mean of all requests [iterations]", 1),
)


def save_comparison(results: Sequence[Result], names: Sequence[str], found: Sequence[Comparison], path: Path) -> None:
    """Write it in the format of the path's ending. Raises UsageError for one that is none."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"figure {path}: must end in .png, .svg or .pdf")
    if len(results) > len(LINES):
        raise UsageError(f"figure {path}: {len(results)} results are too many to tell apart; {len(LINES)} at most")
    if not any(one.points for one in found):
        raise UsageError(f"figure {path}: the results have no point in common")
    with mpl.rc_context(STYLE):
        figure = comparison(results, names, found)
        try:
            figure.savefig(path, metadata={"Software": None} if path.suffix == ".png" else None)
        except OSError as error:
            raise BatchbenchError(f"figure {path}: {error.strerror or error}") from None


def comparison(results: Sequence[Result], names: Sequence[str], found: Sequence[Comparison]) -> Figure:
    """Three metrics and the latency ratios, a line for each result, points in the order of the first result."""
    labels = [_label(row) for row in results[0].rows("pools")]
    figure = Figure(figsize=(10.5, 7.2), layout="constrained")
    grid = figure.subplots(2, 2).flat
    for axes, (column, title, unit, scale) in zip(grid, _COMPARED, strict=False):
        for result, name, line in zip(results, names, LINES, strict=False):
            values = {_label(row): row[column] for row in result.rows("pools")}
            heights = [np.nan if values.get(label) is None else scale * values[label] for label in labels]
            axes.plot(range(len(labels)), heights, label=name, clip_on=False, **line)
        axes.set(title=title, ylabel=unit, ylim=(0, None))
        if axes.dataLim.ymax <= 0:
            axes.set_ylim(0, 1)
        _name_points(axes, labels)
    _ratios(grid[-1], results, names, found, labels)
    if hidden := sum(len(one.only_other) for one in found):
        figure.supxlabel(f"{hidden} points that {names[0]} does not have are not drawn", fontsize=7)
    handles, shown = grid[0].get_legend_handles_labels()
    figure.legend(handles, shown, loc="outside lower center", ncols=min(3, len(shown)))
    figure.suptitle(f"{results[0].run['scenario']['name']}: {' and '.join(names[1:])} against {names[0]}")
    return figure


def _ratios(
    axes: Axes, results: Sequence[Result], names: Sequence[str], found: Sequence[Comparison], labels: Sequence[str]
) -> None:
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
    _name_points(axes, labels)


def _label(pool: dict[str, object]) -> str:
    return f"{pool['pool_blocks']}" + (f"\n{pool['choices']}" if pool["choices"] else "")


def _name_points(axes: Axes, labels: Sequence[str]) -> None:
    crowded = max(map(len, labels)) > 12 or len(labels) > 10
    axes.set_xticks(range(len(labels)), [label.replace("\n", " ") for label in labels] if crowded else labels)
    axes.tick_params(axis="x", labelsize=6 if crowded else 8, rotation=90 if crowded else 0)
    axes.set_xlim(-0.4, len(labels) - 0.6)
    if not crowded:
        axes.set_xlabel("pool [blocks]")
