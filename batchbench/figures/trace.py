"""The figure of a trace: arrivals and KV demand over time, and how long prompts and outputs are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from batchbench.errors import BatchbenchError
from batchbench.figures.style import ALERT, DARK, LIGHT, MID, STYLE, thousands
from batchbench.trace_stats import Demand, Ints, TraceFacts, demand_bins

_ARRIVAL_BINS, _DEMAND_BINS = 120, 160
_MARKS = ((0.5, "o", "p50"), (0.95, "s", "p95"), (0.99, "^", "p99"))


def save_trace(path: Path, name: str, facts: TraceFacts, demand: Demand | None, block_size: int) -> None:
    """Draw it as PNG; without times the lengths alone. Raises BatchbenchError if it cannot be written."""
    with mpl.rc_context(STYLE):
        figure = _figure(name, facts, demand, block_size)
        try:
            figure.savefig(path, format="png", metadata={"Software": None})
        except OSError as error:
            raise BatchbenchError(f"figure {path}: {error.strerror or error}") from None


def _figure(name: str, facts: TraceFacts, demand: Demand | None, block_size: int) -> Figure:
    timed = facts.arrival_ns is not None and demand is not None
    figure = Figure(figsize=(9.6, 6.4) if timed else (9.6, 3.6), layout="constrained")
    grid = figure.subplots(2 if timed else 1, 2, squeeze=False)
    if facts.arrival_ns is not None and demand is not None:
        _arrivals(grid[0, 0], facts.arrival_ns, float(demand.time_s[-1]))
        _demand(grid[0, 1], demand, block_size)
    _lengths(grid[-1, 0], "Prompts", facts.prompt, facts.prompt_unit)
    if facts.output_unit is not None:
        _lengths(grid[-1, 1], "Outputs", facts.output, facts.output_unit)
    else:
        grid[-1, 1].set_axis_off()
        grid[-1, 1].text(0.5, 0.5, "the trace says nothing of outputs", ha="center", transform=grid[-1, 1].transAxes)
    short = name if len(name) <= 70 else name[:67] + "..."
    figure.suptitle(f"{short}: {facts.rows} requests")
    return figure


def _arrivals(axes: Axes, arrival_ns: Ints, until_s: float) -> None:
    """Rates in equal stretches, over the same time as the demand beside them."""
    counts, edges = np.histogram(arrival_ns / 1e9, _ARRIVAL_BINS, (0.0, until_s))
    width_s = edges[1] - edges[0]
    axes.stairs(counts / width_s, edges, fill=True, color=LIGHT)
    axes.stairs(counts / width_s, edges, color=DARK, linewidth=1)
    axes.set(title=f"Arrivals, in stretches of {width_s:.3g} s", xlabel="time [s]", ylabel="requests per second")
    axes.set(xlim=(0, until_s), ylim=(0, None))


def _demand(axes: Axes, demand: Demand, block_size: int) -> None:
    bins = demand_bins(demand, _DEMAND_BINS)
    low, high = (np.append(side, side[-1]) for side in (bins.low, bins.high))
    band: dict[str, Any] = {"step": "post", "color": MID, "alpha": 0.55, "linewidth": 0, "label": "least to greatest"}
    axes.fill_between(bins.edges_s, low, high, **band)
    axes.stairs(bins.mean, bins.edges_s, color=ALERT, linewidth=1, baseline=None, label="mean")
    axes.set(xlabel="time [s]", ylabel="KV [positions]", xlim=(0, bins.edges_s[-1]))
    axes.set_ylim(0, 1.25 * float(bins.high.max()))  # room for the legend
    axes.set_title(f"KV demand if nobody waited, at {demand.seconds_per_token:g} s per token")
    axes.yaxis.set_major_formatter(FuncFormatter(thousands))
    scale: Any = (lambda held: held / block_size, lambda held: held * block_size)
    blocks = axes.secondary_yaxis("right", functions=scale)
    blocks.set_ylabel(f"full blocks of {block_size}")
    blocks.yaxis.set_major_formatter(FuncFormatter(thousands))
    axes.legend(loc="upper right", ncols=2, fontsize=8)


def _lengths(axes: Axes, title: str, lengths: Ints, unit: str) -> None:
    """Which share of the rows is at most so long."""
    values, counts = np.unique(lengths, return_counts=True)
    share = np.cumsum(counts) / len(lengths)
    axes.step(np.append(values[0], values), np.append(0.0, share), where="post", color=DARK, linewidth=1.5)
    for rank, marker, label in _MARKS:
        at = values[np.searchsorted(share, rank - 1e-12)]
        axes.plot(at, rank, marker, color=ALERT, markersize=6, markerfacecolor="white", label=f"{label}: {at:,}")
    axes.set_xscale("log")
    if values[0] == values[-1]:
        axes.set_xlim(values[0] / 2, values[0] * 2)
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 500 * low else (1,)))
    axes.xaxis.set_major_formatter(FuncFormatter(thousands))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set(title=f"{title}: mean {lengths.mean():,.0f}, longest {values[-1]:,} {unit}", ylim=(0, 1.02))
    axes.set(xlabel=f"length [{unit}]", ylabel="share of rows at most so long")
    axes.legend(loc="upper left", fontsize=8)
