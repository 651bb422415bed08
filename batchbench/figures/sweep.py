"""Figures of what a sweep's points cost: over the pool's size, and side by side."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from batchbench.figures.style import DARK, LIGHT, LINES, MID, choice_name, pool_axis, records, title
from batchbench.results import Result
from batchbench.units import show_blocks, show_digits

_COMPARED = (
    ("occupancy", "Occupancy", "share of slots that forwarded a row", 1),
    ("preemptions_per_request", "Evictions", "evictions per request", 1),
    ("recompute_fraction", "Recompute", "share of forward positions [%]", 100),
    ("mean_latency_iterations", "Latency", "mean of all requests [iterations]", 1),
)


def pool_sweep(result: Result) -> Figure:
    """Occupancy, evictions, recompute and latency penalty against the pool's size."""
    pools = result.tables["pools"].sort_values("pool_blocks")
    figure = Figure(figsize=(8.6, 6.2), layout="constrained")
    ((top_left, top_right), (low_left, low_right)) = figure.subplots(2, 2, sharex=True)
    x = pools["pool_blocks"].to_numpy()

    ceiling = pools["issued_tokens"] / (pools["slots"] * pools["floor_iterations"])
    top_left.plot(x, ceiling, "k--", linewidth=0.9, label="no schedule can exceed")
    top_left.plot(x, pools["occupancy"], "o-", color=DARK, label="measured")
    top_left.set(title="Occupancy", ylabel="share of slots that forwarded a row", ylim=(0, 1.05))
    top_left.legend(loc="best")
    top_right.plot(x, pools["preemptions_per_request"], "s-", color=DARK, clip_on=False)
    top_right.set(title="Evictions", ylabel="evictions per request", ylim=(0, None))

    low_left.plot(x, 100 * pools["recompute_tax"], "^:", color=MID, clip_on=False, label="recompute_tax")
    low_left.plot(x, 100 * pools["recompute_fraction"], "o-", color=DARK, clip_on=False, label="recompute_fraction")
    low_left.set(title="Recompute", ylabel="share of forward positions [%]", ylim=(0, None))
    _mark_non_monotone(low_left, pools)
    low_left.legend(loc="best")

    paired = {"markersize": 10, "markerfacecolor": "none", "label": "victims / themselves in the reference pool"}
    if pools["paired_latency_penalty"].notna().any():
        low_right.plot(x, pools["paired_latency_penalty"], "^:", color="0.2", **paired)
    low_right.plot(x, pools["preemption_latency_penalty"], "o-", color=DARK, label="victims / the never evicted")
    low_right.axhline(1, color="0.4", linewidth=0.8)
    low_right.set(title="Latency of the evicted", ylabel="latency ratio, in iterations [x]")
    if pools["preemption_latency_penalty"].notna().any() or pools["paired_latency_penalty"].notna().any():
        low_right.set_ylim(0, None)
    low_right.legend(loc="best")
    for axes in (top_right, low_left):
        if axes.dataLim.ymax <= 0:
            axes.set_ylim(0, 1)  # a flat zero is not magnified
    for axes in (low_left, low_right):
        axes.set_xlabel("pool [blocks]")
        pool_axis(axes, x)
    figure.suptitle(f"{title(result)}: what a smaller pool costs{_proof(pools, 'pool')}")
    return figure


def pool_sweep_by_choice(result: Result) -> Figure:
    """The same against the pool's size, a line for each of the other choices."""
    pools = result.tables["pools"].sort_values("pool_blocks")
    figure = Figure(figsize=(8.6, 6.6), layout="constrained")
    grid = figure.subplots(2, 2, sharex=True)
    for axes, (column, name, unit, scale) in zip(grid.flat, _COMPARED, strict=True):
        for label, line in zip(result.tables["pools"]["choices"].unique(), LINES, strict=False):
            mine = pools[pools["choices"] == label]
            axes.plot(mine["pool_blocks"], scale * mine[column], clip_on=False, label=choice_name(label), **line)
        axes.set(title=name, ylabel=unit, ylim=(0, None))
        if axes.dataLim.ymax <= 0:
            axes.set_ylim(0, 1)
    sizes = np.unique(pools["pool_blocks"].to_numpy())
    for axes in grid[1]:
        axes.set_xlabel("pool [blocks]")
        pool_axis(axes, sizes)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=1 if max(map(len, labels)) > 45 else 2)
    figure.suptitle(f"{title(result)}: what a smaller pool costs under each choice{_proof(pools, 'point')}")
    return figure


def compare_choices(result: Result) -> Figure:
    """The figures of every point side by side, a bar each."""
    pools = result.tables["pools"]
    several = pools["pool_blocks"].nunique() > 1
    labels = [
        choice_name(point.choices) + (f"  ·  {show_blocks(point.pool_blocks)}" if several else "")
        for point in records(pools)
    ]
    y, room = np.arange(len(labels)), 0.27 if len(labels) <= 60 else 0.17  # inches a bar
    figure = Figure(figsize=(9.5 + 0.075 * max(map(len, labels)), 1.4 + room * len(labels)), layout="constrained")
    compared = [*_COMPARED]
    if pools["engine_s"].notna().any():
        kind = "modelled" if set(pools["clock"]) == {"virtual"} else "measured"
        compared.append(("engine_s", "Time", f"of all iterations, {kind} [s]", 1))
    for axes, (column, name, unit, scale) in zip(figure.subplots(1, len(compared), sharey=True), compared, strict=True):
        values = scale * pools[column].to_numpy(dtype=float)
        bars = axes.barh(y, np.nan_to_num(values), color=LIGHT, edgecolor="0.2", height=0.7)
        axes.bar_label(bars, ["-" if np.isnan(v) else show_digits(v) for v in values], fontsize=7, padding=2)
        axes.set_title(name)
        axes.set_xlabel(unit.replace(" that ", "\nthat ").replace(" [", "\n["))
        axes.set_xlim(0, 1.25 * max(np.nanmax(values, initial=0), 1e-9))
        axes.grid(axis="y", visible=False)
        axes.set_yticks(y, labels, fontsize=8 if room > 0.2 else 6)
        axes.set_ylim(len(labels) - 0.4, -0.6)
    only = "" if several else f", pool of {show_blocks(int(pools['pool_blocks'].iloc[0]))}"
    figure.suptitle(f"{title(result)}: the choices side by side{only}{_proof(pools, 'point')}")
    return figure


def _proof(pools: pd.DataFrame, each: str) -> str:
    """A schedule computes no text, so it proves nothing; nor does one point."""
    computed = len(pools) > 1 and pools["text_digest"].notna().all()
    return f"; every {each} produced the same text" if computed else ""


def _mark_non_monotone(axes: Axes, pools: pd.DataFrame) -> None:
    """Ring a pool that evicts more than the next larger one, yet recomputes a smaller share."""
    rows = records(pools)
    for smaller, larger in pairwise(rows):
        if smaller.preemptions > larger.preemptions and smaller.recompute_fraction < larger.recompute_fraction:
            axes.set_title(
                f"Recompute ({smaller.pool_blocks} blocks evict more than {larger.pool_blocks}, yet recompute less:\n"
                f"{smaller.recomputed_tokens_per_preemption:.1f} against "
                f"{larger.recomputed_tokens_per_preemption:.1f} positions per eviction)",
                fontsize=8.5,
            )
            ringed = (smaller.pool_blocks, 100 * smaller.recompute_fraction)
            axes.plot(*ringed, "o", markersize=15, markerfacecolor="none", color="0.2", clip_on=False)
            return
