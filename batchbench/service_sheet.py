"""The table of what callers saw of a sweep: waits, gaps and latencies of each point, at the median and in the tail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchbench.sheets import UNSTEADY, Sheet, one_line, shown
from batchbench.units import show_blocks, show_seconds

_METRICS = ("ttft", "itl", "tpot", "e2e", "queue")
_SHARES = ("p50", "p99")
_SECONDS = {
    "iterations": "measured seconds, inside the engine",
    "virtual": "modelled seconds",
    "wall": f"real seconds: {UNSTEADY}",
}

Row = Mapping[str, Any]


def service_sheet(pools: Sequence[Row], service: Sequence[Row], *, objectives: bool) -> Sheet:
    """A row per point: in seconds if there are any, else in iterations. A metric that has no value at any point, such
    as gaps between tokens where every output is of one, has no column.

    pools, service: rows of those tables. objectives: whether the scenario has an [slo].
    """
    unit = "s" if any(row["unit"] == "s" for row in service) else "iterations"
    found = {(row["point"], row["metric"]): row for row in service if row["unit"] == unit}
    metrics = [m for m in _METRICS if any(row["count"] for (_, metric), row in found.items() if metric == m)]
    varied = any(pool["choices"] for pool in pools)
    again = ", of the first repetition" if any(pool["repetitions"] > 1 for pool in pools) else ""
    said = _SECONDS[pools[0]["clock"]] if unit == "s" else "iterations"
    return Sheet(
        (
            "pool",
            *(("choices",) if varied else ()),
            *(f"{metric} {share}" for metric in metrics for share in _SHARES),
            *(("goodput",) if objectives else ()),
        ),
        tuple(
            (
                show_blocks(pool["pool_blocks"]),
                *((one_line(pool["choices"]),) if varied else ()),
                *(_cell(found.get((pool["point"], metric)), share) for metric in metrics for share in _SHARES),
                *((shown(pool["goodput_fraction"], "{:.1%}", "not known"),) if objectives else ()),
            )
            for pool in pools
        ),
        f"service in {said}{again}",
    )


def _cell(row: Row | None, share: str) -> str:
    """Iterations are whole but for those per token."""
    if row is None:
        return "not reported"
    value = row[share]
    if value is None:
        return "none"
    if row["unit"] == "s":
        return show_seconds(value)
    return f"{value:.2f}" if row["metric"] == "tpot" else f"{value:.0f}"
