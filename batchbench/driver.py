"""Drives one engine through one workload, and is the only one to time it."""

from __future__ import annotations

import gc
import heapq
import math
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from operator import add, attrgetter

from batchbench.clocks import NS, IterationCost, RunClock, run_clock
from batchbench.errors import BatchbenchError, EngineFailed, OutcomeRefused, UsageError
from batchbench.lazy_prompts import Joined, Repeated
from batchbench.protocol import (
    BenchEngine,
    Choices,
    Clock,
    IterationBatch,
    IterationOutcome,
    Point,
    RequestSpec,
    Text,
    Until,
    WorkloadClock,
    not_counts,
)
from batchbench.recorder import LedgerSink, Recorder
from batchbench.timing import ContinuousTiming

STRETCH = 65_536  # most iterations that are run at once, so that what is said of each fits in memory
STALLED_ITERATIONS = 1000  # without a row: the engine is not going anywhere


@dataclass(frozen=True, slots=True)
class Pacing:
    """The clock that a workload's arrivals are counted on. cost: what a virtual iteration takes."""

    clock: WorkloadClock = "iterations"
    cost: IterationCost | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run may take at most, looked at between iterations; None: whatever it takes.

    max_iterations: of those that the engine ran. max_s: real seconds, waiting and the harness's own work included.
    """

    max_iterations: int | None = None
    max_s: float | None = None


class RunObserver:
    """Told of a run's progress between two iterations, where its time is nobody's latency; override what is wanted."""

    def on_iteration(self, iteration: int, outcome: IterationOutcome) -> None:
        """An iteration is done."""

    def on_batch(self, first: int, batch: IterationBatch) -> None:
        """Iterations are done, from that one on."""


def run_workload(
    engine: BenchEngine,
    requests: Sequence[RequestSpec],
    *,
    clock: Clock = time.perf_counter,
    pacing: Pacing | None = None,
    observer: RunObserver | None = None,
    sink: LedgerSink | None = None,
    choices: Choices = (),
    batches: bool = True,
    limits: Limits | None = None,
) -> ContinuousTiming:
    """Submit every request at its arrival, step until all are done, collect their texts.

    clock: this machine's seconds. pacing: what arrivals are counted in; iterations if None. sink: where every iteration
    goes. choices: what the point of a sweep changed of the engine, for the record. batches: let an engine without a
    forward run iterations at once, which changes nothing but the time it takes. Raises EngineFailed if the engine stops
    early, stalls, reaches one of the limits with work left, or if its texts and its counts disagree; OutcomeRefused if
    it reports what cannot have happened; UsageError if requests wait for each other.
    """
    run = _Run(
        engine, requests, clock, pacing or Pacing(), observer or RunObserver(), sink, limits or Limits(), choices
    )
    if run.about.computes_text:
        return run.result(batches)
    with _collection_put_off():
        return run.result(batches)


@contextmanager
def _collection_put_off() -> Iterator[None]:
    """A schedule makes no circles of references, and looking for them in what it keeps takes a tenth of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Run:
    """One workload on its way through one engine."""

    def __init__(
        self,
        engine: BenchEngine,
        requests: Sequence[RequestSpec],
        read: Clock,
        pacing: Pacing,
        observer: RunObserver,
        sink: LedgerSink | None,
        limits: Limits,
        choices: Choices,
    ) -> None:
        about = engine.describe()
        if unknown := sorted(set(about.reports) - {field.name for field in fields(IterationOutcome)}):
            raise EngineFailed(f"the engine says that it reports {unknown[0]!r}, which is no counter")
        self.engine, self.requests, self.observer, self.about = engine, requests, observer, about
        self.read, self.began = read, read()
        self.clock: RunClock = run_clock(pacing.clock, pacing.cost, read, about)
        self.record = Recorder(requests, about.block_size, sink)
        self.arrivals = Arrivals(requests)
        self.texts: dict[str, Text] = {}
        self.limits, self.choices, self.name = limits, choices, Point(about.pool_blocks, choices).name
        self.inside = 0  # requests that have arrived and not finished
        self.kept = self.stalled = self.ran = 0
        self.reported = attrgetter("issued_tokens", "collected_tokens", *about.reports)

    def result(self, batches: bool) -> ContinuousTiming:
        while self.arrivals or self.engine.has_work:
            self._check_limits()
            if not self.engine.has_work and (due := self.arrivals.next) is not None and not self._wait(due):
                continue
            self._submit_due()
            if not (batches and self._advance()):
                self._step()
        wall_s = self.read() - self.began
        self._check_complete()
        return ContinuousTiming(
            self.engine.describe(), tuple(self.requests), self.record, self.texts, wall_s, self.choices, self.clock.name
        )

    def _advance(self) -> bool:
        """Many iterations at once, up to the next arrival; False if the engine has to step."""
        left = self.clock.until(self.arrivals.next)
        most = STRETCH if self.limits.max_iterations is None else min(STRETCH, self.limits.max_iterations - self.ran)
        if left is None:
            return False
        with self._calling("advance"):
            batch = self.engine.advance(Until(*left, most, self.arrivals.followed))
        if batch is None:
            return False
        present = max(map(add, batch.running, batch.waiting))
        first = self.clock.iteration
        self._check_state(first, max(batch.running), present, max(batch.free_blocks))
        times = self.clock.advanced(batch)
        self.ran += len(batch)
        self.record.add_batch(first, batch, times)
        for event in batch.events:
            self.inside -= len(event.finished)
            for request_id in event.finished:
                tokens = self.requests[self.record.index[request_id]].output_tokens
                self.kept += tokens
                if request_id in self.arrivals.followed:
                    self.arrivals.finished(request_id, Repeated(0, tokens), self.clock)
        self.observer.on_batch(first, batch)
        return True

    def _wait(self, due: int) -> bool:
        """Until then, and whether it came to that: real time is not waited for beyond its limit."""
        end = math.inf if self.limits.max_s is None or self.clock.name != "wall" else self.limits.max_s * NS
        self.clock.wait(due if due <= end else round(end) + 1)
        return due <= end

    def _check_limits(self) -> None:
        limits = self.limits
        if limits.max_iterations is not None and self.ran >= limits.max_iterations:
            key, what = "max_iterations", f"{self.ran} iterations"
        elif limits.max_s is not None and self.read() - self.began >= limits.max_s:
            key, what = "max_s", f"{limits.max_s:g} s"
        else:
            return
        finished = sum(iteration >= 0 for iteration in self.record.finished)
        raise EngineFailed(
            f"{self.name}: {what} are over and {finished} of {len(self.requests)} "
            f"requests have finished; an incomplete run gives no result: raise {key} in [run], or ask for less"
        )

    def _submit_due(self) -> None:
        if not self.arrivals:
            return
        now = self.clock.now
        while (due := self.arrivals.next) is not None and due <= now:
            request = self.arrivals.pop()
            with self._calling("submit"):
                self.engine.submit(request)
            self.inside += 1
            # On the clock of iterations a request arrives with an iteration, and time stands still in between.
            since = self.clock.end_ns if self.clock.name == "iterations" else due
            self.record.arrive(request.request_id, self.clock.iteration, since)

    def _step(self) -> None:
        iteration = self.clock.iteration
        try:  # as _Calling, which would cost every iteration
            outcome = self.clock.run(self.engine.step)
        except BatchbenchError:
            raise
        except Exception as error:
            raise self._failed("step", error) from error
        if type(outcome) is not IterationOutcome:
            raise EngineFailed(f"{self.name}, iteration {iteration}: step returned no IterationOutcome")
        self.ran += 1
        self.record.add(iteration, outcome, self.clock.start_ns if self.clock.timed else None, self.clock.end_ns)
        self.inside -= len(outcome.finished)
        running = outcome.running or 0
        self._check_state(iteration, running, running + (outcome.waiting or 0), outcome.free_blocks or 0)
        if None in self.reported(outcome):
            missing = next(name for name in self.about.reports if getattr(outcome, name) is None)
            raise OutcomeRefused(f"iteration {iteration}: the engine says that it reports {missing}, but did not")
        self.stalled = 0 if outcome.issued_tokens else self.stalled + 1
        if self.stalled == STALLED_ITERATIONS:
            raise EngineFailed(
                f"{self.stalled} iterations in a row forwarded nothing, though the engine says it has work"
            )
        for request_id in outcome.finished:
            self._finish(request_id)
        self.observer.on_iteration(iteration, outcome)

    def _calling(self, member: str) -> _Calling:
        return _Calling(self, member)

    def _failed(self, member: str, error: Exception) -> EngineFailed:
        return EngineFailed(
            f"{self.name}, iteration {self.clock.iteration}: {member} raised {type(error).__name__}: {error}"
        )

    def _check_state(self, iteration: int, running: int, present: int, free_blocks: int) -> None:
        """present: those that run or wait after it; or the most of each, of a batch that begins with it."""
        about = self.about
        if running > about.slots:
            why = f"{running} requests run in {about.slots} slots"
        elif present > self.inside:
            why = f"{present} requests run or wait, but {self.inside} have arrived and not finished"
        elif free_blocks > about.pool_blocks:
            why = f"{free_blocks} blocks are free in a pool of {about.pool_blocks}"
        else:
            return
        raise OutcomeRefused(f"iteration {iteration}: {why}")

    def _finish(self, request_id: str) -> None:
        with self._calling("take"):
            text = self.engine.take(request_id)
        if type(text) is not Text:
            raise EngineFailed(f"{self.name}: take returned no Text for {request_id!r}")
        request = self.requests[self.record.index[request_id]]
        got = len(text.token_ids)
        if text.logit_gaps is not None and len(text.logit_gaps) != got:
            raise EngineFailed(f"{request_id!r} has {len(text.logit_gaps)} logit gaps for {got} tokens")
        if got != request.output_tokens:
            raise EngineFailed(f"{request_id!r} finished with {got} tokens of {request.output_tokens}")
        self.kept += got
        if self.about.computes_text:
            if (odd := not_counts(text.token_ids)) is not None:
                raise EngineFailed(f"{request_id!r} has a token id {odd}, which is no whole number from 0")
            self.texts[request_id] = text
        self.arrivals.finished(request_id, text.token_ids, self.clock)

    def _check_complete(self) -> None:
        for request, finished in zip(self.requests, self.record.finished, strict=True):
            if finished < 0:
                raise EngineFailed(f"the engine has no work left, but {request.request_id!r} never finished")
        if self.record.collected != self.kept:
            raise EngineFailed(
                f"the engine reported {self.record.collected} tokens collected, its texts hold {self.kept}"
            )
        self._check_books()
        if self.record.runs is not None and sum(self.record.runs.number) != self.kept:
            raise OutcomeRefused(f"the iterations of {sum(self.record.runs.number)} tokens are told, of {self.kept}")

    def _check_books(self) -> None:
        """Every position is computed for the first time once, and again only for whom was evicted.

        Held to that where the engine reports it all. A static batch forwards finished rows, too.
        """
        record = self.record
        rebuilt, recomputed = record.total("rebuilt_tokens"), record.total("recomputed_tokens")
        evictions, shared = record.total("preemptions"), record.total("shared_tokens")
        if evictions == 0 and (rebuilt or recomputed):
            raise OutcomeRefused(f"nobody was evicted, but {recomputed or rebuilt} positions are recomputed")
        if "forward_tokens" in record.unsaid or rebuilt is None or (shared is None and self.about.prefix_cache):
            return
        needed = sum(request.prompt_tokens + request.output_tokens - 1 for request in self.requests)
        first = record.positions - rebuilt + (shared or 0)
        if first < needed or (first > needed and self.about.batching != "static"):
            raise OutcomeRefused(
                f"the requests have {needed} positions, each computed for the first time once; the engine forwarded "
                f"{record.positions}, of these {rebuilt} again, and found {shared or 0} that others had computed: "
                f"{abs(first - needed)} are {'missing' if first < needed else 'too many'}"
            )


