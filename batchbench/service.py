"""What a caller sees of a run: waiting for the first token, between tokens, to the end; and what evictions add to it.

Everything is computed from the record of one run, as arrays in submission order. Iterations are counted with both ends;
seconds run from the arrival to the end of an iteration. A figure that the engine does not report, or that the clock
does not take, is None.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchbench.clocks import NS
from batchbench.recorder import Events
from batchbench.timing import ContinuousTiming

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Slo:
    """Service level objectives, in seconds: what a request must stay within. None: whatever it takes."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None


@dataclass(frozen=True, slots=True)
class Parts:
    """A request's latency in four parts that add up to it.

    queued: before its first admission. returning: evicted, waiting for a slot and blocks. rebuilding: admitted again,
    before it gets a new token (in seconds, the iteration that brings it included). decoding: the rest.
    """

    queued: Ints
    returning: Ints
    rebuilding: Ints
    decoding: Ints


class Service:
    """The figures of one run."""

    def __init__(self, timing: ContinuousTiming) -> None:
        self._timing, self._record = timing, timing.record
        self.outputs: Ints = np.array([request.output_tokens for request in timing.requests], dtype=np.int64)

    # ---- when ----------------------------------------------------------------------------

    @cached_property
    def arrived(self) -> Ints:
        return np.asarray(self._record.arrived, dtype=np.int64)

    @cached_property
    def arrival_ns(self) -> Ints:
        return np.asarray(self._record.arrival_ns, dtype=np.int64)

    @cached_property
    def finished(self) -> Ints:
        return np.asarray(self._record.finished, dtype=np.int64)

    @cached_property
    def admitted(self) -> Ints | None:
        """Iteration of each first admission; None where the engine does not report admissions."""
        found = np.asarray(self._record.admitted, dtype=np.int64)
        return None if "admissions" in self._record.unsaid or (found < 0).any() else found

    @cached_property
    def first_token(self) -> Ints | None:
        """Iteration of each first token, which no eviction restarts. None where it is not told whose tokens come."""
        if self._record.runs is None:
            return None
        runs, first = self._record.runs, np.full(len(self.outputs), np.iinfo(np.int64).max)
        np.minimum.at(first, np.asarray(runs.request), np.asarray(runs.iteration))
        return first

    def start_ns(self, iterations: Ints) -> Ints:
        return self._at(self._record.start_ns, iterations)

    def end_ns(self, iterations: Ints) -> Ints:
        return self._at(self._record.end_ns, iterations)

    def _at(self, times: Any, iterations: Ints) -> Ints:
        places = np.searchsorted(np.asarray(self._record.iterations), iterations)
        found: Ints = np.asarray(times, dtype=np.int64)[places]
        return found

    @cached_property
    def duration_s(self) -> float | None:
        """Seconds from the first arrival to the last token."""
        if not self._timing.timed:
            return None
        return (int(self.end_ns(self.finished).max()) - int(self.arrival_ns.min())) / NS

    # ---- how long, in iterations and in seconds ------------------------------------------

    @cached_property
    def queued(self) -> Ints | None:
        """Iterations before the first admission."""
        return None if self.admitted is None else self.admitted - self.arrived

    @cached_property
    def queued_s(self) -> Floats | None:
        """Seconds before the iteration of the first admission began."""
        return self._seconds(self.admitted, self.start_ns)

    @cached_property
    def ttft(self) -> Ints | None:
        """Iterations to the first token, its own included."""
        return None if self.first_token is None else self.first_token - self.arrived + 1

    @cached_property
    def ttft_s(self) -> Floats | None:
        return self._seconds(self.first_token, self.end_ns)

    @cached_property
    def latency(self) -> Ints:
        """Iterations to the last token, both ends included."""
        return self.finished - self.arrived + 1

    @cached_property
    def latency_s(self) -> Floats | None:
        return self._seconds(self.finished, self.end_ns)

    @cached_property
    def tpot(self) -> Floats | None:
        """Iterations per token after the first; not a number for an output of one."""
        return None if self.ttft is None else self._per_token(self.latency - self.ttft)

    @cached_property
    def tpot_s(self) -> Floats | None:
        if self.latency_s is None or self.ttft_s is None:
            return None
        return self._per_token(self.latency_s - self.ttft_s)

    @cached_property
    def gaps(self) -> tuple[Ints, Ints] | None:
        """Iterations between a request's consecutive tokens, over all requests: (values, how many of each)."""
        if self._record.runs is None:
            return None
        between = self._between_runs()[2]
        within = int(self.outputs.sum()) - len(self._record.runs)
        return np.append(between, 1), np.append(np.ones_like(between), within)

    @cached_property
    def gaps_s(self) -> tuple[Floats, Ints] | None:
        """The same in seconds, from end of iteration to end of iteration."""
        if self._record.runs is None or not self._timing.timed:
            return None
        ends = np.asarray(self._record.end_ns, dtype=np.int64)
        last, first, _ = self._between_runs()
        between = (self.end_ns(first) - self.end_ns(last)) / NS
        within = np.diff(ends, prepend=ends[:1]) / NS
        return np.append(between, within), np.append(np.ones_like(first), self._continuing())

    def _continuing(self) -> Ints:
        """Of each iteration, how many requests got a token that got one in the iteration before, too."""
        runs, iterations = self._record.runs, np.asarray(self._record.iterations)
        assert runs is not None
        change = np.zeros(len(iterations) + 1, dtype=np.int64)
        first, number = np.asarray(runs.iteration), np.asarray(runs.number)
        np.add.at(change, np.searchsorted(iterations, first) + 1, 1)
        np.add.at(change, np.searchsorted(iterations, first) + number, -1)
        return np.cumsum(change[:-1])

    def _between_runs(self) -> tuple[Ints, Ints, Ints]:
        """Wherever a request's tokens pause: the iterations before and after, and the distance."""
        runs = self._record.runs
        assert runs is not None
        request, first, number = (np.asarray(column, dtype=np.int64) for column in _columns(runs))
        order = np.lexsort((first, request))
        request, first, last = request[order], first[order], (first + number - 1)[order]
        same = request[1:] == request[:-1]
        return last[:-1][same], first[1:][same], (first[1:] - last[:-1])[same]

    def _seconds(self, iterations: Ints | None, time: Callable[[Ints], Ints]) -> Floats | None:
        """From each request's arrival to that time of its iteration."""
        if iterations is None or not self._timing.timed:
            return None
        return (time(iterations) - self.arrival_ns) / NS

    def _per_token(self, spent: NDArray[Any]) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.outputs > 1, spent / (self.outputs - 1), np.nan)

    # ---- what a latency is made of -------------------------------------------------------

    @cached_property
    def parts(self) -> Parts | None:
        """In iterations; None where the engine does not report what it takes."""
        absences = self._absences()
        if absences is None or self.queued is None:
            return None
        request, evicted, resumed, end, _ = absences
        return self._parts(self.queued, self.latency, request, resumed - evicted, end - resumed)

    @cached_property
    def parts_ns(self) -> Parts | None:
        """In nanoseconds; None also where no time was taken."""
        absences = self._absences()
        if absences is None or self.admitted is None or not self._timing.timed:
            return None
        request, evicted, resumed, end, brings_token = absences
        queued = self.start_ns(self.admitted) - self.arrival_ns
        back = self.start_ns(resumed)
        rebuilt = np.where(brings_token, self.end_ns(end), self.start_ns(end))
        whole = self.end_ns(self.finished) - self.arrival_ns
        return self._parts(queued, whole, request, back - self.start_ns(evicted), rebuilt - back)

    def _parts(self, queued: Ints, whole: Ints, request: Ints, returning: Ints, rebuilding: Ints) -> Parts:
        """returning, rebuilding: of every absence of these requests."""
        away, back = np.zeros_like(whole), np.zeros_like(whole)
        np.add.at(away, request, returning)
        np.add.at(back, request, rebuilding)
        return Parts(queued, away, back, whole - queued - away - back)

    def _absences(self) -> tuple[Ints, Ints, Ints, Ints, NDArray[np.bool_]] | None:
        """Of every eviction: whose, its iteration, that of the resume, that in which rebuilding ended, and whether that
        brought a token, or else the next eviction.
        """
        runs = self._record.runs
        if runs is None or self._timing.preemptions is None or "admissions" in self._record.unsaid:
            return None
        evictions, resumes, tokens = map(_by_request, (self._record.evictions, self._record.resumes, runs))
        found = []
        for request, out in evictions.items():
            mine, back = tokens.get(request, []), resumes.get(request, [])
            for evicted, resumed, again in zip(out, back, [*out[1:], None], strict=True):
                token = bisect_left(mine, resumed)
                if again is not None and (token == len(mine) or mine[token] >= again):
                    found.append((request, evicted, resumed, again, False))
                else:
                    found.append((request, evicted, resumed, mine[token], True))
        columns = np.array(found, dtype=np.int64).reshape(-1, 5).T
        return columns[0], columns[1], columns[2], columns[3], columns[4].astype(bool)

    # ---- objectives ----------------------------------------------------------------------

    def within(self, slo: Slo) -> NDArray[np.bool_] | None:
        """Which requests kept every objective; None if one is not known. An output of one has no TPOT to break."""
        kept = np.ones(len(self.outputs), dtype=bool)
        for limit, values in ((slo.ttft_s, self.ttft_s), (slo.tpot_s, self.tpot_s), (slo.e2e_s, self.latency_s)):
            if limit is not None and values is None:
                return None
            if limit is not None and values is not None:
                kept &= ~(values > limit)
        return kept


def percentiles(values: NDArray[Any], counts: Ints | None = None, shares: Sequence[int] = PERCENTILES) -> list[float]:
    """The smallest value that at least so many percent do not exceed, for each of the shares (nearest rank).

    Not-a-number is left out; of no values, not a number. counts: how often each value occurs.
    """
    counts = np.ones(len(values), dtype=np.int64) if counts is None else counts
    known = ~np.isnan(values.astype(np.float64)) & (counts > 0)
    values, counts = values[known], counts[known]
    if not len(values):
        return [math.nan] * len(shares)
    order = np.argsort(values, kind="stable")
    upto = np.cumsum(counts[order])
    ranks = [-(-p * int(upto[-1]) // 100) for p in shares]
    return [float(values[order][np.searchsorted(upto, rank)]) for rank in ranks]


def _columns(events: Events) -> tuple[Any, Any, Any]:
    return events.request, events.iteration, events.number


def _by_request(events: Events) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for request, iteration in zip(events.request, events.iteration, strict=True):
        found.setdefault(request, []).append(iteration)
    return {request: sorted(iterations) for request, iterations in found.items()}
