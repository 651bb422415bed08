"""Figures of what callers see: how long they wait, and what evictions add to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from batchbench.figures.pool_use import in_seconds
from batchbench.figures.style import ALERT, DARK, LIGHT, MID, choice_name, pool_axis, records, thousands, title
from batchbench.results import Result
from batchbench.units import show_blocks, show_digits

_METRICS = {
    "ttft": "To the first token",
    "tpot": "Per token after the first",
    "itl": "Between two tokens",
    "e2e": "From arrival to last token",
}
_LIMIT = "#D55E00"  # thick and without markers, so that it is told apart in grey too
_OBJECTIVES = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s"}
_MARKS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("p50", {"marker": "o", "markersize": 10, "linestyle": "-", "color": DARK}),
    ("p90", {"marker": "s", "markersize": 8, "linestyle": "--", "color": MID}),
    ("p99", {"marker": "^", "markersize": 6, "linestyle": "-.", "color": "0.2"}),
    ("max", {"marker": "x", "markersize": 5, "linestyle": ":", "color": ALERT}),
)
_ADDED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("queued", "waiting for the first admission", {"facecolor": LIGHT, "hatch": ""}),
    ("returning", "waiting to return", {"facecolor": MID, "hatch": "////"}),
    ("rebuilding", "computing its context again", {"facecolor": DARK, "hatch": ""}),
    ("decoding", "decoding slower", {"facecolor": "white", "hatch": "...."}),
)


def service(result: Result) -> Figure:
    """Percentiles of each waiting time: over the pool's size, or, of several choices, a range per point."""
    objectives = _objectives(result)
    unit = "s" if in_seconds(result) or objectives else "iterations"
    rows = result.tables["service"]
    if not (rows["unit"] == unit).any():
        unit = "iterations"
    rows = rows[(rows["unit"] == unit) & (rows["count"] > 0)]
    shown = [m for m in _METRICS if (rows["metric"] == m).any() and (m != "tpot" or m in objectives)]
    over_pools = result.tables["pools"]["choices"].nunique() == 1
    figure = (_over_pools if over_pools else _side_by_side)(result, rows, shown)
    for axes, metric in zip(figure.axes, shown, strict=True):
        axes.set_title(_METRICS[metric])
        values = axes.yaxis if over_pools else axes.xaxis
        _log_axis(axes, values, "y" if over_pools else "x", unit)
        if unit == "s" and metric in objectives:
            draw = axes.axhline if over_pools else axes.axvline
            draw(objectives[metric], color=_LIMIT, linewidth=2.2, label="objective of [slo]")
    labels: dict[str, Any] = {}
    for axes in figure.axes:
        labels |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=6)
    kept = _kept_by_pool(result) if over_pools else ""
    figure.suptitle(f"{title(result)}: how long callers wait; percentiles of all requests, and of all gaps{kept}")
    return figure


def _objectives(result: Result) -> dict[str, float]:
    """Metric -> the limit that the run's scenario sets."""
    declared = result.run["scenario"].get("slo")
    found = declared if isinstance(declared, dict) else {}
    limits = {metric: found.get(key) for metric, key in _OBJECTIVES.items()}
    return {metric: limit for metric, limit in limits.items() if isinstance(limit, int | float) and limit > 0}


def _kept(pool: Any) -> str:
    """The share of requests that kept every objective, where there are any."""
    return "" if pd.isna(pool.goodput_fraction) else f"{100 * pool.goodput_fraction:.3g}%"


def _kept_by_pool(result: Result) -> str:
    pools = records(result.tables["pools"].sort_values("pool_blocks"))
    shares = [f"{pool.pool_blocks}: {_kept(pool)}" for pool in pools if _kept(pool)]
    more = f" and {len(shares) - 8} pools more" if len(shares) > 8 else ""
    return f"\nrequests within every objective of [slo], by pool: {', '.join(shares[:8])}{more}" if shares else ""


def _over_pools(result: Result, rows: pd.DataFrame, shown: list[str]) -> Figure:
    pools = result.tables["pools"].sort_values("pool_blocks")
    figure = Figure(figsize=(max(9.9, 3.2 * len(shown)), 4.2), layout="constrained")
    for axes, metric in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        mine = rows[rows["metric"] == metric].sort_values("pool_blocks")
        for column, look in _MARKS:
            axes.plot(mine["pool_blocks"], mine[column], markerfacecolor="none", label=column, **look)
        pool_axis(axes, pools["pool_blocks"].to_numpy())
        axes.set_xlabel("pool [blocks]")
    return figure


