"""The figure of rows against positions: what an iteration costs is not told by how many rows it has."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from batchbench.figures.style import LIGHT, MID, point_name, records, thousands, title
from batchbench.results import Result
from batchbench.sheets import escaped
from batchbench.units import show_blocks

_LONGEST = 64  # characters of a choice under a bar


def rows_against_positions(result: Result, point: int) -> Figure:
    """Counted in rows and in positions: one iteration of one point, then every point's whole run."""
    pools = result.tables["pools"]
    varied = pools["choices"].nunique() > 1
    if not varied:
        pools = pools.sort_values("pool_blocks")  # as every axis of pools
    labels = [f"{_short(one.choices)}: {one.pool_blocks}" if one.choices else str(one.pool_blocks)
              for one in records(pools)]  # fmt: skip
    at = range(len(labels))
    axis = "" if varied else "pool [blocks]"
    label = {"fontsize": 8, "rotation": 90 if len(labels) > 8 else 0, "padding": 2}
    height = 3.9 + (0.065 * max(map(len, labels)) if varied else 0)  # they stand upright
    figure = Figure(figsize=(max(10.5, 4 + 0.42 * len(labels)), height), layout="constrained")
    one, rows, positions = figure.subplots(1, 3, width_ratios=(0.7, 1, 1))
    _one_iteration(one, result, point)

    bars = rows.bar(at, pools["issued_tokens"], color=LIGHT, edgecolor="0.2")
    rows.bar_label(bars, [f"{total:,}" for total in pools["issued_tokens"]], **label)
    rows.set(title="whole runs, counted in rows", xlabel=axis, ylabel="rows")
    rebuilt = pools["rebuilt_tokens"]
    if rebuilt.isna().any():  # unreported is not zero: no split
        bars = positions.bar(at, pools["forward_tokens"], color=LIGHT, edgecolor="0.2")
        positions.bar_label(bars, [f"{total:,}" for total in pools["forward_tokens"]], **label)
    else:
        first_time = pools["forward_tokens"] - rebuilt
        positions.bar(at, first_time, color=LIGHT, edgecolor="0.2", label="for the first time")
        bars = positions.bar(at, rebuilt, bottom=first_time, color=MID, edgecolor="0.1", hatch="////",
                             label="K/V that had existed")  # fmt: skip
        positions.bar_label(bars, labels=[f"{total:,}" for total in pools["forward_tokens"]], **label)
        positions.legend(loc="upper left", fontsize=8)
    positions.set(title="the same, counted in positions", xlabel=axis, ylabel="positions")
    for axes in (rows, positions):
        axes.set_ylim(0, 1.35 * pools["forward_tokens"].max())
        axes.grid(axis="x", visible=False)
        axes.yaxis.set_major_formatter(FuncFormatter(thousands))
        axes.set_xticks(at, labels)
        axes.tick_params(axis="x", rotation=90 if varied or len(labels) > 12 else 0)
    figure.suptitle(f"{title(result)}: rows against positions")
    return figure


def _short(choices: str) -> str:
    text = escaped(choices)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _one_iteration(axes: Axes, result: Result, point: int) -> None:
    """The iteration that recomputed most beside decoding rows, counted both ways."""
    columns = ["iteration", "issued_tokens", "prefill_rows", "recomputed_tokens", "forward_tokens"]
    iterations = result.point("iterations", point, columns)
    recomputing = iterations[iterations["recomputed_tokens"] > 0]
    if not len(recomputing):
        note = f"{point_name(result, point)}:\nno iteration is known\nto have recomputed"
        axes.text(0.5, 0.5, note, ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    beside = recomputing[recomputing["issued_tokens"] > recomputing["prefill_rows"]]
    chosen = (beside if len(beside) else recomputing).sort_values("recomputed_tokens", kind="stable", ascending=False)
    chosen = records(chosen.head(1))[0]
    prefills = result.point("prefills", point, ["iteration", "resumed"])
    resumed = int(prefills[prefills["iteration"] == chosen.iteration]["resumed"].sum())
    resume = np.array([resumed, chosen.recomputed_tokens])
    other = np.array([chosen.issued_tokens, chosen.forward_tokens]) - resume
    names = ["rows", "positions"]
    for values, bottom, colour, hatch, label in (
        (other, 0, LIGHT, "", "other rows"),
        (resume, other, MID, "////", "resumed rows"),
    ):
        bars = axes.bar(names, values, bottom=bottom, color=colour, hatch=hatch, edgecolor="0.1", label=label)
    # Above the bars: a count of three beside one of a hundred leaves no room inside.
    axes.bar_label(bars, [f"{other[n]:,.0f} + {resume[n]:,.0f}" for n in range(2)], fontsize=8, padding=2)
    axes.set(
        title=f"iteration {chosen.iteration}, {show_blocks(int(result.tables['pools']['pool_blocks'].iloc[point]))}",
        ylabel="count",
    )
    axes.set_ylim(0, 1.3 * (other + resume).max())
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper left", fontsize=8)
