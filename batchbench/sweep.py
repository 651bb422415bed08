"""One workload through several pools, and other choices; timings only if every point produced the same text."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeVar

from batchbench.asking import built, describe, offer
from batchbench.driver import Limits, Pacing, RunObserver, run_workload
from batchbench.errors import RequestRefused, UsageError
from batchbench.identity import require_repeated, require_same_texts
from batchbench.protocol import Clock, EngineDescription, EngineFactory, Point, RequestSpec
from batchbench.recorder import LedgerSink
from batchbench.repetitions import Finished, Measured, measured
from batchbench.timing import ContinuousTiming

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pass:
    """One time through all points: a warm-up, or a repetition. number: from 0, of as many as `of`."""

    number: int
    of: int
    warmup: bool = False

    @property
    def name(self) -> str:
        """As people count; the column `repetition` counts from 0."""
        return f"{'warm-up' if self.warmup else 'repetition'} {self.number + 1} of {self.of}"

    @property
    def is_result(self) -> bool:
        """Whether its runs are the sweep's results; those of a later one only add their times."""
        return not self.warmup and self.number == 0


class SweepObserver(RunObserver):
    """Told of a sweep's progress, always between iterations; override what is wanted."""

    def on_start(self, points: Sequence[Point]) -> None:
        """Everything was accepted; the first point is about to run."""

    def finished(self, requests: Sequence[RequestSpec]) -> Finished:
        """What an earlier sweep of the same left; asked after `on_start`."""
        return Finished()

    def on_point(self, point: Point, which: Pass) -> None:
        """A point's run begins."""

    def ledger(self, point: Point, engine: EngineDescription) -> LedgerSink | None:
        """Where the iterations of the point's first repetition go as they happen."""
        return None

    def on_timing(self, timing: ContinuousTiming) -> None:
        """A point's first repetition is done and its text agrees with the first point's."""

    def on_repeated(self, point: Point, which: Pass) -> None:
        """Another run of it is done: a warm-up, or a repetition, which agrees with the first."""

    def on_measured(self, place: int, which: Pass, run: Measured) -> None:
        """The few numbers of a repetition after the first, at the point in that place."""


def sweep_pool_sizes(
    requests: Sequence[RequestSpec],
    points: Sequence[int | Point],
    make_engine: EngineFactory,
    *,
    clock: Clock = time.perf_counter,
    pacing: Pacing | None = None,
    observer: SweepObserver | None = None,
    warmup: int = 0,
    repetitions: int = 1,
    limits: Limits | None = None,
) -> list[ContinuousTiming]:
    """Run `requests` at every point: a pool size in blocks, or a Point that changes more of the engine.

    pacing: what arrivals are counted in. warmup: passes over all points that are thrown away. repetitions: passes that
    are measured. limits: of one run. Returns one ContinuousTiming per point, in their order: that of the first
    repetition, with what every one measured if there are several. Raises TextsDiffer, and returns nothing, if any
    request's token ids differ between two runs; CountsDiffer if a repetition counts otherwise, unless the clock is
    `wall`; EngineFailed at a limit; UsageError or RequestRefused, before anything runs, for what is impossible.
    """
    observer, listed, passes = observer or SweepObserver(), _as_points(points), _passes(warmup, repetitions)
    check_sweep(requests, listed, make_engine, repetitions)
    observer.on_start(listed)
    before = observer.finished(requests)
    results, ahead = list(before.timings), len(before.timings) + len(before.repeated)
    times: list[list[Measured]] = [[measured(timing)] for timing in results] + [[] for _ in listed[len(results) :]]
    for number, run in enumerate(before.repeated):
        times[number % len(listed)].append(run)
    runs = list(product(passes, enumerate(listed)))
    warmups, rest = runs[: warmup * len(listed)], runs[warmup * len(listed) + ahead :]
    for which, (place, point) in [*warmups, *rest] if rest else ():
        observer.on_point(point, which)
        timing = _run_point(requests, point, make_engine, clock, pacing, observer, which, limits)
        if which.is_result:
            require_same_texts(results[0] if results else timing, timing)
            results.append(timing)
            observer.on_timing(timing)
        else:
            if not which.warmup:
                require_repeated(results[place], timing, which.name)
            observer.on_repeated(point, which)
        if repetitions > 1 and not which.warmup:
            times[place].append(measured(timing))
            if not which.is_result:
                observer.on_measured(place, which, times[place][-1])
    if repetitions == 1:
        return results
    return [replace(timing, repetitions=tuple(runs)) for timing, runs in zip(results, times, strict=True)]