class _Calling:
    """What an engine raises in one of its members, as the harness's error; its own errors pass."""

    __slots__ = ("member", "run")

    def __init__(self, run: _Run, member: str) -> None:
        self.run, self.member = run, member

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, BatchbenchError):
            raise self.run._failed(self.member, error) from error


class Arrivals:
    """Who arrives next: by time, then as listed. Those that follow another are put in when it has finished.

    Raises UsageError if a request follows one that is not there, or if requests follow each other in a circle.
    """

    def __init__(self, requests: Sequence[RequestSpec]) -> None:
        known = {request.request_id: request for request in requests}
        self._queue: list[tuple[int, int, RequestSpec]] = []
        self._followers: dict[str, list[tuple[int, RequestSpec]]] = {}
        self._told: dict[str, Sequence[int]] = {}  # whole prompts of those that somebody continues
        for place, request in enumerate(requests):
            if request.after is None:
                self._queue.append((request.arrival, place, request))
            elif request.after not in known:
                raise UsageError(f"request {request.request_id!r} follows {request.after!r}, which is not there")
            elif request.history_tokens not in (0, _whole(known[request.after])):
                raise UsageError(
                    f"request {request.request_id!r} has a history of {request.history_tokens} tokens, but "
                    f"{request.after!r} is told and says {_whole(known[request.after])}"
                )
            else:
                self._followers.setdefault(request.after, []).append((place, request))
        heapq.heapify(self._queue)
        self._continued = {r.after for r in requests if r.history_tokens}
        _require_ends(requests, self._followers)

    def __bool__(self) -> bool:
        return bool(self._queue)

    @property
    def next(self) -> int | None:
        """When the next one arrives, on the workload's clock; None if nobody is known to."""
        return self._queue[0][0] if self._queue else None

    def pop(self) -> RequestSpec:
        request = heapq.heappop(self._queue)[2]
        if request.request_id in self._continued:
            self._told[request.request_id] = request.prompt
        return request

    @property
    def followed(self) -> Collection[str]:
        """Whom others follow."""
        return self._followers.keys()

    def finished(self, request_id: str, said: Sequence[int], clock: RunClock) -> None:
        """Those that follow it arrive some time after; those that continue it are told what was said."""
        history = self._told.pop(request_id, None)
        for place, request in self._followers.pop(request_id, ()):
            if request.history_tokens:
                assert history is not None
                request = replace(request, prompt=Joined([history, said, request.prompt]), history_tokens=0)
            now = clock.iteration if clock.name == "iterations" else clock.end_ns
            heapq.heappush(self._queue, (now + request.arrival, place, request))


def _whole(request: RequestSpec) -> int:
    """Tokens that it is told and says."""
    return request.prompt_tokens + request.output_tokens


def _require_ends(requests: Sequence[RequestSpec], followers: dict[str, list[tuple[int, RequestSpec]]]) -> None:
    """Raise UsageError unless following leads from a request without `after` to every one."""
    reached = [request.request_id for request in requests if request.after is None]
    for request_id in reached:
        reached += (request.request_id for _, request in followers.get(request_id, ()))
    if len(reached) < len(requests):
        arrives = set(reached)
        circle = next(request.request_id for request in requests if request.request_id not in arrives)
        raise UsageError(f"request {circle!r} follows itself, through others or not, so it would never arrive")
