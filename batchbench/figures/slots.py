"""The figure of slots over time: each stay of a few, or how many slots are in use where there are many."""

from __future__ import annotations

import textwrap
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from batchbench.figures.bands import bin_edges, sums
from batchbench.figures.marks import say
from batchbench.figures.style import ALERT, DARK, LIGHT, MID, bars, count_axis, draw_state, point_name, title
from batchbench.results import Result
from batchbench.sheets import escaped
from batchbench.stays import PREFILL, RESUME, SWAPPED, Stays, stays_of

DRAWN_STAYS = 1200  # more than these would be slivers
_PIXELS = 1200  # of the summary's width
_STRETCHES = 240
_LOOKS = {
    PREFILL: ("prefill", DARK, ""),
    RESUME: ("resume (computes its context again)", MID, "////"),
    SWAPPED: ("swapped back", MID, ""),
}
_SPENT: dict[str, Any] = {
    "facecolor": "white",
    "hatch": "....",
    "edgecolor": "0.4",
}  # a finished member of a static batch


def slot_timeline(result: Result, point: int) -> Figure:
    """Who holds which slot when, at one point; of more than DRAWN_STAYS, how many slots are in use."""
    stays = stays_of(result, point)
    assert stays is not None  # else there is nothing to draw
    return _each_stay(result, point, stays) if len(stays) <= DRAWN_STAYS else _slots_in_use(result, point, stays)


