"""The tables of what happened, iteration by iteration, written in row groups as it happens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any

import pyarrow as pa

from batchbench.clocks import NS
from batchbench.protocol import Admission, Eviction, IterationBatch, IterationEvents, IterationOutcome, Prefill
from batchbench.recorder import Happened
from batchbench.schema import POINT_COLUMNS, TABLES, arrow_schema

LEDGER = ("iterations", "admissions", "prefills", "evictions", "token_runs")
ROW_GROUP = 65_536  # rows held before they are written
Row = list[Any]

_COLUMNS = {name: tuple(column.name for column in TABLES[name][len(POINT_COLUMNS) :]) for name in LEDGER}
_COUNTS = ("issued_tokens", "collected_tokens", "forward_tokens", "padded_tokens", "prefill_rows", "recomputed_tokens",
           "rebuilt_tokens", "swapped_out_tokens", "swapped_in_tokens")  # fmt: skip
_STATE = ("running", "waiting", "free_blocks", "unused_tokens")
_counts, _state = attrgetter(*_COUNTS), attrgetter(*_STATE)
_admission = attrgetter(*_COLUMNS["admissions"][1:])
_prefill = attrgetter(*_COLUMNS["prefills"][1:])
_eviction = attrgetter(*_COLUMNS["evictions"][1:-4])
_RESUMED, _REBUILT, _RECOVERED, _SWAPPED = range(-4, 0)  # of an eviction's row: filled in later
assert _COLUMNS["evictions"][-4:] == ("resumed_iteration", "rebuilt_tokens", "recovered_tokens", "swapped_tokens")
assert _COLUMNS["iterations"] == ("iteration", *_COUNTS, "preemptions", "finished", *_STATE, "step_s")


_DERIVED = ("prefill_rows", "recomputed_tokens", "rebuilt_tokens", "swapped_out_tokens", "swapped_in_tokens",
            "preemptions", "finished")  # fmt: skip


def _derived(event: IterationEvents) -> tuple[int, ...]:
    """_DERIVED, as an IterationOutcome would say them."""
    return (
        len(event.prefills),
        sum([p.positions for p in event.prefills if p.resumed]),
        sum([p.rebuilt_tokens for p in event.prefills]),
        sum([e.cached_tokens or 0 for e in event.evictions if e.reclaim == "swap"]),
        sum([a.swapped_tokens or 0 for a in event.admissions]),
        len(event.preempted),
        len(event.finished),
    )


class Ledger:
    """A `LedgerSink` that turns one run into Arrow tables of at most ROW_GROUP rows.

    key: values of the columns that say whose rows these are. write: takes a table's name and its next rows. An
    eviction's row waits until the request is evicted again or has finished, since it tells what became of it.
    """

    def __init__(self, key: dict[str, Any], write: Callable[[str, pa.Table], None]) -> None:
        self._key, self._write = key, write
        self._columns: dict[str, list[Row]] = {name: [[] for _ in _COLUMNS[name]] for name in LEDGER}
        self._evictions: deque[tuple[str, Row]] = deque()  # in order, not written yet
        self._open: dict[str, Row] = {}  # the last eviction of a request, while it may change
        self._told = {"admissions": True, "prefills": True}  # whether the engine has reported them

    def iteration(self, iteration: int, outcome: IterationOutcome, step_ns: int | None) -> None:
        evicted = None if outcome.preempted is None else len(outcome.preempted)
        self._add(
            "iterations",
            (
                iteration,
                *_counts(outcome),
                evicted,
                len(outcome.finished),
                *_state(outcome),
                None if step_ns is None else step_ns / NS,
            ),
        )
        self._happen(iteration, outcome)

    def batch(self, first: int, batch: IterationBatch, times: Sequence[int]) -> None:
        count = len(batch)
        step_s = [(end - start) / NS for start, end in pairwise(times)] if times else [None] * count
        derived = [[0] * count for _ in range(len(_DERIVED))]
        for event in batch.events:
            for column, value in zip(derived, _derived(event), strict=True):
                column[event.place] = value
            self._happen(first + event.place, event)
        said = (batch.issued_tokens, batch.collected_tokens, batch.forward_tokens, [None] * count)
        state = (batch.running, batch.waiting, batch.free_blocks, batch.unused_tokens, step_s)
        columns: tuple[Iterable[Any], ...] = (range(first, first + count), *said, *derived, *state)
        for column, values in zip(self._columns["iterations"], columns, strict=True):
            column.extend(values)
        self._flush_if_full("iterations")

    def _happen(self, iteration: int, happened: Happened) -> None:
        if happened.preempted:
            self._evict(iteration, happened)
        self._told["admissions"] &= happened.admissions is not None
        self._told["prefills"] &= happened.prefills is not None
        for admission in happened.admissions or ():
            self._add("admissions", (iteration, *_admission(admission)))
            self._resume(iteration, admission)
        for prefill in happened.prefills or ():
            self._add("prefills", (iteration, *_prefill(prefill)))
            self._rebuild(prefill)
        for request_id in happened.finished:
            self._open.pop(request_id, None)

    def token_run(self, request_id: str, first: int, tokens: int) -> None:
        self._add("token_runs", (request_id, first, tokens))

    def close(self) -> None:
        """Write what is left; a table without rows too."""
        self._open.clear()
        self._settle()
        for name in LEDGER:
            self._flush(name)

    def _evict(self, iteration: int, outcome: Happened) -> None:
        for event in outcome.evictions or [Eviction(request_id) for request_id in outcome.preempted or ()]:
            row = [iteration, *_eviction(event), None, None, None, None]
            self._open[event.request_id] = row
            self._evictions.append((event.request_id, row))
        self._settle()

    def _resume(self, iteration: int, admission: Admission) -> None:
        row = self._open.get(admission.request_id)
        if row is not None and self._told["admissions"]:
            row[_RESUMED], row[_REBUILT] = iteration, 0 if self._told["prefills"] else None
            row[_RECOVERED], row[_SWAPPED] = admission.recovered_tokens, admission.swapped_tokens

    def _rebuild(self, prefill: Prefill) -> None:
        row = self._open.get(prefill.request_id)
        if row is not None and row[_REBUILT] is not None:
            row[_REBUILT] += prefill.rebuilt_tokens

    def _settle(self) -> None:
        """Hand on the oldest evictions, up to the first that may still change."""
        while self._evictions and self._open.get(self._evictions[0][0]) is not self._evictions[0][1]:
            self._add("evictions", self._evictions.popleft()[1])

    def _add(self, name: str, row: tuple[Any, ...] | Row) -> None:
        for column, value in zip(self._columns[name], row, strict=True):
            column.append(value)
        self._flush_if_full(name)

    def _flush_if_full(self, name: str) -> None:
        if len(self._columns[name][0]) >= ROW_GROUP:
            self._flush(name)

    def _flush(self, name: str) -> None:
        self._write(name, rows_table(name, self._key, dict(zip(_COLUMNS[name], self._columns[name], strict=True))))
        self._columns[name] = [[] for _ in _COLUMNS[name]]


def rows_table(name: str, key: dict[str, Any], columns: dict[str, Any]) -> pa.Table:
    """A table of one point. Not-a-number becomes null: a missing control group is missing, not a value."""
    schema, count = arrow_schema(name), len(next(iter(columns.values())))
    arrays = [
        pa.array(columns[field.name], type=field.type, from_pandas=True)
        if field.name in columns
        else pa.array([key[field.name]] * count, type=field.type)
        for field in schema
    ]
    return pa.table(arrays, schema=schema)
