"""The figure of a position's K/V: computed again, or copied out and back, over the bandwidth of the link."""

from __future__ import annotations

import math

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from batchbench import cost
from batchbench.figures.style import ALERT, DARK, MID
from batchbench.units import show_small_seconds

REACH = 10.0  # to how many times the cost of a position, and the same part of it, the picture has room


def bandwidths(kv_bytes_per_token: int, s_per_position: float) -> tuple[float, float]:
    """Bytes per second at both ends of the picture, powers of ten: everyday links, and where the two are equal."""
    flip = cost.flip_bandwidth_bytes_per_s(kv_bytes_per_token, s_per_position * 1e3)
    low, high = min(1e9, flip / REACH), max(1e11, flip * REACH)
    return 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))


def link_figure(
    kv_bytes_per_token: int, s_per_position: float, bandwidth_bytes_per_s: float, *, measured: bool
) -> Figure:
    """What moves with the two costs has a group of its own: `recompute`, `link`, `swapped` and `equal`."""
    low, high = bandwidths(kv_bytes_per_token, s_per_position)
    flip = cost.flip_bandwidth_bytes_per_s(kv_bytes_per_token, s_per_position * 1e3)
    figure = Figure(figsize=(8.6, 3.4), layout="constrained")
    axes = figure.subplots()
    swaps = [_swap_s(kv_bytes_per_token, bandwidth) for bandwidth in (low, high)]
    axes.plot([low, high], swaps, "--", color=MID, linewidth=2, label="swap, out and back")
    named = f"recompute, {show_small_seconds(s_per_position)}" if measured else "recompute, assumed"
    axes.plot([low / 1e3, high * 1e3], [s_per_position] * 2, color=DARK, linewidth=2, label=named, gid="recompute")
    tall = [swaps[1] / 1e9, swaps[0] * 1e9]
    axes.plot([bandwidth_bytes_per_s] * 2, tall, ":", color="0.2", linewidth=1.2, label="this link", gid="link")
    at = _swap_s(kv_bytes_per_token, bandwidth_bytes_per_s)
    axes.plot([bandwidth_bytes_per_s], [at], "o", color=ALERT, markersize=7, gid="swapped", zorder=5)
    axes.plot(
        [flip], [s_per_position], "X", color=ALERT, markersize=9, linestyle="", label="equal", gid="equal", zorder=6
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set(xlim=(low, high), ylim=(swaps[1], swaps[0]), xlabel="bandwidth of the link [GB/s]", ylabel="per position")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1e9:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show_small_seconds(value * 1.0001)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def decade_points(figure: Figure) -> tuple[float, float]:
    """How far ten times as much is, to the right and upward, in points (1/72 inch). The figure must be laid out."""
    (x0, y0), (x1, y1) = figure.axes[0].transData.transform([(1e9, 1e-3), (1e10, 1e-2)])
    return float(x1 - x0) * 72 / figure.dpi, float(y1 - y0) * 72 / figure.dpi


def _swap_s(kv_bytes_per_token: int, bandwidth_bytes_per_s: float) -> float:
    return cost.swap_ms(1, kv_bytes_per_token, bandwidth_bytes_per_s) / 1e3
