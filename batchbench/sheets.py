"""Tables of finished strings: the headline of a sweep's points; and text from files made safe to show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from batchbench.schema import MAY_DIFFER
from batchbench.units import show_blocks, show_seconds

UNSTEADY = "counters may differ between runs"  # by the wall clock


@dataclass(frozen=True)
class Sheet:
    """A printed table: headings over rows of finished strings. title: a line above it, none if empty.

    words: headings of columns that are no numbers.
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    words: tuple[str, ...] = ("choices",)

    def print(self) -> None:
        """On standard output, as wide as it needs: a terminal may wrap it, but no figure is cut."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for heading in self.headings:
            side: Literal["left", "right"] = "left" if heading in self.words else "right"
            table.add_column(heading.replace(" ", "\n", 1), justify=side, no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        if self.title:
            print(self.title)
        Console(width=1000).print(table, highlight=False, markup=False)

    def markdown(self) -> str:
        """What a file says makes no column and no markup."""
        sides = tuple("---" if heading in self.words else "---:" for heading in self.headings)
        lines = [list(map(_plain, self.headings)), sides, *(list(map(_plain, row)) for row in self.rows)]
        above = f"{_plain(self.title)}\n\n" if self.title else ""
        return above + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(text: str) -> str:
    return "".join(f"\\{c}" if c in "|<>`" else c for c in text)


def sweep_sheet(pools: Sequence[Mapping[str, Any]], statistics: Sequence[Mapping[str, Any]] = ()) -> Sheet:
    """The headline of each point, in the roundings that the field's texts use.

    statistics: rows of that table. A column more where choices vary, where counters may differ between runs, where
    points were repeated, or where numerics is fast; a title where counters may not come out again.
    """
    verdict = "identical" if len(pools) > 1 else "not compared"
    if any(pool["text_digest"] is None for pool in pools):
        verdict = "not computed"
    varied = any(pool["choices"] for pool in pools)
    more = _more_columns(pools, statistics)
    return Sheet(
        (
            "pool",
            *(("choices",) if varied else ()),
            "occupancy",
            "evictions per request",
            "recompute share",
            "victim latency",
            "paired latency",
            "text",
            *more,
        ),
        tuple(
            (
                show_blocks(pool["pool_blocks"]),
                *((one_line(pool["choices"]),) if varied else ()),
                f"{pool['occupancy']:.3f}",
                _per_request(pool["preemptions_per_request"]),
                shown(pool["recompute_fraction"], "{:.1%}", "not reported"),
                shown(pool["preemption_latency_penalty"], "{:.2f}x", "no control group"),
                shown(pool["paired_latency_penalty"], "{:.2f}x", "no reference"),
                verdict,
                *(column[place] for column in more.values()),
            )
            for place, pool in enumerate(pools)
        ),
        f"real time: {UNSTEADY}" if any(pool["clock"] == "wall" for pool in pools) else "",
    )


def _more_columns(pools: Sequence[Mapping[str, Any]], statistics: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """By heading. Times are those of the iterations, or of the whole runs where theirs are modelled."""
    more: dict[str, list[str]] = {}
    if any(pool["numerics"] == "fast" for pool in pools):
        more["numerics"] = ["fast"] * len(pools)
    if any(pool["counters"] == MAY_DIFFER for pool in pools):
        more["counters"] = [pool["counters"] for pool in pools]
    for metric, name in (("engine_s", "engine time"), ("wall_s", "wall time")):
        rows = [row for row in statistics if row["metric"] == metric and row["n"] > 1]  # one for each point, or none
        if rows and len(rows) == len(pools):
            more[f"{name}, median [low, high]"] = [_show_interval(row) for row in rows]
            break
    return more


def _show_interval(row: Mapping[str, Any]) -> str:
    median, low, high = (show_seconds(row[name]) for name in ("median", "low", "high"))
    return f"{median} [{low}, {high}] n={row['n']}"


def _per_request(value: float | None) -> str:
    """Two decimals, or two digits of what these would not tell from nothing."""
    return shown(value, "{:.2g}" if value is not None and 0 < value < 0.1 else "{:.2f}", "not reported")


def one_line(text: str) -> str:
    """Control characters out, line breaks folded: what a file says cannot drive the terminal."""
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))


def escaped(text: str) -> str:
    """As one_line, but nothing is lost: line breaks and what cannot be printed as Python's escapes, \\ as \\\\."""
    return "".join(c if c.isprintable() and c != "\\" else c.encode("unicode_escape").decode("ascii") for c in text)


def shown(value: float | None, pattern: str, missing: str) -> str:
    """A number in its rounding, or what is said where there is none."""
    return missing if value is None or math.isnan(value) else pattern.format(value)