def _passes(warmup: int, repetitions: int) -> list[Pass]:
    """Each goes through all points before the next begins, so that a drift of the machine falls on all alike."""
    if warmup < 0 or repetitions < 1:
        raise UsageError(f"{warmup} warm-up passes and {repetitions} repetitions: must be at least 0 and 1")
    return [
        *(Pass(number, warmup, warmup=True) for number in range(warmup)),
        *(Pass(number, repetitions) for number in range(repetitions)),
    ]


def _run_point(
    requests: Sequence[RequestSpec],
    point: Point,
    make_engine: EngineFactory,
    clock: Clock,
    pacing: Pacing | None,
    observer: SweepObserver,
    which: Pass,
    limits: Limits | None,
) -> ContinuousTiming:
    with built(make_engine, point) as (engine, about):
        return run_workload(
            engine,
            requests,
            clock=clock,
            pacing=pacing,
            observer=observer,
            sink=observer.ledger(point, about) if which.is_result else None,
            choices=point.choices,
            limits=limits,
        )


def check_sweep(
    requests: Sequence[RequestSpec], points: Sequence[int | Point], make_engine: EngineFactory, repetitions: int = 1
) -> None:
    """Raise before anything runs: for each of the other choices, build the largest pool, and offer every request to
    the smallest.
    """
    listed = _as_points(points)
    if not requests:
        raise UsageError("the workload has no requests")
    if repeated := _repeated(request.request_id for request in requests):
        raise UsageError(f"request id {repeated[0]!r} is used twice")
    if not listed:
        raise UsageError("the sweep has no pools")
    for point in listed:
        if type(point.pool_blocks) is not int or point.pool_blocks < 1:
            raise UsageError(f"pool of {point.pool_blocks} blocks: must be an integer of at least 1")
    for request in requests:
        if type(request.arrival) is not int or request.arrival < 0:
            raise UsageError(f"request {request.request_id!r} arrives at {request.arrival}")
    if twice := _repeated(listed):
        where = f" ({twice[0].label})" if twice[0].choices else ""
        raise UsageError(f"pool of {twice[0].pool_blocks} blocks{where} is listed twice")
    for choices in dict.fromkeys(point.choices for point in listed):
        pools = [point.pool_blocks for point in listed if point.choices == choices]
        try:
            _check_pools(requests, Point(min(pools), choices), max(pools), make_engine, repetitions)
        except (UsageError, RequestRefused) as error:
            raise type(error)(f"{Point(0, choices).label}: {error}" if choices else str(error)) from error


def _check_pools(
    requests: Sequence[RequestSpec], smallest: Point, largest: int, make_engine: EngineFactory, repetitions: int
) -> None:
    if repetitions > 1 and not describe(make_engine, smallest).computes_text:
        raise UsageError(
            f"a schedule counts the same every time: {repetitions} repetitions would tell nothing more; use 1"
        )
    # Memory for it, or an error now rather than after the smaller ones ran.
    describe(make_engine, Point(largest, smallest.choices))
    offer(requests, make_engine, smallest)


def _as_points(points: Sequence[int | Point]) -> list[Point]:
    return [point if isinstance(point, Point) else Point(point) for point in points]


def _repeated(values: Iterable[T]) -> list[T]:
    return [value for value, times in Counter(values).items() if times > 1]
