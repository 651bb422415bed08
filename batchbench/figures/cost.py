"""Figures of what an eviction costs: recompute against swap, and predicted against measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from batchbench import cost
from batchbench.calibration import Calibration
from batchbench.errors import BatchbenchError
from batchbench.eviction_cost import TOLERANCE, EvictionCost, PointCost
from batchbench.figures.style import ALERT, DARK, LIGHT, MID, STYLE
from batchbench.units import show_digits

_TOY_TOKENS = 4096
_STYLES = ("--", "-.", ":")  # of slower, given and faster links


def save_comparison(
    path: Path, calibration: Calibration | None, ms_per_token: float, bandwidth_bytes_per_s: float, per_token_bytes: int
) -> None:
    """Cost against the victim's length for the given link and others, and, if there is one, as it was measured."""
    _save(path, lambda: _comparison(calibration, ms_per_token, bandwidth_bytes_per_s, per_token_bytes))


def save_evictions(path: Path, name: str, costs: Sequence[EvictionCost], sums: Sequence[PointCost]) -> None:
    """Predicted against measured: every eviction that could be told apart, and the sums of each pool."""
    _save(path, lambda: _evictions(name, costs, sums))


def _comparison(
    calibration: Calibration | None, ms_per_token: float, bandwidth_bytes_per_s: float, per_token_bytes: int
) -> Figure:
    figure = Figure(figsize=(9.6, 4.2) if calibration else (6.6, 4.4), layout="constrained")
    if calibration is None:
        _toy_panel(figure.subplots(), ms_per_token, bandwidth_bytes_per_s, per_token_bytes, None)
    else:
        measured, toy = figure.subplots(1, 2)
        _measured_panel(measured, calibration)
        _toy_panel(toy, ms_per_token, bandwidth_bytes_per_s, per_token_bytes, calibration)
    figure.suptitle("What an eviction costs: computing its K/V again, or copying it out and back")
    return figure


def _toy_panel(
    axes: Axes, ms_per_token: float, bandwidth_bytes_per_s: float, per_token_bytes: int, measured: Calibration | None
) -> None:
    """Lines through 0: with costs per position that do not grow, one link is cheaper at every length, or at none."""
    tokens = np.array([1, _TOY_TOKENS])
    flip = cost.flip_bandwidth_bytes_per_s(per_token_bytes, ms_per_token)
    axes.plot(tokens, tokens * ms_per_token, color=DARK, linewidth=2, label=f"recompute, {ms_per_token:g} ms/position")
    links = sorted({flip / 4, bandwidth_bytes_per_s, bandwidth_bytes_per_s * 4})
    for link, style in zip(links, _STYLES, strict=False):
        swaps = [cost.swap_ms(int(n), per_token_bytes, link) for n in tokens]
        axes.plot(tokens, swaps, style, color=MID, linewidth=1.8, label=f"swap, {show_digits(link / 1e9)} GB/s")
    if measured:
        axes.plot(*_curve(measured, measured.recompute_ms), color=ALERT, linewidth=2.5, label="recompute, measured")
        axes.plot(*_curve(measured, measured.swap_ms), color="0.55", linewidth=2.5, label="swap, measured")
    _log_axes(axes)
    low, high = axes.get_ylim()
    axes.set_ylim(low / 6, high * (100 if measured else 12))  # room for the legend and the note
    axes.set(title="with constants, and measured" if measured else "with constants")
    equal = f"equal at {show_digits(flip / 1e9)} GB/s, at every length"
    axes.text(0.98, 0.03, equal, ha="right", transform=axes.transAxes, fontsize=8)
    axes.legend(loc="upper left", fontsize=8)


def _measured_panel(axes: Axes, calibration: Calibration) -> None:
    """This machine's curves, the points that were measured, and where the choice flips."""
    c = calibration
    bars: dict[str, Any] = {"markersize": 4, "capsize": 2}
    axes.plot(*_curve(c, c.recompute_ms), color=DARK, linewidth=1.8)
    spread = [point.resume.spread_ms + point.decode.spread_ms for point in c.resumes]
    axes.errorbar([p.tokens for p in c.resumes], [p.extra_ms for p in c.resumes], spread, fmt="o", color=DARK, **bars)
    axes.plot(*_curve(c, c.swap_ms), "--", color=MID, linewidth=1.8)
    spread = [point.out.spread_ms + point.back.spread_ms for point in c.copies]
    lengths = [point.blocks * c.block_size for point in c.copies]
    axes.errorbar(lengths, [p.round_trip_ms for p in c.copies], spread, fmt="s", color=MID, mec="0.2", **bars)
    _log_axes(axes)
    axes.set_ylim(top=12 * axes.get_ylim()[1])  # room for the legend
    for tokens in c.crossovers()[:1]:
        axes.plot(tokens, c.swap_ms(tokens), "X", color=ALERT, markersize=8, zorder=5)
        axes.annotate(
            f"swap takes less\nfrom {tokens} positions"
            if len(c.crossovers()) == 1
            else f"first flips\nat {tokens} positions",
            (tokens, c.swap_ms(tokens)),
            xytext=(0.97, 0.06),
            textcoords="axes fraction",
            ha="right",
            fontsize=8,
            arrowprops={"arrowstyle": "->", "color": "0.2"},
        )
    axes.legend(
        handles=[
            mpl.lines.Line2D([], [], marker="o", color=DARK, label="recompute"),
            mpl.lines.Line2D([], [], marker="s", markeredgecolor="0.2", ls="--", color=MID, label="swap, out and back"),
        ],
        loc="upper left",
    )
    axes.set(title=f"measured: {Path(c.model).name}, {c.dtype}")


