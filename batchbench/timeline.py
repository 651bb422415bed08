"""One point of a result as a timeline: tracks of slots and of requests, counters, and arrows, in order of time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from batchbench.errors import ResultError, UsageError
from batchbench.instants import ITERATION_NS, Instants, Ints, TimeUnit
from batchbench.phases import Kind, phases_of
from batchbench.results import Result
from batchbench.stays import PREFILL, RESUME, SWAPPED, stays_of
from batchbench.trace_events import (
    Event,
    Track,
    arrow,
    complete,
    counter,
    instant,
    process_name,
    thread_name,
)

Timed = tuple[int, Event]  # nanoseconds, and what happens then
_POOL, _SLOTS, _REQUESTS = 1, 2, 3  # the groups of tracks
_FIRST = 10  # of their numbers: none may be that of a group, which readers take for the group itself
_ROWS = 8192  # whose events are made together
_DECODE, _HELD = -1, -2  # beside the works that a stay begins with
_WORKS = {PREFILL: "prefill", RESUME: "resume", SWAPPED: "swap in", _DECODE: "", _HELD: "finished, held"}
_WAITING = (Kind.queued, Kind.returning)
_COLOURS = {
    Kind.queued: "grey",
    Kind.returning: "thread_state_iowait",
    Kind.rebuilding: "terrible",
    Kind.prefill: "thread_state_runnable",
    Kind.decode: "thread_state_running",
    Kind.paused: "white",
    Kind.running: "thread_state_running",
}  # by the names that chrome://tracing has for them: grey, orange, red, blue, green
_COUNTERS = {"pool": ("free_blocks", "used_blocks"), "queue": ("running", "waiting"), "forward": ("positions",)}
_STATE = ("free_blocks", "running", "waiting", "forward_tokens")
_REQUEST = ("prompt_tokens", "output_tokens", "arrival_iteration", "finished_iteration", "latency_iterations",
            "ttft_iterations", "preemptions", "recomputed_tokens", "rebuilt_tokens")  # fmt: skip
_SECONDS = {
    "iterations": "microseconds inside the engine, measured",
    "virtual": "microseconds, modelled",
    "wall": "microseconds, real; when an iteration began is known where somebody arrived or finished",
}


@dataclass(frozen=True, slots=True)
class Timeline:
    """metadata: what a file says of itself. events: in order of time, made while they are taken, once."""

    metadata: dict[str, Any]
    events: Iterator[Event]


def timeline(
    result: Result, point: int, unit: TimeUnit | None = None, window: tuple[int, int | None] = (0, None)
) -> Timeline:
    """Every stay, request, iteration and eviction of one point, as events.

    unit: of the time axis; seconds where the point has them, if None. window: the first iteration, and the one to stop
    before; a slice that lies in it by a part is there whole. Raises UsageError for seconds that there are not, or a
    window without an iteration; ResultError if two requests would be in one slot at once.
    """
    drawn = _Drawn(result, point, unit, window)
    return Timeline(drawn.metadata(), drawn.events())


class _Drawn:
    """One point, on one time axis."""

    def __init__(self, result: Result, point: int, unit: TimeUnit | None, window: tuple[int, int | None]) -> None:
        self.result, self.point, self.about = result, point, result.rows("pools")[point]
        self.time = Instants(result, point, unit)
        whole = int(self.time.iterations[-1]) + 1
        self.first, self.stop = window[0], whole if window[1] is None else min(window[1], whole)
        if not 0 <= self.first < self.stop:
            raise UsageError(
                f"no iteration from {self.first} to before {window[1] or whole}: there are 0 to {whole - 1}"
            )
        self.requests = result.point("requests", point, ["request_id", "arrival_iteration", "finished_iteration"])
        self.names: list[str] = self.requests["request_id"].to_list()
        self.arrived, self.finished = (self.requests[f"{n}_iteration"].to_numpy() for n in ("arrival", "finished"))
        self.stays = None if self.about["preemptions"] is None else stays_of(result, point)
        self.used_slots = 0 if self.stays is None else int(self.stays.slot.max()) + 1
        self.phases = phases_of(result, point, self.stays)
        self._require_possible()

    def _require_possible(self) -> None:
        """Raise ResultError for tables in which somebody does two things at once, or something outside its time."""
        s, p = self.stays, self.phases
        lives = np.arange(len(self.names)), self.arrived, self.finished + 1
        inside = (p.start >= self.arrived[p.request]) & (p.end <= self.finished[p.request] + 1)
        slots = True if s is None else _apart(s.slot, s.start, s.held)
        if not (_apart(*lives) and inside.all() and _apart(p.request, p.start, p.end) and slots):
            raise ResultError("damaged file: the tables have a request or a slot that does two things at once")

    # ---- what the file says of itself ----------------------------------------------------

    def metadata(self) -> dict[str, Any]:
        about = self.about
        return {
            "made_by": "batchbench trace",
            "scenario": self.result.run["scenario"]["name"],
            **{name: about[name] for name in ("point", "pool_blocks", "choices", "clock")},
            "time": self.time.unit,
            "unit": _SECONDS.get(about["clock"], "microseconds")
            if self.time.unit == "s"
            else f"{ITERATION_NS // 1000} us per iteration",
            "from_iteration": self.first,
            "to_before_iteration": self.stop,
            "not_reported": self._missing(),
        }

    def _missing(self) -> list[str]:
        """What would be drawn if the engine reported it."""
        frame = self.result.point("iterations", self.point, _STATE)
        missing = [name for name in _STATE if frame[name].isna().any()]
        missing += ["evictions"] if self.about["preemptions"] is None else []
        missing += ["slots"] if self.stays is None else []
        return missing + ([] if (self.phases.kind == Kind.decode).any() else ["whose tokens come"])

    # ---- events --------------------------------------------------------------------------

    def events(self) -> Iterator[Event]:
        """Names first; of what happens at one time, a slice comes before what it holds."""
        yield from self._names()
        sources = (self._slices(), self._wholes(), self._phases(), self._prefills(), self._evictions(),
                   self._leave(), self._arrive(), self._states(), self._forwards())  # fmt: skip
        for _, event in heapq.merge(*sources, key=itemgetter(0)):
            yield event

    def _names(self) -> Iterator[Event]:
        groups = [(_POOL, "KV pool and queue"), (_SLOTS, "slots"), (_REQUESTS, "requests")]
        for group, name in groups if self.stays is not None else (groups[0], groups[2]):
            yield from process_name(Track(group, group), name, group)
        if self.stays is not None:
            for slot in np.unique(self.stays.slot[self._kept(self.stays.start, self.stays.held)]).tolist():
                yield from thread_name(self._slot(slot), f"slot {slot}", slot)
        for place in np.flatnonzero(self._kept(self.arrived, self.finished + 1)).tolist():
            yield from thread_name(self._request(place), self.names[place], place)

    def _slices(self) -> Iterator[Timed]:
        """Of each stay, the work that it begins with, the rest, and what a static batch holds it for."""
        if self.stays is None:
            return
        s, time = self.stays, self.time
        begun = np.minimum(s.start + s.first, s.end)
        leaves = np.where(s.evicted, time.begin(s.end), time.end(s.end - 1))
        between = np.where(begun < s.end, time.begin(begun), leaves)
        fate = np.where(s.evicted, "evicted", "finished")
        tiles = [
            (s.begins, s.start, begun, time.begin(s.start), between),
            (np.full(len(s), _DECODE), begun, s.end, between, leaves),
            (np.full(len(s), _HELD), s.end, s.held, leaves, time.end(s.held - 1)),
        ]
        parts = []
        for work, first, stop, opens, closes in tiles:
            some = (first < stop) & self._kept(first, stop)
            parts.append([column[some] for column in (opens, closes, s.slot, s.request, work, first, stop, fate)])
        for opens, closes, slot, request, work, first, stop, fate in _rows(
            *map(np.concatenate, zip(*parts, strict=True))
        ):
            name = self.names[request]
            args = {"request": name, "iteration": first, "iterations": stop - first, "stay_ends": fate}
            label = f"{name} {_WORKS[work]}" if work != _DECODE else name
            yield opens, complete(self._slot(slot), "stay", label, opens, closes, args)

    def _wholes(self) -> Iterator[Timed]:
        """Every request, from its arrival to its last token."""
        table = self.result.files.point("requests", self.point, _REQUEST)
        kept = np.flatnonzero(self._kept(self.arrived, self.finished + 1))
        opens, closes = self._arrivals()[kept], self.time.end(self.finished[kept])
        for start, end, place, said in _rows(opens, closes, kept, said=table.take(kept)):
            yield start, complete(self._request(place), "request", self.names[place], start, end, said)

    def _phases(self) -> Iterator[Timed]:
        p = self.phases
        last = self.finished[p.request]
        opens = np.where(p.kind == Kind.queued, self._arrivals()[p.request], self.time.begin(p.start))
        closes = np.where(p.end > last, self.time.end(last), self.time.begin(p.end))
        kept = self._kept(p.start, p.end) & ((p.start < p.end) | (opens < closes))
        columns = (opens, closes, p.request, p.kind, p.start, p.end - p.start)
        for start, end, place, kind, first, count in _rows(*(column[kept] for column in columns)):
            category = "waiting" if kind in _WAITING else "running"
            args = {"iteration": first, "iterations": count}
            yield start, complete(self._request(place), category, kind, start, end, args, _COLOURS[Kind(kind)])

    def _prefills(self) -> Iterator[Timed]:
        """Rows that computed a prompt or a resumed context, an iteration each."""
        at, places, said = self._within("prefills", ("iteration", "positions", "rebuilt_tokens", "resumed"))
        for start, end, place, args in _rows(self.time.begin(at), self.time.end(at), places, said=said):
            name = "resume row" if args["resumed"] else "prompt row"
            yield start, complete(self._request(place), "forward", name, start, end, args)

    def _evictions(self) -> Iterator[Timed]:
        names = self.result.files["evictions"].schema.names
        leading = ("point", "pool_blocks", "choices", "numerics", "request_id")
        at, places, said = self._within("evictions", tuple(name for name in names if name not in leading))
        for start, place, args in _rows(self.time.begin(at), places, said=said):
            yield start, instant(self._request(place), "eviction", "evicted", start, args)

    def _leave(self) -> Iterator[Timed]:
        """Arrows from each evicted stay, at its very end and yet in it: a reader looks for the slice that is there."""
        out, _ = self._resumed()
        if self.stays is not None:
            start, end = self.time.begin(self.stays.start[out]), self.time.begin(self.stays.end[out])
            for at, slot, number in _rows(np.maximum(end - 1, start), self.stays.slot[out], np.arange(len(out))):
                yield at, arrow(self._slot(slot), "eviction", "evicted, resumed", at, number, arrives=False)

    def _arrive(self) -> Iterator[Timed]:
        """And to the stay that follows, as near to its start."""
        _, back = self._resumed()
        if self.stays is not None:
            start, first_end = (self.time.begin(self.stays.start[back]), self.time.end(self.stays.start[back]))
            times = start + (first_end - start > 1)
            for at, slot, number in _rows(times, self.stays.slot[back], np.arange(len(back))):
                yield at, arrow(self._slot(slot), "eviction", "evicted, resumed", at, number, arrives=True)

    def _states(self) -> Iterator[Timed]:
        """As each iteration left the pool and the queue."""
        frame = self._iterations(["free_blocks", "running", "waiting"])
        frame["used_blocks"] = self.about["pool_blocks"] - frame["free_blocks"]
        times = self.time.end(frame["iteration"].to_numpy())
        parts = [_changes(name, times, frame, _COUNTERS[name]) for name in ("pool", "queue")]
        return heapq.merge(*parts, key=itemgetter(0))

    def _forwards(self) -> Iterator[Timed]:
        """Positions of each forward; 0 between two iterations that do not touch, and after the last."""
        frame = self._iterations(["forward_tokens"])
        at = frame["iteration"].to_numpy()
        begin, end = self.time.begin(at), self.time.end(at)
        apart = end[np.append(end[:-1] < begin[1:], True)]
        times = np.append(begin, apart)
        values = pd.concat([frame["forward_tokens"], pd.Series(0, index=range(len(apart)))])
        order = np.argsort(times, kind="stable")
        return _changes("forward", times[order], pd.DataFrame({"positions": values.iloc[order]}), _COUNTERS["forward"])

    # ---- what they are made of -----------------------------------------------------------

    def _slot(self, slot: int) -> Track:
        return Track(_SLOTS, _FIRST + slot)

    def _request(self, place: int) -> Track:
        return Track(_REQUESTS, _FIRST + self.used_slots + place)

    def _kept(self, start: Ints, end: Ints) -> NDArray[np.bool_]:
        """What lies in the window, at least by a part."""
        return (end > self.first) & (start < self.stop)

    def _iterations(self, columns: list[str]) -> pd.DataFrame:
        frame = self.result.point("iterations", self.point, ["iteration", *columns])
        return frame[(frame["iteration"] >= self.first) & (frame["iteration"] < self.stop)]

    def _within(self, name: str, columns: tuple[str, ...]) -> tuple[Ints, Ints, pa.Table]:
        """Of a table's rows in the window: iterations, places of their requests, and these columns."""
        table = self.result.files.point(name, self.point, ["request_id", *columns])
        at = table["iteration"].to_numpy()
        kept = np.flatnonzero((at >= self.first) & (at < self.stop))
        places = pd.Index(self.names).get_indexer(pd.Index(table["request_id"].to_pandas()))
        return at[kept], places[kept].astype(np.int64), table.select(columns).take(kept)

    def _arrivals(self) -> Ints:
        return self.time.arrival(self.result.point("requests", self.point, ["arrival_iteration", "arrival_s"]))

    def _resumed(self) -> tuple[Ints, Ints]:
        """Places of the stays that an eviction ended, and of those that resumed them; where both are in the window."""
        if self.stays is None:
            return np.array([], dtype=np.int64), np.array([], dtype=np.int64)
        s = self.stays
        order = np.lexsort((s.start, s.request))
        out, back = order[:-1], order[1:]
        both = s.evicted[out] & (s.request[out] == s.request[back])
        both &= (s.end[out] > self.first) & (s.start[back] < self.stop)
        return out[both], back[both]


