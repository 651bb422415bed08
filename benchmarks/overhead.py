"""What is not the forward: the scheduler's own time per iteration, and the harness's share of a sweep.

Run with `make bench`. Prints one line per figure; figures worth keeping go into docs/log.md.
"""

from __future__ import annotations

import statistics
import time

from batchbench import build_requests, engine_factory, load_scenario
from batchbench.driver import run_workload
from engine.config import SchedulerConfig
from engine.core import Engine
from engine.scheduler import Scheduler

BLOCK_SIZE, PROMPT, ITERATIONS, REPEATS = 16, 40, 256, 7


def scheduler_us(rows: int) -> float:
    """Median over repeats of the mean microseconds of schedule() + apply(), every row decoding and growing."""
    means = []
    for _ in range(REPEATS):
        config = SchedulerConfig(rows, rows * 24, BLOCK_SIZE)
        scheduler = Scheduler(config)
        for number in range(rows):  # staggered, so that block boundaries spread over the iterations
            scheduler.submit(f"r{number}", [1] * (PROMPT + number % BLOCK_SIZE), ITERATIONS + 8)
        sampled = [7] * rows
        scheduler.apply(scheduler.schedule(), sampled)
        start = time.perf_counter()
        for _ in range(ITERATIONS):
            scheduler.apply(scheduler.schedule(), sampled)
        means.append((time.perf_counter() - start) / ITERATIONS * 1e6)
    return statistics.median(means)


def shares_of_a_sweep() -> dict[str, float]:
    """Seconds of one Day-34 sweep by where they went; medians over repeats, whole sweeps interleaved."""
    scenario = load_scenario("scenarios/day34.toml")
    requests = build_requests(scenario.workload)
    make_engine = engine_factory("own", scenario.engine)
    spent: dict[str, list[float]] = {"wall": [], "forward": [], "engine": []}
    for _ in range(REPEATS):
        wall = forward = inside = 0.0
        for pool_blocks in scenario.sweep.pools:
            adapter = make_engine(pool_blocks)
            timer = _TimedForward(adapter.engine)  # type: ignore[attr-defined]  # the own engine's adapter
            timing = run_workload(adapter, requests)
            wall, forward, inside = wall + timing.wall_s, forward + timer.seconds, inside + timing.engine_s
        spent["wall"].append(wall)
        spent["forward"].append(forward)
        spent["engine"].append(inside)
    return {name: statistics.median(values) for name, values in spent.items()}


class _TimedForward:
    """Times an engine's runner from outside."""

    def __init__(self, engine: Engine) -> None:
        self.seconds = 0.0
        honest = engine.runner.execute

        def timed(plan):  # type: ignore[no-untyped-def]  # a wrapper of the same signature
            start = time.perf_counter()
            out = honest(plan)
            self.seconds += time.perf_counter() - start
            return out

        engine.runner.execute = timed  # type: ignore[method-assign]


def main() -> None:
    print("scheduler, schedule() + apply() per iteration, all rows decoding")
    for rows in (8, 64, 256):
        measured, target = scheduler_us(rows), 50 + 0.5 * rows
        verdict = "within" if measured <= target else "over"
        print(f"  {rows:>4} rows: {measured:7.1f} us  ({verdict} the target of {target:.0f} us)")
    spent = shares_of_a_sweep()
    print(f"Day-34 sweep on tiny: {spent['wall'] * 1e3:.0f} ms in runs of the six pools, of which")
    print(f"  forward and sampling  {spent['forward'] / spent['wall']:6.1%}")
    print(f"  scheduler and books   {(spent['engine'] - spent['forward']) / spent['wall']:6.1%}")
    print(f"  harness               {(spent['wall'] - spent['engine']) / spent['wall']:6.1%}")


if __name__ == "__main__":
    main()
