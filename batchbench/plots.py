"""Figures from a result folder: readable in black and white, axes labelled with units."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, NullLocator

from batchbench.errors import BatchbenchError, UsageError
from batchbench.results import Result
from batchbench.units import show_blocks

STYLE: dict[Any, Any] = {
    "figure.dpi": 100,
    "savefig.dpi": 150,
    "font.family": "DejaVu Sans",  # ships with matplotlib: the same everywhere
    "font.size": 9,
    "text.parse_math": False,  # a name from a file is text, whatever is in it
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.88",
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
}
# Okabe-Ito colours of clearly different lightness; every use has a second cue (marker, hatch, text).
DARK, MID, LIGHT, ALERT = "#0072B2", "#E69F00", "#C9DDEB", "#000000"


_LINES: list[dict[str, Any]] = [
    {"marker": marker, "linestyle": style, "color": colour, "markersize": size, "markerfacecolor": "none"}
    for size, marker, style, colour in (
        (12, "o", "-", DARK), (11, "s", "--", MID), (10, "^", ":", "0.2"), (9, "D", "-.", "#009E73"),
        (8, "v", "-", "0.6"), (7, "X", "--", "#CC79A7"), (6, "P", ":", DARK), (5, "<", "-.", MID),
    )
]  # fmt: skip
_COMPARED = (
    ("occupancy", "Occupancy", "share of slots that forwarded a row", 1),
    ("preemptions_per_request", "Evictions", "evictions per request", 1),
    ("recompute_fraction", "Recompute", "share of forward positions [%]", 100),
    ("mean_latency_iterations", "Latency", "mean of all requests [iterations]", 1),
)
_NAMED_REQUESTS = 24  # more than these would overprint each other


def draw_all(result: Result, folder: Path, point: int | None = None) -> list[Path]:
    """Draw every figure as PNG into `folder`.

    point: that of the slot timeline and of the one iteration; the one that recomputes most if None. Where more than the
    pool varies, `choices` compares the points. Left out: the slot timeline where the engine does not report slots, and
    the curves over the pool's size where there is one size or too many choices.
    """
    point = _closer_look(result, point)
    pools = result.tables["pools"]
    choices, sizes = pools["choices"].nunique(), pools["pool_blocks"].nunique()
    figures: dict[str, Callable[[], Figure]] = {
        "pool_sweep": lambda: pool_sweep(result) if choices == 1 else pool_sweep_by_choice(result),
        "choices": lambda: compare_choices(result),
        "staircase": lambda: staircase(result),
        "slot_timeline": lambda: slot_timeline(result, point),
        "rows_against_positions": lambda: rows_against_positions(result, point),
    }
    with mpl.rc_context(STYLE):
        if not any(_stays(result, point)):
            del figures["slot_timeline"]
        if choices == 1:
            del figures["choices"]
        elif sizes == 1 or choices > len(_LINES):
            del figures["pool_sweep"]
        drawn = {folder / f"{name}.png": draw() for name, draw in figures.items()}  # all, before any is written
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path, figure in drawn.items():
                figure.savefig(path, metadata={"Software": None})
        except OSError as error:
            raise BatchbenchError(f"figure folder {folder}: {error.strerror or error}") from None
    return list(drawn)


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
    top_left.legend(loc="lower right")
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
        _pool_axis(axes, x)
    proof = "; every pool produced the same text" if len(x) > 1 else ""
    figure.suptitle(f"{_title(result)}: what a smaller pool costs{proof}")
    return figure


def pool_sweep_by_choice(result: Result) -> Figure:
    """The same against the pool's size, a line for each of the other choices."""
    pools = result.tables["pools"].sort_values("pool_blocks")
    figure = Figure(figsize=(8.6, 6.6), layout="constrained")
    grid = figure.subplots(2, 2, sharex=True)
    for axes, (column, title, unit, scale) in zip(grid.flat, _COMPARED, strict=True):
        for label, line in zip(pools["choices"].unique(), _LINES, strict=False):
            mine = pools[pools["choices"] == label]
            axes.plot(mine["pool_blocks"], scale * mine[column], clip_on=False, label=_choice_name(label), **line)
        axes.set(title=title, ylabel=unit, ylim=(0, None))
        if axes.dataLim.ymax <= 0:
            axes.set_ylim(0, 1)
    sizes = np.unique(pools["pool_blocks"].to_numpy())
    for axes in grid[1]:
        axes.set_xlabel("pool [blocks]")
        _pool_axis(axes, sizes)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=1 if max(map(len, labels)) > 45 else 2)
    figure.suptitle(
        f"{_title(result)}: what a smaller pool costs under each choice; every point produced the same text"
    )
    return figure


