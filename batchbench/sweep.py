"""One workload through several pools; timings only if every pool produced the same text."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeVar

from batchbench.driver import run_workload
from batchbench.errors import UsageError
from batchbench.identity import require_same_texts
from batchbench.protocol import Clock, EngineFactory, IterationOutcome, RequestSpec
from batchbench.timing import ContinuousTiming

T = TypeVar("T")


class SweepObserver:
    """Told of a sweep's progress, always between iterations; override what is wanted."""

    def on_start(self, pools: Sequence[int]) -> None:
        """Everything was accepted; the first pool is about to run."""

    def on_pool(self, pool_blocks: int) -> None:
        """A pool's run begins."""

    def on_iteration(self, iteration: int, outcome: IterationOutcome) -> None:
        """An iteration of the current pool is done."""

    def on_timing(self, timing: ContinuousTiming) -> None:
        """A pool is done and its text agrees with the first pool's."""


def sweep_pool_sizes(
    requests: Sequence[RequestSpec],
    pools: Sequence[int],
    make_engine: EngineFactory,
    *,
    clock: Clock = time.perf_counter,
    observer: SweepObserver | None = None,
) -> list[ContinuousTiming]:
    """Run `requests` once per pool size (in blocks), everything else held fixed.

    Returns one ContinuousTiming per pool, in the order of `pools`. Raises TextsDiffer, and
    returns nothing, if any request's token ids differ between two pools; UsageError or
    RequestRefused before the first run if a pool or a request is impossible.
    """
    observer, pools = observer or SweepObserver(), list(pools)
    check_sweep(requests, pools, make_engine)
    observer.on_start(pools)
    timings: list[ContinuousTiming] = []
    for pool_blocks in pools:
        observer.on_pool(pool_blocks)
        engine = make_engine(pool_blocks)
        try:
            timing = run_workload(engine, requests, clock=clock, on_iteration=observer.on_iteration)
        finally:
            engine.close()
        if timings:
            require_same_texts(timings[0], timing)
        timings.append(timing)
        observer.on_timing(timing)
    return timings


def check_sweep(requests: Sequence[RequestSpec], pools: Sequence[int], make_engine: EngineFactory) -> None:
    """Raise before anything runs: build the largest pool, and offer every request to the smallest."""
    if not requests:
        raise UsageError("the workload has no requests")
    if repeated := _repeated(request.request_id for request in requests):
        raise UsageError(f"request id {repeated[0]!r} is used twice")
    if not pools:
        raise UsageError("the sweep has no pools")
    for pool_blocks in pools:
        if type(pool_blocks) is not int or pool_blocks < 1:
            raise UsageError(f"pool of {pool_blocks} blocks: must be an integer of at least 1")
    for request in requests:
        if type(request.arrival_iteration) is not int or request.arrival_iteration < 0:
            raise UsageError(f"request {request.request_id!r} arrives at {request.arrival_iteration}")
    if twice := _repeated(pools):
        raise UsageError(f"pool of {twice[0]} blocks is listed twice")
    make_engine(max(pools)).close()  # memory for it, or an error now rather than after the smaller ones ran
    engine = make_engine(min(pools))
    try:
        for request in requests:
            engine.submit(request)
    finally:
        engine.close()


def _repeated(values: Iterable[T]) -> list[T]:
    return [value for value, times in Counter(values).items() if times > 1]
