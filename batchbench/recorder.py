"""Takes a run's iterations one by one: sums them, keeps the few facts that each request needs, passes the rest on."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol

from batchbench.errors import OutcomeRefused
from batchbench.protocol import IterationBatch, IterationEvents, IterationOutcome, RequestSpec

SUMMED = (
    "padded_tokens",
    "prefill_rows",
    "recovered_tokens",
    "shared_tokens",
    "swapped_out_tokens",
    "recomputed_tokens",
    "rebuilt_tokens",
    "thrashes",
    "preemptions",
    "swapped_blocks",
)
Happened = IterationOutcome | IterationEvents
_READ = attrgetter(*SUMMED[:7])
_PER_REQUEST = ("arrived", "admitted", "finished", "arrival_ns", "recomputed", "rebuilt", "recovered", "swapped")
_PER_ITERATION = ("iterations", "start_ns", "end_ns")
_EVENTS = ("runs", "evictions", "resumes")
_NUMBERS = ("issued", "collected", "positions", "busy", "free_sum", "free_samples", "unused_sum", "least_free")
_AFTER_EVICTION = ("recomputed_tokens", "rebuilt_tokens", "thrashes")  # known to be 0 before anybody was evicted


def _integers(values: Sequence[int | float]) -> array[int]:
    return array("q", [int(value) for value in values])


class LedgerSink(Protocol):
    """Where every iteration goes as it happens."""

    def iteration(self, iteration: int, outcome: IterationOutcome, step_ns: int | None) -> None: ...

    def batch(self, first: int, batch: IterationBatch, times: Sequence[int]) -> None: ...

    def token_run(self, request_id: str, first: int, tokens: int) -> None: ...


@dataclass(slots=True)
class Events:
    """Things that happened to requests: whose (its place among the requests), when, and a number of each."""

    request: array[int] = field(default_factory=lambda: array("q"))
    iteration: array[int] = field(default_factory=lambda: array("q"))
    number: array[int] = field(default_factory=lambda: array("q"))

    def add(self, request: int, iteration: int, number: int) -> None:
        self.request.append(request)
        self.iteration.append(iteration)
        self.number.append(number)

    def __len__(self) -> int:
        return len(self.request)


class Recorder:
    """One run, as far as its metrics need it. Sequences over requests are in submission order; -1: not yet.

    runs: a request's tokens in consecutive iterations, from `iteration` on, `number` of them; None where the engine
    does not say whose tokens come. evictions: `number` is what it had generated, -1 if unreported. start_ns and end_ns:
    of every iteration; empty if no time was taken. Raises OutcomeRefused for what cannot have happened.
    """

    def __init__(self, requests: Sequence[RequestSpec], block_size: int, sink: LedgerSink | None = None) -> None:
        count, self._size, self._sink = len(requests), block_size, sink
        self.index = {request.request_id: place for place, request in enumerate(requests)}
        self.arrived, self.admitted, self.finished = (array("q", [-1]) * count for _ in range(3))
        self.arrival_ns = array("q", [0]) * count
        self.recomputed, self.rebuilt, self.recovered, self.swapped = (array("q", [0]) * count for _ in range(4))
        self.runs: Events | None = Events()
        self.evictions, self.resumes = Events(), Events()
        self.iterations, self.start_ns, self.end_ns = array("q"), array("q"), array("q")
        self.issued = self.collected = self.positions = self.busy = 0
        self.free_sum = self.free_samples = self.unused_sum = 0
        self.least_free: int | None = None
        self.copy_s: list[float] | None = []
        self.unsaid = set[str]()  # counters, and kinds of events, that some iteration did not report
        self._sums = dict.fromkeys(SUMMED, 0)
        self._running: set[str] | None = set()
        self._open: dict[str, int] = {}  # request id -> first iteration of the run of tokens under way

    def total(self, name: str) -> int | None:
        """Sum of a counter over the run, None if it was not always reported."""
        return None if name in self.unsaid else self._sums[name]

    # ---- a finished run, kept ------------------------------------------------------------

    def columns(self) -> dict[str, Sequence[int | float]]:
        """With `facts`, all that is left of a finished run: integers, and the seconds of copies."""
        found: dict[str, Sequence[int | float]] = {name: getattr(self, name) for name in _PER_REQUEST + _PER_ITERATION}
        for name in _EVENTS:
            events = getattr(self, name)
            if events is not None:
                found |= {f"{name}.{part}": getattr(events, part) for part in ("request", "iteration", "number")}
        return found if self.copy_s is None else found | {"copy_s": self.copy_s}

    def facts(self) -> dict[str, Any]:
        """The rest: numbers, sums and names."""
        return {
            **{name: getattr(self, name) for name in _NUMBERS},
            "sums": self._sums,
            "unsaid": sorted(self.unsaid),
        }

    @classmethod
    def restored(
        cls,
        requests: Sequence[RequestSpec],
        block_size: int,
        columns: Mapping[str, Sequence[int | float]],
        facts: Mapping[str, Any],
    ) -> Recorder:
        """A run as its `columns` and `facts` tell it. Raises ValueError, KeyError or TypeError if they cannot."""
        found = cls(requests, block_size)
        for name in _PER_REQUEST + _PER_ITERATION:
            setattr(found, name, _integers(columns[name]))
        if any(len(getattr(found, name)) != len(requests) for name in _PER_REQUEST):
            raise ValueError("a run of other requests")
        for name in _EVENTS:
            parts = [columns.get(f"{name}.{part}") for part in ("request", "iteration", "number")]
            setattr(found, name, None if parts[0] is None else Events(*map(_integers, parts)))  # type: ignore[arg-type]
        for name in _NUMBERS:
            setattr(found, name, facts[name])
        found.copy_s = None if "copy_s" not in columns else [float(value) for value in columns["copy_s"]]
        found._sums, found.unsaid = {name: facts["sums"][name] for name in SUMMED}, set(facts["unsaid"])
        return found

    def arrive(self, request_id: str, iteration: int, arrival_ns: int) -> None:
        """It was submitted before that iteration. arrival_ns: on the run's time, where that counts time."""
        place = self.index[request_id]
        self.arrived[place], self.arrival_ns[place] = iteration, arrival_ns

    def add(self, iteration: int, outcome: IterationOutcome, start_ns: int | None = None, end_ns: int = 0) -> None:
        """One iteration. start_ns: None if it took no time worth telling."""
        self._check(iteration, outcome)
        self._count(outcome)
        self._events(iteration, outcome)
        self._tokens(iteration, outcome, outcome.collected_tokens)
        self.iterations.append(iteration)
        if start_ns is not None:
            self.start_ns.append(start_ns)
            self.end_ns.append(end_ns)
        if self._sink is not None:
            self._sink.iteration(iteration, outcome, None if start_ns is None else end_ns - start_ns)

    def add_batch(self, first: int, batch: IterationBatch, times: Sequence[int]) -> None:
        """Many iterations. times: when the first began, and when each ended; empty if they took no time."""
        count = len(batch)
        self.issued += sum(batch.issued_tokens)
        self.collected += sum(batch.collected_tokens)
        self.positions += sum(batch.forward_tokens)
        self.busy += count - batch.issued_tokens.count(0)
        self._count_free(count, sum(batch.free_blocks), min(batch.free_blocks))
        self.unused_sum += sum(batch.unused_tokens)
        self.unsaid.add("padded_tokens")
        self.copy_s = None
        told = 0
        for event in batch.events:
            iteration = first + event.place
            self._check_between(first, batch, told, event.place)
            told = event.place + 1
            self._check(iteration, event)
            self._count_events(event)
            self._events(iteration, event)
            self._tokens(iteration, event, batch.collected_tokens[event.place])
        self._check_between(first, batch, told, count)
        self.iterations.extend(range(first, first + count))
        self.start_ns.extend(times[:-1])
        self.end_ns.extend(times[1:])
        if self._sink is not None:
            self._sink.batch(first, batch, times)

    # ---- one iteration -------------------------------------------------------------------

    def _count(self, outcome: IterationOutcome) -> None:
        self.issued += outcome.issued_tokens
        self.collected += outcome.collected_tokens
        self.positions += outcome.positions
        self.busy += outcome.issued_tokens > 0
        for name, value in zip(SUMMED, _READ(outcome), strict=False):
            if value:
                self._sums[name] += value
            elif value is None:
                self._unsaid(name, outcome)
        if outcome.forward_tokens is None:
            self.unsaid.add("forward_tokens")
        if outcome.free_blocks is None:
            self.unsaid.add("free_blocks")
        else:
            self._count_free(1, outcome.free_blocks, outcome.free_blocks)
        if outcome.unused_tokens is None:
            self.unsaid.add("unused_tokens")
        else:
            self.unused_sum += outcome.unused_tokens
        if outcome.copy_s is None:
            self.copy_s = None
        elif outcome.copy_s and self.copy_s is not None:
            self.copy_s.append(outcome.copy_s)

    def _count_events(self, event: IterationEvents) -> None:
        """What an IterationOutcome would have summed up."""
        sums = self._sums
        if event.prefills:
            sums["prefill_rows"] += len(event.prefills)
            sums["recomputed_tokens"] += sum([p.positions for p in event.prefills if p.resumed])
            sums["rebuilt_tokens"] += sum([p.rebuilt_tokens for p in event.prefills])
        for admission in event.admissions:
            sums["recovered_tokens"] += admission.recovered_tokens or 0
            sums["shared_tokens"] += admission.shared_tokens or 0
        for eviction in event.evictions:
            if eviction.reclaim == "swap":
                sums["swapped_out_tokens"] += eviction.cached_tokens or 0

    def _count_free(self, samples: int, free: int, least: int) -> None:
        self.free_samples += samples
        self.free_sum += free
        self.least_free = least if self.least_free is None else min(self.least_free, least)

    def _unsaid(self, name: str, outcome: IterationOutcome) -> None:
        evicted = len(self.evictions) or outcome.preempted is None or outcome.preempted or "preemptions" in self.unsaid
        if evicted or name not in _AFTER_EVICTION:
            self.unsaid.add(name)

    def _events(self, iteration: int, outcome: Happened) -> None:
        if outcome.preempted is None:
            self.unsaid.update(("preemptions", "thrashes"))
        elif outcome.preempted:
            self._evict(iteration, outcome)
        if outcome.admissions is None:
            self.unsaid.update(("admissions", "swapped_blocks"))
        for admission in outcome.admissions or ():
            place = self.index[admission.request_id]
            if self.admitted[place] < 0:
                self.admitted[place] = iteration
            else:
                self.resumes.add(place, iteration, 0)
                self._add_or_miss("recovered", place, admission.recovered_tokens)
                self._add_or_miss("swapped", place, admission.swapped_tokens)
            self._count_blocks(admission.swapped_tokens)
        if outcome.prefills is None:
            self.unsaid.add("prefills")
        for prefill in outcome.prefills or ():
            place = self.index[prefill.request_id]
            self.rebuilt[place] += prefill.rebuilt_tokens
            if prefill.resumed:
                self.recomputed[place] += prefill.positions
        for request_id in outcome.finished:
            self.finished[self.index[request_id]] = iteration

    def _evict(self, iteration: int, outcome: Happened) -> None:
        details = outcome.evictions
        for place, request_id in enumerate(outcome.preempted or ()):
            event = None if details is None else details[place]
            generated = None if event is None else event.generated_tokens
            self.evictions.add(self.index[request_id], iteration, -1 if generated is None else generated)
            self._sums["preemptions"] += 1
            if event is None or event.thrash is None:
                self.unsaid.add("thrashes")
            else:
                self._sums["thrashes"] += event.thrash
            if event is None:
                self.unsaid.add("swapped_blocks")
            elif event.reclaim == "swap":
                self._count_blocks(event.cached_tokens)

    def _count_blocks(self, tokens: int | None) -> None:
        """Whole blocks copied to the swap pool or back."""
        if tokens is None:
            self.unsaid.add("swapped_blocks")
        elif tokens:
            self._sums["swapped_blocks"] += -(-tokens // self._size)

    def _add_or_miss(self, name: str, place: int, value: int | None) -> None:
        """To a request's own sum; -1 once it is not known."""
        sums: array[int] = getattr(self, name)
        sums[place] = -1 if value is None or sums[place] < 0 else sums[place] + value

    def _tokens(self, iteration: int, outcome: Happened, collected: int) -> None:
        """Close the runs of tokens that end, open those that begin, and compare with what was collected."""
        if outcome.began is None or outcome.paused is None or outcome.preempted is None:
            self.runs = None
        if self.runs is None:
            return
        for request_id in outcome.preempted or ():
            self._close(request_id, iteration)
        for request_id in outcome.paused or ():
            if request_id not in self._open:
                raise self._refuse(iteration, f"{request_id!r} gets no more tokens for now, but got none before")
            self._close(request_id, iteration)
        for request_id in outcome.began or ():
            if request_id in self._open or request_id not in self.index:
                raise self._refuse(iteration, f"{request_id!r} begins to get tokens, but gets some or is unknown")
            self._open[request_id] = iteration
        if len(self._open) != collected:
            raise self._refuse_tokens(iteration, collected)
        for request_id in outcome.finished:
            self._close(request_id, iteration + 1)

    def _close(self, request_id: str, end: int) -> None:
        first = self._open.pop(request_id, None)
        if first is not None and self.runs is not None:
            self.runs.add(self.index[request_id], first, end - first)
            if self._sink is not None:
                self._sink.token_run(request_id, first, end - first)

    # ---- what cannot be ------------------------------------------------------------------

    def _refuse(self, iteration: int, why: str) -> OutcomeRefused:
        return OutcomeRefused(f"iteration {iteration}: {why}")

    def _refuse_tokens(self, iteration: int, collected: int) -> OutcomeRefused:
        return self._refuse(iteration, f"{collected} tokens are collected, {len(self._open)} requests get one")

    def _check(self, iteration: int, outcome: Happened) -> None:
        """Evictions come first in an iteration, then admissions, then last tokens."""
        running, finished = self._running, outcome.finished
        if outcome.admissions is None:
            self._running = running = None
        for request_id in outcome.preempted or ():
            if self.finished[self._place(iteration, request_id)] >= 0:
                raise self._refuse(iteration, f"{request_id!r} is evicted after it finished")
            self._leaves(iteration, request_id, "is evicted")
        for admission in outcome.admissions or ():
            self._place(iteration, admission.request_id)
            if running is not None:
                if admission.request_id in running:
                    raise self._refuse(iteration, f"{admission.request_id!r} is admitted, but was running")
                running.add(admission.request_id)
        for prefill in outcome.prefills or ():
            self._place(iteration, prefill.request_id)
        for place, request_id in enumerate(finished):
            if self.finished[self._place(iteration, request_id)] >= 0 or request_id in finished[:place]:
                raise self._refuse(iteration, f"{request_id!r} finishes twice")
            self._leaves(iteration, request_id, "finishes")

    def _check_between(self, first: int, batch: IterationBatch, begin: int, end: int) -> None:
        """In iterations without events the same requests get a token as before."""
        between = batch.collected_tokens[begin:end]
        if self.runs is not None and between.count(len(self._open)) < len(between):
            place = next(n for n, collected in enumerate(between) if collected != len(self._open))
            raise self._refuse_tokens(first + begin + place, between[place])

    def _place(self, iteration: int, request_id: str) -> int:
        """Of a request that has arrived by then."""
        place = self.index.get(request_id)
        if place is None:
            raise self._refuse(iteration, f"{request_id!r} was never submitted")
        if not 0 <= self.arrived[place] <= iteration:
            raise self._refuse(iteration, f"{request_id!r} is ahead of its arrival")
        return place

    def _leaves(self, iteration: int, request_id: str, how: str) -> None:
        if self._running is None:
            return
        if request_id not in self._running:
            raise self._refuse(iteration, f"{request_id!r} {how}, but was not running")
        self._running.remove(request_id)
