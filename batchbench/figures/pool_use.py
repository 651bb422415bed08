"""The figure of the KV pool over time: blocks in use, and who runs and who waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from batchbench.clocks import NS
from batchbench.figures.bands import Values
from batchbench.figures.style import ALERT, DARK, MID, count_axis, draw_state, finish, panels, title
from batchbench.instants import begin_ns
from batchbench.results import Result

_LOOKS: tuple[dict[str, Any], ...] = (
    {"color": DARK, "hatch": "", "linestyle": "-"},
    {"color": DARK, "hatch": "", "linestyle": "-"},
    {"color": MID, "hatch": "", "linestyle": "-"},
)
_COLUMNS = ["iteration", "free_blocks", "running", "waiting", "step_s"]


def says_pool_use(result: Result) -> bool:
    """Whether any point's engine reports its blocks."""
    return bool(result.tables["pools"]["peak_used_blocks"].notna().any())


def pool_use(result: Result) -> Figure:
    """A cell per point: blocks in use, and below them who runs and who waits, as each iteration left them."""
    pools = result.tables["pools"]
    figure, cells = panels(result, 3.2, (1.8, 1, 1))
    pixels = int(110 * figure.get_figwidth() / min(len(pools), 3))
    seconds = in_seconds(result)
    ends: list[float] = []
    banded = False
    for cell, point in zip(cells, pools["point"], strict=True):
        end, summarised = _cell(cell, result, point, pixels, seconds)
        ends, banded = [*ends, end], banded or summarised
    note = "\nwhere there are more iterations than pixels, band: least to greatest, line: mean" if banded else ""
    about = f"{title(result)}: the pool (dotted: all of it) over time, as each iteration left it{note}"
    finish(figure, cells, 1.01 * max(ends), "time [s]" if seconds else "iteration", about)
    return figure


def in_seconds(result: Result) -> bool:
    """Whether the scenario's clock is one of seconds, at every point."""
    return bool(result.tables["pools"]["clock"].isin(["virtual", "wall"]).all())


def _cell(cell: Any, result: Result, point: int, pixels: int, seconds: bool) -> tuple[float, bool]:
    """Returns where its time ends, and whether it was drawn in bands."""
    frame = result.point("iterations", point, _COLUMNS)
    blocks = int(result.tables["pools"]["pool_blocks"].iloc[point])
    cell[0].axhline(blocks, color=ALERT, linestyle=":", linewidth=1)
    start: Values = begin_s(result, point, frame) if seconds else frame["iteration"].to_numpy()
    end = float(start[-1] + (frame["step_s"].iloc[-1] if seconds else 1))
    banded = False
    states = {"blocks in use": blocks - frame["free_blocks"], "running": frame["running"], "waiting": frame["waiting"]}
    for axes, (name, values), look, ticks in zip(cell, states.items(), _LOOKS, (6, 3, 3), strict=True):
        axes.set_ylabel(name)
        if values.isna().any():
            axes.text(0.5, 0.4, "not reported", ha="center", transform=axes.transAxes)
            continue
        banded |= draw_state(axes, start, values.to_numpy(dtype=np.int64), end, pixels, look)
        axes.set_ylim(0, 1.12 * max(values.max(), 1 if axes is not cell[0] else blocks))
        count_axis(axes.yaxis, ticks)
    return end, banded


def begin_s(result: Result, point: int, frame: pd.DataFrame) -> Values:
    """When each iteration began. frame: the point's iterations."""
    return begin_ns(result, point, frame) / NS