def compare_choices(result: Result) -> Figure:
    """The figures of every point side by side, a bar each."""
    pools = result.tables["pools"]
    several = pools["pool_blocks"].nunique() > 1
    labels = [
        _choice_name(point.choices) + (f"  ·  {show_blocks(point.pool_blocks)}" if several else "")
        for point in _records(pools)
    ]
    y = np.arange(len(labels))
    figure = Figure(
        figsize=(9.5 + 0.075 * max(map(len, labels)), 1.4 + min(14.0, 0.27 * len(labels))), layout="constrained"
    )
    compared = (*_COMPARED, ("engine_s", "Time", "in the engine, measured [s]", 1))
    for axes, (column, title, unit, scale) in zip(figure.subplots(1, 5, sharey=True), compared, strict=True):
        values = scale * pools[column].to_numpy(dtype=float)
        bars = axes.barh(y, np.nan_to_num(values), color=LIGHT, edgecolor="0.2", height=0.7)
        axes.bar_label(bars, ["-" if np.isnan(v) else f"{v:.3g}" for v in values], fontsize=7, padding=2)
        axes.set_title(title)
        axes.set_xlabel(unit.replace(" that ", "\nthat ").replace(" [", "\n["))
        axes.set_xlim(0, 1.25 * max(np.nanmax(values, initial=0), 1e-9))
        axes.grid(axis="y", visible=False)
        axes.set_yticks(y, labels, fontsize=8)
        axes.set_ylim(len(labels) - 0.4, -0.6)
    only = "" if several else f", pool of {show_blocks(int(pools['pool_blocks'][0]))}"
    figure.suptitle(f"{_title(result)}: the choices side by side{only}; every point produced the same text")
    return figure


