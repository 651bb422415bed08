"""The figure of requests from arrival to last token: each of a few, or stretches of many."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from batchbench.figures.bands import bin_edges, medians, sums
from batchbench.figures.marks import say
from batchbench.figures.style import (
    ALERT,
    DARK,
    LIGHT,
    MID,
    bars,
    finish,
    panels,
    thousands,
    title,
)
from batchbench.results import Result
from batchbench.sheets import escaped
from batchbench.stays import stays_of

NAMED_REQUESTS = 24  # more labels than these would overprint each other
DRAWN_REQUESTS = 250  # more rows than these would be thinner than a pixel or two
_MARKED_EVICTIONS = 60  # more triangles than these would hide each other, and the bars
_STRETCHES = 120


def staircase(result: Result) -> Figure:
    """A panel per point: each request from arrival to last token; of more than DRAWN_REQUESTS, a summary."""
    requests = result.tables["pools"]["requests"].max()
    return _each_request(result) if requests <= DRAWN_REQUESTS else _stretches_of_requests(result)


def _each_request(result: Result) -> Figure:
    points = list(result.tables["pools"]["point"])
    names = [escaped(name) for name in result.point("requests", 0, ["request_id"])["request_id"]]
    figure, cells = panels(result, min(4.2, 0.6 + 0.22 * len(names)), sharey=True)
    ends = [_staircase_panel(axes, result, point, names) for axes, point in zip(cells[:, 0], points, strict=True)]
    for axes in cells[:, 0]:
        axes.set_ylabel("request" if axes.yaxis.get_tick_params()["labelleft"] else "")
    number = "; number: latency in iterations" if len(names) <= NAMED_REQUESTS else ""
    mark = "▼" if max(result.tables["pools"]["preemptions"].fillna(0)) <= _MARKED_EVICTIONS else "black tick:"
    slot = "filled: in a slot" if len(names) <= NAMED_REQUESTS else "dark: in a slot, grey: waiting"
    about = f"{title(result)}: arrival to last token ({slot}; {mark} evicted{number})"
    finish(figure, cells, 1.1 * max(ends), "iteration", about)
    return figure


def _staircase_panel(axes: Axes, result: Result, point: int, names: list[str]) -> int:
    """Returns the end of its last request."""
    requests = result.point("requests", point, ["arrival_iteration", "latency_iterations"])
    arrival, latency = requests["arrival_iteration"].to_numpy(), requests["latency_iterations"].to_numpy()
    few = len(names) <= NAMED_REQUESTS  # more would be all outline
    look: dict[str, Any] = {"edgecolor": "0.3", "linewidth": 0.6} if few else {"linewidth": 0}
    height = 0.62 if few else 1.0
    whole = bars(axes, np.arange(len(names)), arrival, latency, height, facecolor="white" if few else "0.82", **look)
    said = zip(names, arrival, latency, strict=True)
    say(whole, [(f"{n}, latency [iterations]", f"arrived in iteration {a}", float(i)) for n, a, i in said])
    if stays := stays_of(result, point):
        filled = LIGHT if few else DARK
        long = stays.end - stays.start
        inside = bars(axes, stays.request, stays.start, long, height, facecolor=filled, **look)
        held = zip(stays.request, stays.start, long, strict=True)
        say(inside, [(f"{names[n]} in a slot [iterations]", f"from iteration {a}", float(i)) for n, a, i in held])
    evictions = result.point("evictions", point, ["iteration", "request_id"])
    place = {name: n for n, name in enumerate(names)}
    at, y = evictions["iteration"].to_numpy(), np.array([place[escaped(name)] for name in evictions["request_id"]])
    if max(result.tables["pools"]["preemptions"].fillna(0)) <= _MARKED_EVICTIONS:
        (marks,) = axes.plot(at, y, "v", color=ALERT, markersize=5 if few else 2.5)
        say(marks, [(f"{names[n]} evicted", "in iteration", float(i)) for n, i in zip(y, at, strict=True)])
    else:
        axes.vlines(at, y - 0.5, y + 0.5, color=ALERT, linewidth=0.5)
    if few:
        for i, (start, length) in enumerate(zip(arrival, latency, strict=True)):
            axes.annotate(f"{length}", (start + length, i), xytext=(3, 0), textcoords="offset points", va="center",
                          fontsize=8)  # fmt: skip
        axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    return int((arrival + latency).max())


def _stretches_of_requests(result: Result) -> Figure:
    """Latency and evictions by order of arrival: of each stretch of requests, the least, median and greatest."""
    pools = result.tables["pools"]
    count = int(pools["requests"].iloc[0])
    edges = bin_edges(0, count, _STRETCHES, whole=True)
    figure, cells = panels(result, 2.6, (2.2, 1))
    for (latency, evictions), point in zip(cells, pools["point"], strict=True):
        _latency_panel(latency, evictions, result, point, edges)
    low, high = min(c.dataLim.ymin for c in cells[:, 0]), max(c.dataLim.ymax for c in cells[:, 0])
    most = max(max(c.dataLim.ymax for c in cells[:, 1]), 1e-9)
    for latency, evictions in cells:
        latency.set_ylim(low / 1.2, high * 1.2)
        evictions.set_ylim(0, 1.1 * most)
        latency.yaxis.set_major_formatter(FuncFormatter(thousands))
        latency.set_ylabel("latency\n[iterations]")
        evictions.set_ylabel("evictions\nper request")
    about = (
        f"{title(result)}: latency by order of arrival. {count:,} requests are too many to draw each:\n"
        f"of every stretch of about {count / _STRETCHES:.0f}, band: least to greatest, line: median; below: evictions"
    )
    finish(figure, cells, count, "requests, in order of arrival", about)
    return figure


def _latency_panel(axes: Axes, below: Axes, result: Result, point: int, edges: Any) -> None:
    requests = result.point("requests", point, ["arrival_iteration", "latency_iterations", "preemptions"])
    requests = requests.sort_values("arrival_iteration", kind="stable")
    latency, places = requests["latency_iterations"].to_numpy(), edges[:-1].astype(np.int64)
    low, high = np.minimum.reduceat(latency, places), np.maximum.reduceat(latency, places)
    axes.fill_between(
        edges, np.append(low, low[-1]), np.append(high, high[-1]), step="post", color=MID, alpha=0.55, linewidth=0
    )
    axes.stairs(medians(latency, edges), edges, baseline=None, color=ALERT, linewidth=1.1)
    axes.set_yscale("log")
    if requests["preemptions"].isna().any():
        below.text(0.5, 0.5, "evictions are not reported", ha="center", va="center", transform=below.transAxes)
        return
    evicted = sums(np.arange(len(requests)), requests["preemptions"].to_numpy(), edges) / np.diff(edges)
    below.stairs(evicted, edges, fill=True, color=DARK)