def _each_stay(result: Result, point: int, stays: Stays) -> Figure:
    slots, used = int(result.tables["pools"]["slots"].iloc[point]), int(stays.slot.max()) + 1
    end = int(stays.held.max())
    figure = Figure(figsize=(9.9, 1.5 + min(9.0, 0.42 * used)), layout="constrained")
    axes = figure.subplots()
    spent = stays.held > stays.end
    names = [escaped(name) for name in result.point("requests", point, ["request_id"])["request_id"]]
    long = stays.end - stays.start
    whole = bars(axes, stays.slot, stays.start, long, 0.7, facecolor=LIGHT, edgecolor="0.3", linewidth=0.6)
    said = zip(stays.request, stays.slot, stays.start, long, strict=True)
    say(whole, [(f"{names[n]} in slot {s} [iterations]", f"from iteration {a}", float(i)) for n, s, a, i in said])
    bars(axes, stays.slot[spent], stays.end[spent], (stays.held - stays.end)[spent], 0.7, linewidth=0.4, **_SPENT)
    first = np.minimum(np.maximum(max(1.0, end / 300), stays.first), stays.end - stays.start)  # not too thin to see
    for look, (_, colour, hatch) in _LOOKS.items():
        chosen = stays.begins == look
        bars(axes, stays.slot[chosen], stays.start[chosen], first[chosen], 0.7,
             facecolor=colour, hatch=hatch, edgecolor="0.1", linewidth=0.6)  # fmt: skip
    few = not _crowded(stays, 0.01 * end)
    x, y = stays.end[stays.evicted], stays.slot[stays.evicted]
    if few:
        (marks,) = axes.plot(x, y, "X", color=ALERT, markersize=6, clip_on=False)
        out = zip(stays.request[stays.evicted], x, strict=True)
        say(marks, [(f"{names[n]} evicted", "in iteration", float(i)) for n, i in out])
    else:
        axes.vlines(x, y - 0.42, y + 0.42, color=ALERT, linewidth=1.1)
    _name(axes, names, stays, first, end)
    axes.set(xlabel="iteration", ylabel="slot", ylim=(used - 0.5, -0.5), xlim=(0, 1.005 * end))
    axes.set_yticks(range(0, used, -(-used // 24)))
    count_axis(axes.xaxis, 10)
    axes.grid(axis="y", visible=False)
    _legend(figure, stays, "X" if few else "|", widened=end > 300)
    unused = f" ({slots - used} of {slots} slots never used)" if used < slots else ""
    heading = f"{title(result)}: slots over time, {point_name(result, point)}{unused}"
    axes.set_title(textwrap.fill(heading, 100))  # matplotlib's own wrapping takes dollars for mathematics
    return figure


def _crowded(stays: Stays, apart: float) -> bool:
    """Whether two evictions from one slot are so near that their marks would overlap."""
    slot, at = stays.slot[stays.evicted], stays.end[stays.evicted]
    order = np.lexsort((at, slot))
    return bool(((np.diff(at[order]) < apart) & (np.diff(slot[order]) == 0)).any())


def _name(axes: Axes, names: list[str], stays: Stays, first: Any, end: int) -> None:
    """Each stay by its request, where the name fits."""
    left = stays.start + first
    for n, request in enumerate(stays.request):
        if stays.end[n] - left[n] > 0.011 * end * len(names[request]):
            middle = (left[n] + stays.end[n]) / 2
            axes.text(middle, stays.slot[n], names[request], ha="center", va="center", fontsize=7)


def _legend(figure: Figure, stays: Stays, mark: str, *, widened: bool) -> None:
    """widened: one iteration would be too thin to see."""
    wider = " (drawn wider than it is)" if widened else ""
    spent = [Patch(**_SPENT, label="finished, still forwarded")] if (stays.held > stays.end).any() else []
    figure.legend(
        handles=[
            Patch(facecolor=LIGHT, edgecolor="0.3", label="decode"),
            *(
                Patch(facecolor=colour, edgecolor="0.1", hatch=hatch, label=label + wider)
                for look, (label, colour, hatch) in _LOOKS.items()
                if look != SWAPPED or (stays.begins == look).any()
            ),
            *spent,
            mpl.lines.Line2D([], [], marker=mark, linestyle="", color=ALERT, label="evicted"),
        ],
        loc="outside lower center",
        ncols=6,
    )


def _slots_in_use(result: Result, point: int, stays: Stays) -> Figure:
    """Slots in use as bands; admissions and evictions per stretch of iterations."""
    slots, end = int(result.tables["pools"]["slots"].iloc[point]), int(stays.held.max())
    figure = Figure(figsize=(9.9, 5.2), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1.6, 1))
    at, change = np.unique(np.concatenate([stays.start, stays.held]), return_inverse=True)
    ones = np.ones(len(stays), dtype=np.int64)
    in_use = np.cumsum(np.bincount(change, np.concatenate([ones, -ones]))).round().astype(np.int64)
    banded = draw_state(above, at, in_use, end, _PIXELS, {"color": DARK, "hatch": "", "linestyle": "-"})
    above.axhline(slots, color="0.2", linestyle="--", linewidth=0.9)
    above.set(ylabel="slots in use", ylim=(0, 1.1 * slots))
    edges = bin_edges(0, end, _STRETCHES, whole=True)
    scale = 1000 / np.diff(edges)
    below.stairs(sums(stays.start, None, edges) * scale, edges, fill=True, color=LIGHT, label="admissions")
    below.stairs(sums(stays.start, None, edges) * scale, edges, color="0.3", linewidth=0.6)
    evicted = stays.end[stays.evicted]
    below.stairs(sums(evicted, None, edges) * scale, edges, fill=True, color=ALERT, label="evictions")
    below.set(ylabel="per 1000 iterations", xlabel="iteration", xlim=(0, end))
    below.set_ylim(0, 1.35 * below.dataLim.ymax)  # room for the legend
    below.legend(loc="upper left", ncols=2)
    count_axis(below.xaxis, 10)
    drawn = "Band: least to greatest, line: mean" if banded else "Line: as it was"
    figure.suptitle(
        f"{title(result)}: slots over time, {point_name(result, point)}\n"
        f"{len(stays):,} stays are too many to draw each. {drawn}; dashed: all {slots} slots\n"
        f"below: admissions and evictions in stretches of {end / _STRETCHES:,.0f} iterations"
    )
    return figure