def staircase(result: Result) -> Figure:
    """Each request from arrival to last token, a panel per point, evictions marked."""
    points = list(result.tables["pools"]["point"])
    columns = min(3, len(points))
    rows = -(-len(points) // columns)
    names = list(result.point("requests", 0)["request_id"])
    height = min(4.5, 1.1 + 0.22 * len(names))
    figure = Figure(figsize=(3.1 * columns + 0.6, height * rows + 0.5), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, point in zip(grid.flat, points, strict=False):
        _staircase_panel(axes, result, point, names)
    for axes in grid.flat[len(points) :]:
        axes.set_visible(False)
    grid[0, 0].set_xlim(0, 1.1 * (result.tables["requests"]["finished_iteration"].max() + 1))
    for axes in grid.flat[: len(points)][-columns:]:  # the lowest of each column
        axes.set_xlabel("iteration")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.tick_params(labelbottom=True)
    for axes in grid[:, 0]:
        axes.set_ylabel("request")
    number = "; number: latency in iterations" if len(names) <= _NAMED_REQUESTS else ""
    figure.suptitle(f"{_title(result)}: arrival to last token (filled: in a slot; ▼ evicted{number})")
    return figure


def slot_timeline(result: Result, point: int) -> Figure:
    """Who holds which slot when, at one point: prefill, resume, decode and eviction told apart."""
    stays = list(_stays(result, point))
    slots, used = int(result.tables["pools"]["slots"][point]), max(stay.slot for stay in stays) + 1
    end = max(stay.end for stay in stays)
    figure = Figure(figsize=(9.5, 1.5 + min(9.0, 0.42 * used)), layout="constrained")
    axes = figure.subplots()
    _draw_stays(axes, stays, [stay.slot for stay in stays], 0.7, 0.6)
    thin = max(1.0, end / 300)  # one iteration, but never too thin to see
    looks = {"prefill": (DARK, ""), "resume (computes its context again)": (MID, "////"), "swapped back": (MID, "")}
    for look, (colour, hatch) in looks.items():
        begun = [stay for stay in stays if stay.begins == look]
        left, y = [stay.start for stay in begun], [stay.slot for stay in begun]
        width = [max(thin, stay.first) for stay in begun]
        axes.barh(y, width, left=left, height=0.7, color=colour, hatch=hatch, edgecolor="0.1", linewidth=0.6)
    evicted = [stay for stay in stays if stay.evicted]
    axes.plot([s.end for s in evicted], [s.slot for s in evicted], "X", color=ALERT, markersize=6, clip_on=False)
    for stay in stays:
        first = max(thin, stay.first)
        if stay.end - stay.start - first > 0.011 * end * len(stay.request_id):  # the name fits
            middle = (stay.start + first + stay.end) / 2
            axes.text(middle, stay.slot, stay.request_id, ha="center", va="center", fontsize=7)
    axes.set(xlabel="iteration", ylabel="slot", ylim=(used - 0.5, -0.5), xlim=(0, 1.005 * end))
    axes.set_yticks(range(0, used, -(-used // 24)))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", visible=False)
    figure.legend(
        handles=[
            Patch(facecolor=LIGHT, edgecolor="0.3", label="decode"),
            *(
                Patch(facecolor=colour, edgecolor="0.1", hatch=hatch, label=look)
                for look, (colour, hatch) in looks.items()
                if look != "swapped back" or any(stay.begins == look for stay in stays)
            ),
            mpl.lines.Line2D([], [], marker="X", linestyle="", color=ALERT, label="evicted"),
        ],
        loc="outside lower center",
        ncols=5,
    )
    unused = f" ({slots - used} of {slots} slots never used)" if used < slots else ""
    axes.set_title(f"{_title(result)}: slots over time, {_point_name(result, point)}{unused}")
    return figure


def rows_against_positions(result: Result, point: int) -> Figure:
    """Counted in rows and in positions: one iteration of one point, then every point's whole run."""
    pools = result.tables["pools"]
    varied = pools["choices"].nunique() > 1
    labels = [str(one.point if varied else one.pool_blocks) for one in _records(pools)]
    axis = "point of the sweep" if varied else "pool [blocks]"
    label = {"fontsize": 8, "rotation": 90 if len(labels) > 8 else 0, "padding": 2}
    figure = Figure(figsize=(10.5, 3.9), layout="constrained")
    one, rows, positions = figure.subplots(1, 3, width_ratios=(0.7, 1, 1))
    _one_iteration(one, result, point)

    bars = rows.bar(labels, pools["issued_tokens"], color=LIGHT, edgecolor="0.2")
    rows.bar_label(bars, **label)
    rows.set(title="whole runs, counted in rows", xlabel=axis, ylabel="rows")
    rebuilt = pools["rebuilt_tokens"]
    if rebuilt.isna().any():  # unreported is not zero: no split
        bars = positions.bar(labels, pools["forward_tokens"], color=LIGHT, edgecolor="0.2")
        positions.bar_label(bars, **label)
    else:
        first_time = pools["forward_tokens"] - rebuilt
        positions.bar(labels, first_time, color=LIGHT, edgecolor="0.2", label="for the first time")
        bars = positions.bar(labels, rebuilt, bottom=first_time, color=MID, edgecolor="0.1", hatch="////",
                             label="K/V that had existed")  # fmt: skip
        positions.bar_label(bars, labels=[str(total) for total in pools["forward_tokens"]], **label)
        positions.legend(loc="upper left", fontsize=8)
    positions.set(title="the same, counted in positions", xlabel=axis, ylabel="positions")
    for axes in (rows, positions):
        axes.set_ylim(0, 1.35 * pools["forward_tokens"].max())
        axes.grid(axis="x", visible=False)
        axes.tick_params(axis="x", rotation=90 if len(labels) > 12 else 0)
    figure.suptitle(f"{_title(result)}: rows against positions")
    return figure


def _one_iteration(axes: Axes, result: Result, point: int) -> None:
    """The iteration that recomputed most beside decoding rows, counted both ways."""
    recomputing = [row for row in _records(result.point("iterations", point)) if row.recomputed_tokens > 0]
    if not recomputing:
        note = f"{_point_name(result, point)}:\nno iteration is known\nto have recomputed"
        axes.text(0.5, 0.5, note, ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    chosen = max(recomputing, key=lambda row: (row.issued_tokens > row.prefill_rows, row.recomputed_tokens))
    prefills = _records(result.point("prefills", point))
    resumed = sum(p.resumed for p in prefills if p.iteration == chosen.iteration)
    resume = np.array([resumed, chosen.recomputed_tokens])
    other = np.array([chosen.issued_tokens, chosen.forward_tokens]) - resume
    names = ["rows", "positions"]
    for values, bottom, colour, hatch, label in (
        (other, 0, LIGHT, "", "other rows"),
        (resume, other, MID, "////", "resumed rows"),
    ):
        bars = axes.bar(names, values, bottom=bottom, color=colour, hatch=hatch, edgecolor="0.1", label=label)
    # Above the bars: a count of three beside one of a hundred leaves no room inside.
    axes.bar_label(bars, [f"{other[n]:.0f} + {resume[n]:.0f}" for n in range(2)], fontsize=8, padding=2)
    axes.set(
        title=f"iteration {chosen.iteration}, {show_blocks(int(result.tables['pools']['pool_blocks'][point]))}",
        ylabel="count",
    )
    axes.set_ylim(0, 1.3 * (other + resume).max())
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper left", fontsize=8)


def _title(result: Result) -> str:
    name = str(result.run["scenario"]["name"])
    short = name if len(name) <= 40 else f"{name[:39]}…"
    return f"{short} (fast numerics)" if result.run["engine"].get("numerics") == "fast" else short


def _choice_name(label: str) -> str:
    return label or "as the scenario says"


def _point_name(result: Result, point: int) -> str:
    about = result.tables["pools"].iloc[point]
    label = about["choices"]
    return f"pool of {show_blocks(int(about['pool_blocks']))}" + (f", {label}" if label else "")


def _records(frame: pd.DataFrame) -> list[Any]:
    """Rows with their columns as attributes; missing values compare false with every number."""
    return list(frame.itertuples(index=False))


def _pool_axis(axes: Axes, pools: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> None:
    """A tick per pool; a label only where it does not run into the last one."""
    axes.set_xscale("log", base=2)
    room = np.log2(pools[-1] / pools[0]) / 14
    labels, last = [], -np.inf
    for size in pools:
        fits = np.log2(size) - last > room
        labels.append(str(size) if fits else "")
        last = np.log2(size) if fits else last
    axes.set_xticks(pools, labels)
    axes.xaxis.set_minor_locator(NullLocator())


def _mark_non_monotone(axes: Axes, pools: pd.DataFrame) -> None:
    """Annotate a pool that evicts more than the next larger one, yet recomputes a smaller share."""
    rows = _records(pools)
    for smaller, larger in pairwise(rows):
        if smaller.preemptions > larger.preemptions and smaller.recompute_fraction < larger.recompute_fraction:
            axes.annotate(
                f"{smaller.pool_blocks} blocks evict more than {larger.pool_blocks},\nyet recompute less: "
                f"{smaller.recomputed_tokens_per_preemption:.1f} against\n"
                f"{larger.recomputed_tokens_per_preemption:.1f} positions per eviction",
                (smaller.pool_blocks, 100 * smaller.recompute_fraction),
                xytext=(4, -78),
                textcoords="offset points",
                fontsize=8,
                arrowprops={"arrowstyle": "->", "color": "0.2"},
            )
            return


def _staircase_panel(axes: Axes, result: Result, point: int, names: list[str]) -> None:
    requests = result.point("requests", point)
    evictions = result.point("evictions", point)
    place = {name: i for i, name in enumerate(names)}
    arrival, latency = requests["arrival_iteration"].to_numpy(), requests["latency_iterations"].to_numpy()
    edge = 0.6 if len(names) <= _NAMED_REQUESTS else 0.15
    axes.barh(range(len(names)), latency, left=arrival, height=0.62, color="white", edgecolor="0.3", linewidth=edge)
    stays = list(_stays(result, point))
    _draw_stays(axes, stays, [place[stay.request_id] for stay in stays], 0.62, edge)
    axes.plot(
        evictions["iteration"],
        [place[r] for r in evictions["request_id"]],
        "v",
        color=ALERT,
        markersize=5 if edge > 0.5 else 2.5,
    )
    if len(names) <= _NAMED_REQUESTS:
        for i, (start, length) in enumerate(zip(arrival, latency, strict=True)):
            axes.annotate(f"{length}", (start + length, i), xytext=(3, 0), textcoords="offset points", va="center",
                          fontsize=8)  # fmt: skip
        axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_title(
        _point_name(result, point).replace(", ", "\n"), fontsize=10 if len(_point_name(result, point)) < 30 else 8
    )


@dataclass(frozen=True, slots=True)
class _Stay:
    """A request in a slot: from an admission to its eviction or its last token, in iterations."""

    request_id: str
    slot: int
    start: int
    end: int
    evicted: bool
    begins: str  # with which kind of work
    first: int  # and for how many iterations


def _stays(result: Result, point: int) -> Iterator[_Stay]:
    """In order of admission; none where the engine does not report slots."""
    admissions = result.point("admissions", point)
    if admissions["slot"].isna().any():
        return
    prefilled: dict[str, list[int]] = {}
    for prefill in _records(result.point("prefills", point)):
        prefilled.setdefault(prefill.request_id, []).append(prefill.iteration)
    leaves: dict[str, list[int]] = {}
    for eviction in _records(result.point("evictions", point)):
        leaves.setdefault(eviction.request_id, []).append(eviction.iteration)
    finished = result.point("requests", point).set_index("request_id")["finished_iteration"]
    nth: dict[str, int] = {}
    for stay in _records(admissions):
        name = stay.request_id
        n = nth[name] = nth.get(name, -1) + 1
        evicted = n < len(leaves.get(name, ()))
        end = leaves[name][n] if evicted else int(finished[name]) + 1
        computing = [at for at in prefilled.get(name, ()) if stay.iteration <= at < end]
        begins = "resume (computes its context again)" if stay.resumed else "prefill"
        if stay.resumed and stay.swapped_tokens > 0:
            begins = "swapped back"
        first = max(computing, default=stay.iteration) - stay.iteration + 1
        yield _Stay(name, int(stay.slot), stay.iteration, end, evicted, begins, first)


def _draw_stays(axes: Axes, stays: list[_Stay], y: list[int], height: float, edge: float) -> None:
    lengths, left = [stay.end - stay.start for stay in stays], [stay.start for stay in stays]
    axes.barh(y, lengths, left=left, height=height, color=LIGHT, edgecolor="0.3", linewidth=edge)


def _closer_look(result: Result, asked: int | None) -> int:
    """The point asked for, else the one with the largest recompute fraction."""
    shares = result.tables["pools"]["recompute_fraction"].to_numpy(dtype=float)
    if asked is None:
        return int(np.nan_to_num(shares).argmax())
    if not 0 <= asked < len(shares):
        raise UsageError(f"the result has no point {asked}; it has 0 to {len(shares) - 1}")
    return asked
