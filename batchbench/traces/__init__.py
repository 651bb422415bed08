"""Recorded traces of LLM serving: opens a file of any known format, and streams its rows."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from batchbench.errors import TraceError
from batchbench.traces.cells import MAX_TOKENS, RefusedCell
from batchbench.traces.formats import BY_NAME, Format, resolve, sniff
from batchbench.traces.making import RowMaker
from batchbench.traces.records import Records, csv_records, json_records, jsonl_records, look, parquet_records
from batchbench.traces.rows import BEYOND, OUTSIDE, TRUNCATED, Tally, TraceRow

__all__ = ["FORMATS", "Tally", "Trace", "TraceRow", "open_trace", "read_sorted", "rows_in_window"]

FORMATS: tuple[str, ...] = tuple(BY_NAME)


class Trace:
    """A trace file; its rows are read as they are asked for, and never kept.

    path; format: the name of one of FORMATS. prefix_tokens: positions that a hash id stands for, None if there are no
    hash ids. tally: the books, complete when `rows` is exhausted.
    """

    def __init__(self, path: Path, known: Format, prefix_tokens: int | None) -> None:
        self.path, self.format = path, known.name
        self.prefix_tokens = known.prefix_tokens if prefix_tokens is None else prefix_tokens
        self.tally = Tally()
        self._known, self._columns = known, resolve(path, known)
        if prefix_tokens is not None and not known.hash_ids:
            raise TraceError(f"prefix_tokens = {prefix_tokens} would do nothing: {known.name} has no hash ids")

    @property
    def has_times(self) -> bool:
        """Whether its rows have an arrival; if not, none has one."""
        return self._columns.arrival is not None

    @property
    def has_texts(self) -> bool:
        """Whether its rows are texts, whose lengths only a tokenizer tells."""
        return self._known.kind != "counts"

    def rows(self) -> Iterator[TraceRow]:
        """Every row that can be used, in file order; from the start again, with new books, at each call.

        Raises TraceError: file, line and reason.
        """
        tally = self.tally = Tally()
        maker = RowMaker(self._known, self._columns, self.prefix_tokens, tally)
        for line, record in self._records(tally):
            tally.rows_read += 1
            try:
                row = TRUNCATED if record is None else maker.make(line, record)
            except RefusedCell as refused:
                place = "" if self._known.container in ("csv", "jsonl") else " record "
                raise TraceError(f"{self.path}:{place}{line}: {refused}") from None
            if isinstance(row, str):
                tally.drop(row)
            else:
                tally.rows_used += 1
                yield row

    def _records(self, tally: Tally) -> Records:
        if self._known.container == "parquet":
            return parquet_records(self.path, self._columns.used)
        readers = {"csv": csv_records, "jsonl": jsonl_records, "json": json_records}
        return readers[self._known.container](self.path, tally.note)


def open_trace(path: str | os.PathLike[str], format: str | None = None, *, prefix_tokens: int | None = None) -> Trace:
    """A trace, of the format that its content tells or of the one given.

    prefix_tokens: positions that a hash id stands for, instead of the format's own. Raises TraceError: it cannot be
    read, is of no known format, or lacks a column that the format needs.
    """
    if format is not None and format not in BY_NAME:
        raise TraceError(f"trace format {format!r} is unknown; there are {', '.join(FORMATS)}")
    if prefix_tokens is not None and not 1 <= prefix_tokens <= MAX_TOKENS:
        raise TraceError(f"prefix_tokens is {prefix_tokens}, must be from 1 to {MAX_TOKENS}")
    path = Path(path)
    if format is not None:
        look(path)
    return Trace(path, BY_NAME[format or sniff(path)], prefix_tokens)


def rows_in_window(trace: Trace, window_s: tuple[float, float]) -> Iterator[TraceRow]:
    """Rows in file order from A to before B seconds after the file's earliest arrival, their times counted from that.

    Reads the file twice, to know the earliest. The others are dropped in `trace.tally`. Raises TraceError, also where
    there are no times.
    """
    start_s, end_s = window_s
    if not start_s < end_s:
        raise TraceError(f"window {start_s:g}:{end_s:g} s is empty")
    if not trace.has_times:
        raise TraceError(f"trace {trace.path}: {trace.format} has no times, so a window means nothing")
    first = min((_arrival(row) for row in trace.rows()), default=0)
    for row in trace.rows():
        since_ns = _arrival(row) - first
        if start_s * 1e9 <= since_ns < end_s * 1e9:
            yield replace(row, arrival_ns=since_ns)
        else:
            trace.tally.unuse(OUTSIDE)


def read_sorted(
    trace: Trace, *, window_s: tuple[float, float] | None = None, max_requests: int | None = None
) -> list[TraceRow]:
    """Rows by arrival, those of equal time in file order, times in nanoseconds from the file's earliest arrival.

    window_s: only rows from A to before B seconds after that. max_requests: of these, the first so many. What is left
    out is dropped in `trace.tally`. Holds in memory what it returns, not the file. Rows without times keep the file's
    order. Raises TraceError.
    """
    if max_requests is not None and max_requests < 1:
        raise TraceError(f"max_requests is {max_requests}, must be at least 1")
    rows = trace.rows() if window_s is None else rows_in_window(trace, window_s)
    if max_requests is None:
        kept = sorted(rows, key=_arrival)
    else:
        kept = heapq.nsmallest(max_requests, rows, key=_arrival)  # as sorted(rows)[:max_requests], and as stable
        trace.tally.unuse(BEYOND, trace.tally.rows_used - len(kept))
    if window_s is not None or not trace.has_times or not kept:
        return kept
    first = _arrival(kept[0])
    return [replace(row, arrival_ns=_arrival(row) - first) for row in kept]


def _arrival(row: TraceRow) -> int:
    return row.arrival_ns or 0
