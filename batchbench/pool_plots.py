"""The figure of the KV pool over time: blocks in use, and who runs and who waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from batchbench.bands import Values
from batchbench.plot_style import ALERT, DARK, MID, count_axis, draw_state, lowest, panel_title, panels, title
from batchbench.results import Result

_POOL = {"color": DARK, "hatch": "", "linestyle": "-"}
_RUNNING = {"color": DARK, "hatch": "", "linestyle": "-"}
_WAITING = {"color": MID, "hatch": "////", "linestyle": "--"}
_COLUMNS = ["iteration", "free_blocks", "running", "waiting", "step_s"]


def says_pool_use(result: Result) -> bool:
    """Whether any point's engine reports its blocks."""
    return bool(result.tables["pools"]["peak_used_blocks"].notna().any())


def pool_use(result: Result) -> Figure:
    """A cell per point: blocks in use, and below it the requests that run and wait, as each iteration left them."""
    pools = result.tables["pools"]
    figure, cells = panels(len(pools), 3.2, (1.5, 1))
    pixels = int(figure.get_figwidth() / min(len(pools), 3) * 110)
    seconds = in_seconds(result)
    ends, banded = [], False
    for (above, below), point in zip(cells, pools["point"], strict=True):
        end, summarised = _cell(above, below, result, point, pixels, seconds)
        ends, banded = [*ends, end], banded or summarised
    cells[0, 0].set_xlim(0, 1.01 * max(ends))
    count_axis(cells[0, 0].xaxis)
    for axes in lowest(cells):
        axes.set_xlabel("time [s]" if seconds else "iteration")
    handles = [
        Line2D([], [], color=ALERT, linestyle=":", label="the whole pool"),
        *(
            Line2D([], [], color=look["color"], linestyle=look["linestyle"], label=label)
            for look, label in ((_POOL, "blocks in use; running"), (_WAITING, "waiting"))
        ),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    note = "\nmore iterations than pixels: band: least to greatest, line: mean" if banded else ""
    figure.suptitle(f"{title(result)}: the pool over time, as each iteration left it{note}")
    return figure


def in_seconds(result: Result) -> bool:
    """Whether the scenario's clock is one of seconds, at every point."""
    return bool(result.tables["pools"]["clock"].isin(["virtual", "wall"]).all())


def _cell(above: Axes, below: Axes, result: Result, point: int, pixels: int, seconds: bool) -> tuple[float, bool]:
    """Returns where its time ends, and whether it was drawn in bands."""
    frame = result.point("iterations", point, _COLUMNS)
    blocks = int(result.tables["pools"]["pool_blocks"].iloc[point])
    panel_title(above, result, point)
    above.axhline(blocks, color=ALERT, linestyle=":", linewidth=1)
    above.set(ylabel="blocks in use", ylim=(0, 1.08 * blocks))
    below.set_ylabel("requests")
    iteration = frame["iteration"].to_numpy()
    start: Values = begin_s(result, point, frame) if seconds else iteration
    end = float(start[-1] + (frame["step_s"].iloc[-1] if seconds else 1))
    banded = False
    for axes, values, look in (
        (above, blocks - frame["free_blocks"], _POOL),
        (below, frame["running"], _RUNNING),
        (below, frame["waiting"], _WAITING),
    ):
        if values.isna().any():
            axes.text(0.5, 0.4, "not reported", ha="center", transform=axes.transAxes)
        else:
            banded |= draw_state(axes, start, values.to_numpy(dtype=np.int64), end, pixels, look)
    _count_scale(below, frame)
    return end, banded


def _count_scale(axes: Axes, frame: pd.DataFrame) -> None:
    """A queue of thousands must not flatten the few that run."""
    most = {name: np.nan_to_num(frame[name].max()) for name in ("running", "waiting")}
    if most["waiting"] > 12 * most["running"] > 0:
        axes.set_yscale("symlog", linthresh=10)
        axes.set_ylabel("requests\n(log above 10)")
    axes.set_ylim(0, 1.15 * max(*most.values(), 1))


def begin_s(result: Result, point: int, frame: pd.DataFrame) -> Values:
    """When each iteration began. The tables have durations: what lies between two is told by who arrived or finished.

    frame: the point's iterations. Exact where someone finished and after a time without work, never too late.
    """
    columns: list[str] = ["arrival_iteration", "finished_iteration", "arrival_s", "latency_s"]
    requests = result.point("requests", point, columns)
    step = frame["step_s"].to_numpy(dtype=np.float64)
    worked = np.append(0.0, np.cumsum(step)[:-1])  # before each iteration
    idle = np.zeros(len(frame))
    arrival, end = requests["arrival_s"].to_numpy(), (requests["arrival_s"] + requests["latency_s"]).to_numpy()
    iterations: Any = frame["iteration"].to_numpy()
    for at, known_s, spent in (
        (requests["arrival_iteration"], arrival, worked),
        (requests["finished_iteration"], end, worked + step),
    ):
        place = np.minimum(np.searchsorted(iterations, at.to_numpy()), len(frame) - 1)
        np.maximum.at(idle, place, known_s - spent[place])
    begin: Values = worked + np.maximum.accumulate(idle)
    return begin
