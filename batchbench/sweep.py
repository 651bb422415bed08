"""One workload through several pools, and other choices; timings only if every point produced the same text."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeVar

from batchbench.asking import offer
from batchbench.driver import Pacing, RunObserver, run_workload
from batchbench.errors import RequestRefused, UsageError
from batchbench.identity import require_same_texts
from batchbench.protocol import Clock, EngineDescription, EngineFactory, Point, RequestSpec
from batchbench.recorder import LedgerSink
from batchbench.timing import ContinuousTiming

T = TypeVar("T")


class SweepObserver(RunObserver):
    """Told of a sweep's progress, always between iterations; override what is wanted."""

    def on_start(self, points: Sequence[Point]) -> None:
        """Everything was accepted; the first point is about to run."""

    def on_point(self, point: Point) -> None:
        """A point's run begins."""

    def ledger(self, point: Point, engine: EngineDescription) -> LedgerSink | None:
        """Where the point's iterations go as they happen."""
        return None

    def on_timing(self, timing: ContinuousTiming) -> None:
        """A point is done and its text agrees with the first one's."""


def sweep_pool_sizes(
    requests: Sequence[RequestSpec],
    points: Sequence[int | Point],
    make_engine: EngineFactory,
    *,
    clock: Clock = time.perf_counter,
    pacing: Pacing | None = None,
    observer: SweepObserver | None = None,
) -> list[ContinuousTiming]:
    """Run `requests` once per point: a pool size in blocks, or a Point that changes more of the engine.

    pacing: what arrivals are counted in. Returns one ContinuousTiming per point, in their order. Raises TextsDiffer,
    and returns nothing, if any request's token ids differ between two points; UsageError or RequestRefused before the
    first run if a point or a request is impossible.
    """
    observer, listed = observer or SweepObserver(), _as_points(points)
    check_sweep(requests, listed, make_engine)
    observer.on_start(listed)
    timings: list[ContinuousTiming] = []
    for point in listed:
        observer.on_point(point)
        engine = make_engine(point.pool_blocks, **dict(point.choices))
        try:
            timing = run_workload(
                engine,
                requests,
                clock=clock,
                pacing=pacing,
                observer=observer,
                sink=observer.ledger(point, engine.describe()),
                choices=point.choices,
            )
        finally:
            engine.close()
        if timings:
            require_same_texts(timings[0], timing)
        timings.append(timing)
        observer.on_timing(timing)
    return timings


def check_sweep(requests: Sequence[RequestSpec], points: Sequence[int | Point], make_engine: EngineFactory) -> None:
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
            _check_pools(requests, Point(min(pools), choices), max(pools), make_engine)
        except (UsageError, RequestRefused) as error:
            raise type(error)(f"{Point(0, choices).label}: {error}" if choices else str(error)) from error


def _check_pools(requests: Sequence[RequestSpec], smallest: Point, largest: int, make_engine: EngineFactory) -> None:
    # Memory for it, or an error now rather than after the smaller ones ran.
    make_engine(largest, **dict(smallest.choices)).close()
    offer(requests, make_engine, smallest)


def _as_points(points: Sequence[int | Point]) -> list[Point]:
    return [point if isinstance(point, Point) else Point(point) for point in points]


def _repeated(values: Iterable[T]) -> list[T]:
    return [value for value, times in Counter(values).items() if times > 1]
