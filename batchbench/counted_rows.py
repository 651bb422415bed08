"""What every run must count again, as rows of a table, and where two of them first differ."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from batchbench.measures import counted_columns
from batchbench.results import Result

# `statistics` has only what was measured, and `texts` has tokens and numerics, which are no counters.
COUNTED_TABLES = ("pools", "requests", "iterations", "admissions", "prefills", "evictions", "token_runs", "service",
                  "repetitions")  # fmt: skip
_SHOWN = 3  # columns that a difference names


def counted_rows(result: Result, table: str, place: int, clock: str) -> pa.Table:
    """The counted columns of a point. Of `service`, what is in iterations, and in seconds where a model gives them; of
    `repetitions`, the first: how often it was run is no count.
    """
    found = result.files.point(table, place, counted_columns(table, clock))
    if table == "service" and clock != "virtual":
        return found.filter(pc.equal(found["unit"].cast(pa.string()), "iterations"))
    if table == "repetitions":
        return found.filter(pc.equal(found["repetition"], 0))
    return found


def first_difference(mine: pa.Table, theirs: pa.Table) -> str:
    """In which columns two tables differ, and the first row of each, in words; empty if in none."""
    if len(mine) != len(theirs):
        return f"{len(mine)} rows, the baseline has {len(theirs)}"
    if mine.equals(theirs):
        return ""
    found = []
    for name in mine.column_names:
        here, there = (_plain(table[name]) for table in (mine, theirs))
        if here.equals(there):
            continue
        pairs = zip(here.to_pylist(), there.to_pylist(), strict=True)
        if rows := [(row, one, other) for row, (one, other) in enumerate(pairs) if one != other]:
            row, one, other = rows[0]
            found.append(f"{name}{_whose(mine, row)} is {_said(one)}, was {_said(other)}")
    more = f"; {len(found) - _SHOWN} more columns differ" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more


def _whose(table: pa.Table, row: int) -> str:
    """Which row it is, where there are several."""
    names = [str(table[name][row]) for name in ("request_id", "metric", "unit") if name in table.column_names]
    return (f" of {' in '.join(names)}" if names else "") + (f" in row {row}" if len(table) > 1 else "")


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Names as themselves: two dictionaries may number the same names otherwise; not-a-number as the null it means."""
    if pa.types.is_floating(column.type):
        return pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)
    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _said(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 80 else text[:77] + "..."
