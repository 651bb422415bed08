"""What is not the forward: the scheduler's own time per iteration, and the harness's share of a sweep.

Run with `make bench`. Prints one line per figure; figures worth keeping go into docs/log.md.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from batchbench import BenchEngine, build_requests, engine_factory, load_scenario, sweep_pool_sizes
from batchbench.plots import draw_all
from batchbench.results import ResultWriter, load_result
from engine.config import SchedulerConfig
from engine.plan import Plan
from engine.runner import RunOutput
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
    """Median seconds of a whole Day-34 sweep, tables and figures included, and of its parts."""
    scenario = load_scenario("scenarios/day34.toml")
    requests = build_requests(scenario.workload)
    factory = engine_factory("own", scenario.engine)
    spent: dict[str, list[float]] = {part: [] for part in ("whole", "forward", "engine", "run", "tables", "figures")}
    for _ in range(REPEATS):
        forward_s = 0.0

        def timed_engine(pool_blocks: int) -> BenchEngine:
            adapter = factory(pool_blocks)
            runner = adapter.engine.runner  # type: ignore[attr-defined]  # the own engine's adapter
            honest = runner.execute

            def execute(plan: Plan) -> RunOutput:
                nonlocal forward_s
                start = time.perf_counter()
                out: RunOutput = honest(plan)
                forward_s += time.perf_counter() - start
                return out

            runner.execute = execute
            return adapter

        with TemporaryDirectory() as folder:
            start = time.perf_counter()
            writer = ResultWriter(Path(folder) / "result")
            writer.open()
            timings = sweep_pool_sizes(requests, scenario.sweep.pools, timed_engine)
            swept = time.perf_counter()
            for timing in timings:
                writer.save_pool(timing)
            writer.join(timings, {"scenario": {"name": "day34"}, "engine": {"slots": scenario.engine.slots}})
            saved = time.perf_counter()
            draw_all(load_result(Path(folder) / "result"), Path(folder) / "figures")
            drawn = time.perf_counter()
        for part, seconds in {
            "whole": drawn - start,
            "forward": forward_s,
            "engine": sum(timing.engine_s for timing in timings),
            "run": swept - start,
            "tables": saved - swept,
            "figures": drawn - saved,
        }.items():
            spent[part].append(seconds)
    return {part: statistics.median(values) for part, values in spent.items()}


def main() -> None:
    print("scheduler, schedule() + apply() per iteration, all rows decoding")
    for rows in (8, 64, 256):
        measured, target = scheduler_us(rows), 50 + 0.5 * rows
        verdict = "within" if measured <= target else "over"
        print(f"  {rows:>4} rows: {measured:7.1f} us  ({verdict} the target of {target:.0f} us)")
    s = shares_of_a_sweep()
    print(f"Day-34 sweep on tiny: the six runs take {s['run'] * 1e3:.0f} ms, of which")
    print(f"  forward and sampling                  {s['forward'] / s['run']:6.1%}")
    print(f"  scheduler and books                   {(s['engine'] - s['forward']) / s['run']:6.1%}")
    print(f"  harness: driver, checks, comparison   {(s['run'] - s['engine']) / s['run']:6.1%}")
    print(f"  then, per sweep: tables {s['tables'] * 1e3:.0f} ms, figures {s['figures'] * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