def _side_by_side(result: Result, rows: pd.DataFrame, shown: list[str]) -> Figure:
    pools = result.tables["pools"]
    labels = [
        f"{choice_name(pool.choices)}  ·  {show_blocks(pool.pool_blocks)}"
        + (f"  ·  [slo] {_kept(pool)}" if _kept(pool) else "")
        for pool in records(pools)
    ]
    room = 0.27 if len(labels) <= 60 else 0.17
    figure = Figure(
        figsize=(3.0 * len(shown) + 0.075 * max(map(len, labels)), 1.8 + room * len(labels)), layout="constrained"
    )
    for axes, metric in zip(figure.subplots(1, len(shown), squeeze=False, sharey=True)[0], shown, strict=True):
        mine = rows[rows["metric"] == metric]
        axes.hlines(mine["point"], mine["p50"], mine["max"], color="0.6", linewidth=1)
        for column, look in _MARKS:
            style = look | {"linestyle": ""}
            axes.plot(mine[column], mine["point"], markerfacecolor="none", label=column, **style)
        axes.set_yticks(range(len(labels)), labels, fontsize=8 if room > 0.2 else 6)
        axes.set_ylim(len(labels) - 0.4, -0.6)
    return figure


def _log_axis(axes: Axes, axis: Any, name: str, unit: str) -> None:
    """Logarithmic, with plain numbers, and enough of them."""
    values = axes.dataLim.intervaly if name == "y" else axes.dataLim.intervalx
    low, high = float(values[0]), float(values[1])
    if low > 0:
        (axes.set_yscale if name == "y" else axes.set_xscale)("log")
        (axes.set_ylim if name == "y" else axes.set_xlim)(low / 1.6, high * 1.6)
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
        axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(thousands))
    (axes.set_ylabel if name == "y" else axes.set_xlabel)(f"[{unit}]")


def says_victims(result: Result) -> bool:
    """Whether it is known of any point what its victims lost."""
    return bool(result.tables["pools"]["victims_extra_iterations"].notna().any())


def victims(result: Result) -> Figure:
    """What the victims' latency has beyond that in the reference pool: a stacked bar per point, losses to the right."""
    pools = result.tables["pools"]
    several = pools["choices"].nunique() > 1
    labels = [
        (f"{choice_name(pool.choices)}  ·  " if several else "") + show_blocks(pool.pool_blocks)
        for pool in records(pools)
    ]
    room, y = 0.3 if len(labels) <= 60 else 0.18, np.arange(len(labels))
    width = 9.9 + 0.06 * max(map(len, labels))
    figure = Figure(figsize=(width, 1.9 + room * len(labels)), layout="constrained")
    axes = figure.subplots()
    right, left = np.zeros(len(labels)), np.zeros(len(labels))
    for part, label, look in _ADDED:
        value = np.nan_to_num(pools[f"victims_{part}_iterations"].to_numpy(dtype=float))
        drawn = np.where(value == 0, np.nan, value)
        axes.barh(y, drawn, left=np.where(value < 0, left, right), height=0.66, edgecolor="0.1", linewidth=0.6,
                  label=label, **look)  # fmt: skip
        right, left = right + np.maximum(value, 0), left + np.minimum(value, 0)
    extra = pools["victims_extra_iterations"].to_numpy(dtype=float)
    axes.plot(extra, y, "D", color=ALERT, markerfacecolor="white", markersize=5, clip_on=False, label="all together")
    _say_extra(axes, pools, extra, right)
    span = max(right.max() - left.min(), 1e-9)
    axes.set_xlim(left.min() - 0.03 * span if left.min() < 0 else 0, right.max() + 0.22 * span)
    axes.axvline(0, color="0.2", linewidth=0.8)
    axes.set_yticks(y, labels, fontsize=8 if room > 0.2 else 6)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("mean over the victims of a point [iterations]; left of 0: less than in the reference pool")
    handles: list[Any] = [Patch(edgecolor="0.1", label=label, **look) for _, label, look in _ADDED]
    figure.legend(handles=[*handles, *axes.lines[:1]], loc="outside lower center", ncols=5)
    figure.suptitle(f"{title(result)}: what the evicted requests' extra latency is made of")
    return figure


def _say_extra(axes: Axes, pools: pd.DataFrame, extra: Any, right: Any) -> None:
    """The sum beside each bar, or why there is none."""
    for n, pool in enumerate(records(pools)):
        if not np.isnan(extra[n]):
            text = show_digits(extra[n], "+")
        elif pool.preemptions == 0:
            text = "nobody was evicted"
        elif pd.isna(pool.reference_pool_blocks):
            text = "no reference pool"
        else:
            text = "not reported"
        axes.annotate(text, (right[n], n), xytext=(7, 0), textcoords="offset points", va="center", fontsize=8)
