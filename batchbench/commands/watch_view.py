"""A running sweep's status as a live display, as a line, and as a document."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from batchbench.sheets import one_line
from batchbench.status import Sighting, Status
from batchbench.units import show_blocks, show_count, show_seconds

_BAR = 32  # characters, as wide as the history
_HEIGHTS, _PLAIN_HEIGHTS = "▁▂▃▄▅▆▇█", "_.-=+*#@"  # of a terminal that has these signs, and of one that has not
_LATE_S = 5.0  # an iteration may take that long; what is older is said to be
HISTORY = _BAR  # fills that are shown


def watch_line(seen: Sighting) -> str:
    """All of it in one line."""
    status = seen.status
    assert status is not None
    parts = [f"{status.requests_finished}/{show_count(status.requests, 'request')}",
             show_count(status.iterations, "iteration")]  # fmt: skip
    if status.used_blocks is not None:
        parts.append(f"{status.used_blocks}/{show_blocks(status.pool_blocks)} in use")
    parts += [f"{count} {name}" for name, count in _queue(status)]
    parts += [show_count(status.evictions, "eviction"), show_seconds(status.elapsed_s) + _late(seen)]
    return one_line(f"{_where(status)}: {', '.join(parts)}")


def watch_display(folder: Path, seen: Sighting, fills: Sequence[float], *, plain: bool) -> Group:
    """Bars for points, requests and the pool, and how the pool's fill went. plain: ASCII alone."""
    status, table = seen.status, Table.grid(padding=(0, 2))
    assert status is not None
    for name, done, whole in (
        ("points", status.point, status.points),
        ("requests", status.requests_finished, status.requests),
    ):
        table.add_row(Text(name), _bar(done, whole), Text(f"{done} of {whole} done"))
    if status.used_blocks is not None:
        said = f"{status.used_blocks} of {show_blocks(status.pool_blocks)} in use"
        table.add_row(Text("pool"), _bar(status.used_blocks, status.pool_blocks), Text(said))
        table.add_row(Text(""), Text(sparkline(fills, _PLAIN_HEIGHTS if plain else _HEIGHTS)), Text("lately"))
    for name, count in (*_queue(status), ("evictions", status.evictions), ("iterations", status.iterations)):
        table.add_row(Text(name), Text(str(count)))
    table.add_row(Text("elapsed"), Text(show_seconds(status.elapsed_s)), Text(_late(seen).removeprefix(", ")))
    return Group(Text(one_line(f"{folder}: {_where(status)}")), table)


def watch_document(folder: Path, seen: Sighting) -> dict[str, Any]:
    """All of it for machines."""
    status = None if seen.status is None else seen.status.model_dump(mode="json", exclude={"version"})
    return {"folder": str(folder), "state": seen.state, "age_s": seen.age_s, "status": status}


def fill_of(status: Status) -> float | None:
    """The share of the pool in use, if it is known."""
    if status.used_blocks is None or not status.pool_blocks:
        return None
    return status.used_blocks / status.pool_blocks


def sparkline(shares: Sequence[float], heights: str) -> str:
    """A sign for each share, by its height: the lowest for 0, the highest for 1."""
    return "".join(heights[round(min(max(share, 0.0), 1.0) * (len(heights) - 1))] for share in shares)


def _where(status: Status) -> str:
    """The point that runs, as people count, and what it is."""
    choices = f", {status.choices}" if status.choices else ""
    repeated = f", {status.pass_name}" if status.pass_name else ""
    return f"point {status.point + 1} of {status.points} (pool of {show_blocks(status.pool_blocks)}{choices}{repeated})"


def _queue(status: Status) -> list[tuple[str, int]]:
    known = (("running", status.running), ("waiting", status.waiting))
    return [(name, count) for name, count in known if count is not None]


def _late(seen: Sighting) -> str:
    return f", nothing new for {show_seconds(seen.age_s)}" if seen.age_s >= _LATE_S else ""


def _bar(done: int, whole: int) -> ProgressBar:
    return ProgressBar(max(1, whole), min(done, whole), width=_BAR)