def _changes(name: str, times: Ints, frame: pd.DataFrame, columns: tuple[str, ...]) -> Iterator[Timed]:
    """A counter of those columns that are known throughout, wherever one of them changes."""
    known = [column for column in columns if not frame[column].isna().any()]
    values = frame[known].to_numpy(dtype=np.int64)
    changed = np.flatnonzero(np.append(bool(known), (values[1:] != values[:-1]).any(axis=1)))
    for at, *row in _rows(times[changed], *values[changed].T):
        yield at, counter(Track(_POOL, _POOL), "iterations", name, at, dict(zip(known, row, strict=True)))


def _rows(*columns: NDArray[Any], said: pa.Table | None = None) -> Iterator[tuple[Any, ...]]:
    """Rows in order of the first column, as Python's numbers; `said` as a dictionary without its nulls, at the end."""
    order = np.argsort(columns[0], kind="stable")
    for start in range(0, len(order), _ROWS):
        some = order[start : start + _ROWS]
        lists = [column[some].tolist() for column in columns]
        if said is not None:
            lists.append([_known(row) for row in said.take(some).to_pylist()])
        yield from zip(*lists, strict=True)


def _known(row: Mapping[str, Any]) -> Event:
    return {name: value for name, value in row.items() if value is not None}


def _apart(track: Ints, start: Ints, end: Ints) -> bool:
    """Whether, on each track, nothing begins before what is there has ended."""
    order = np.lexsort((end, start, track))
    track, start, end = track[order], start[order], end[order]
    overlaps = (track[1:] == track[:-1]) & (start[1:] < end[:-1])
    return not (overlaps.any() or (end < start).any() or (start < 0).any())
