"""Recompute against swap over the link's bandwidth, from a result's own evictions and its own cost of a position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from batchbench import cost
from batchbench.eviction_cost import RecomputeRate, recompute_rate
from batchbench.report.document import Cell, Link, LinkPoint, Paragraph, Part, Section, Table, Victims, table
from batchbench.results import Result
from batchbench.sheets import escaped
from batchbench.units import show_blocks, show_bytes, show_digits, show_small_seconds

_BANDWIDTHS = (1e9, 4e9, 16e9, cost.BANDWIDTH_BYTES_PER_S, 64e9, 256e9)  # bytes per second, of slow disks to fast links
_COLUMNS = ["cached_tokens", "rebuilt_tokens", "reclaim"]


def link(result: Result) -> Section:
    """What the evictions of each point would take recomputed, or swapped over a link of any bandwidth."""
    return Section("link", "Recompute or swap", tuple(_parts(result)))


def _parts(result: Result) -> Sequence[Part]:
    size = result.run["engine"].get("kv_bytes_per_token")
    points = [_point(result, pool) for pool in result.rows("pools")]
    if not any(point and point.evictions for point in points):
        known = all(point is not None for point in points)
        return [Paragraph("Nobody was evicted, so there is nothing to compare." if known else
                          "The engine does not report how long its victims were.")]  # fmt: skip
    if type(size) is not int or size < 1:
        return [Paragraph("It is not known how many bytes of K/V a position has, so no copy can be reckoned.")]
    rate = recompute_rate(result)
    seconds = rate.s_per_position if rate else cost.MS_PER_TOKEN / 1e3
    shown = [point for point in points if point is not None and point.evictions]
    flip = cost.flip_bandwidth_bytes_per_s(size, seconds * 1e3)
    elsewhere = _at_bandwidths(shown, size, seconds)
    about = Link(tuple(shown), size, seconds, rate is not None, cost.BANDWIDTH_BYTES_PER_S, elsewhere)
    return [
        Paragraph(
            "Swapping copies whole blocks out and back: twice their bytes over the bandwidth of the link. Recomputing "
            f"takes a time per position. A position has {show_bytes(size)} of K/V here. Both leave out what a delay "
            "does to others, and that computing a longer context takes longer per position."
        ),
        Paragraph(_source(rate, result)),
        Paragraph(_equal(shown, flip)),
        about,
    ]


def _equal(points: Sequence[LinkPoint], flip: float) -> str:
    """Where recomputing takes as long as swapping."""
    evictions, spared = sum(point.evictions for point in points), sum(point.spared for point in points)
    position = "2 x bytes per position / seconds per position"
    if not spared:
        return (
            f"For victims that fill their blocks the two are equal at {show_digits(flip / 1e9)} GB/s, whatever their "
            f"length: {position}. A partly filled last block moves it up."
        )
    again, copied = sum(point.rebuilt_tokens for point in points), sum(point.copied_tokens for point in points)
    whole = f"they are equal at {show_digits(flip * copied / again / 1e9)} GB/s" if again else "recomputing takes none"
    return (
        f"A position computed again and a position copied are equal at {show_digits(flip / 1e9)} GB/s: {position}. But "
        f"{spared:,} of the {evictions:,} evictions had fewer positions computed again than their victims had cached, "
        "as these were found in the prefix cache, or evicted again before that; swapping would copy them all. That, "
        f"and a partly filled last block, moves the crossing up: over all evictions {whole}."
    )


def _source(rate: RecomputeRate | None, result: Result) -> str:
    """Where the time per position is from."""
    if rate is None:
        return (
            f"This run does not tell what computing a position again takes: {cost.MS_PER_TOKEN} ms is assumed, as "
            "batchbench cost does. It is a placeholder, not a measurement."
        )
    modelled = set(result.tables["pools"]["clock"]) == {"virtual"}
    return (
        f"Computing a position again took {show_small_seconds(rate.s_per_position)} in this run, "
        + ("as the scenario's clock models it: " if modelled else "measured: ")
        + f"step_s of the {rate.iterations:,} iterations that carried resumed rows and no first prefill or copy, less "
        "the median step_s of iterations that only decoded as many rows, over the "
        f"{rate.positions:,} positions that they rebuilt."
    )


def _point(result: Result, pool: dict[str, Any]) -> LinkPoint | None:
    """Its evictions by length; None where they are not reported."""
    frame = result.point("evictions", pool["point"], _COLUMNS)
    if pool["preemptions"] is None or frame["cached_tokens"].isna().any() or len(frame) != pool["preemptions"]:
        return None
    block = pool["block_size"]
    cached = frame["cached_tokens"].astype("int64")
    rebuilt = frame["rebuilt_tokens"].where(frame["reclaim"] == "recompute").fillna(cached).astype("int64")
    lengths = pd.DataFrame({"rebuilt": rebuilt, "copied": -(-cached // block) * block})
    groups = lengths.value_counts(sort=False).reset_index()
    victims = tuple(Victims(int(n), int(again), int(copied)) for again, copied, n in groups.itertuples(index=False))
    name = show_blocks(pool["pool_blocks"]) + (f", {escaped(pool['choices'])}" if pool["choices"] else "")
    return LinkPoint(name, victims, int((rebuilt < cached).sum()))


def _at_bandwidths(points: Sequence[LinkPoint], size: int, s_per_position: float) -> Table:
    rows = []
    for place, point in enumerate(points):
        recompute_s = cost.recompute_ms(point.rebuilt_tokens, s_per_position * 1e3) / 1e3
        swaps = [cost.swap_ms(point.copied_tokens, size, bandwidth) / 1e3 for bandwidth in _BANDWIDTHS]
        cells = [Cell(f"{point.evictions:,}", point.evictions), Cell(f"{point.copied_tokens:,}", point.copied_tokens)]
        cells += [Cell(show_small_seconds(seconds), seconds) for seconds in (recompute_s, *swaps)]
        rows.append([Cell(point.name, place), *cells])
    headings = [
        "pool",
        "evictions",
        "positions to copy",
        "recompute",
        *(f"swap at {b / 1e9:g} GB/s" for b in _BANDWIDTHS),
    ]
    return table("All evictions of a point, recomputed or swapped", headings, rows, range(1, len(headings)))