def _log_axes(axes: Axes) -> None:
    """Lengths and costs as powers, labelled in plain numbers."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.set(xlabel="positions of the victim", ylabel="cost [ms]")


def _curve(
    c: Calibration, cost_ms: Callable[[int], float]
) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.int64]], np.ndarray[tuple[int, ...], np.dtype[np.float64]]]:
    tokens = np.unique(np.geomspace(1, c.max_tokens, 200).astype(np.int64))
    return tokens, np.array([cost_ms(int(n)) for n in tokens])


def _evictions(name: str, costs: Sequence[EvictionCost], sums: Sequence[PointCost]) -> Figure:
    alone = [one for one in costs if one.measured_ms is not None]  # copies are timed per pool
    figure = Figure(figsize=(9.6 if alone else 6.6, 4.2), layout="constrained")
    if alone:
        scatter, bars = figure.subplots(1, 2, width_ratios=(0.9, 1.1))
        _scatter_panel(scatter, alone)
    else:
        bars = figure.subplots()
    shown = [total for total in sums if total.predicted_ms is not None and total.measured_ms is not None]
    places = np.arange(len(shown))
    for values, offset, colour, hatch, label in (
        ([total.predicted_ms for total in shown], -0.2, LIGHT, "////", "predicted"),
        ([total.measured_ms for total in shown], 0.2, DARK, "", "measured"),
    ):
        bars.bar(places + offset, values, 0.4, color=colour, hatch=hatch, edgecolor="0.1", label=label)
    tallest = max((max(t.predicted_ms or 0, t.measured_ms or 0) for t in shown), default=1)
    for place, total in zip(places, shown, strict=True):
        top = max(total.predicted_ms or 0, total.measured_ms or 0)
        said = "-" if total.ratio is None else f"{total.ratio:.2f}x"
        bars.annotate(said, (place, top), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=8)
    several = len({total.reclaim for total in shown}) > 1
    labels = [f"{t.pool_blocks}\n{t.reclaim}" if several else str(t.pool_blocks) for t in shown]
    bars.set_xticks(places, labels, rotation=90 if len(labels) > 5 else 0, fontsize=8)
    bars.set(xlabel="pool [blocks]", ylabel="sum over evictions [ms]", ylim=(0, 1.3 * tallest),
             title="sums of each pool; predicted / measured above")  # fmt: skip
    bars.grid(axis="x", visible=False)
    bars.legend(loc="upper right")
    short = name if len(name) <= 40 else f"{name[:39]}…"
    figure.suptitle(f"{short}: cost of evictions, predicted by the calibration and measured")
    return figure


def _scatter_panel(axes: Axes, costs: Sequence[EvictionCost]) -> None:
    axes.set(xlabel="measured [ms]", ylabel="predicted [ms]", title="one recomputed eviction each")
    measured = [one.measured_ms or 0.0 for one in costs]
    end = 1.1 * max(*measured, *(one.predicted_ms for one in costs))
    axes.fill_between([0, end], [0, end * (1 - TOLERANCE)], [0, end * (1 + TOLERANCE)], color="0.9",
                      label=f"within {TOLERANCE:.0%}")  # fmt: skip
    axes.plot([0, end], [0, end], color="0.3", linewidth=0.9)
    axes.plot(measured, [one.predicted_ms for one in costs], "o", color=DARK, markerfacecolor="none", markersize=6)
    axes.set(xlim=(min(0.0, *measured), end), ylim=(0, end))
    axes.legend(loc="upper left")


def _save(path: Path, draw: Callable[[], Figure]) -> None:
    with mpl.rc_context(STYLE):
        figure = draw()
        try:
            figure.savefig(path, metadata={"Software": None} if path.suffix.lower() == ".png" else None)
        except (OSError, ValueError) as error:  # ValueError: an ending that is no picture's
            reason = getattr(error, "strerror", None) or error
            raise BatchbenchError(f"figure {path}: {reason}") from None
