"""What is not the forward: the scheduler's own time per iteration, and the harness's share of a sweep.

Run with `make bench`. Prints one line per figure; figures worth keeping go into docs/log.md.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from batchbench import (
    BenchEngine,
    ContinuousTiming,
    EngineDescription,
    SweepObserver,
    build_requests,
    engine_factory,
    load_scenario,
    sweep_pool_sizes,
)
from batchbench.demand import resolve_points
from batchbench.driver import run_workload
from batchbench.figures.drawing import draw_all
from batchbench.paths import FilePath
from batchbench.protocol import Point
from batchbench.recorder import LedgerSink
from batchbench.results import ResultWriter, load_result
from batchbench.scenario import EngineSettings
from batchbench.workload_schema import Workload
from benchmarks.promise import SMOLLM2
from engine.batch import Batch, Decoder
from engine.config import SchedulerConfig
from engine.kv_store import KVStore
from engine.plan import Plan, RunOutput
from engine.scheduler import Scheduler

BLOCK_SIZE, PROMPT, ITERATIONS, REPEATS = 16, 40, 256, 7
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    points = resolve_points(scenario.sweep, requests, factory, factory)
    spent: dict[str, list[float]] = {part: [] for part in ("whole", "forward", "engine", "run", "tables", "figures")}
    for _ in range(REPEATS):
        forward_s = 0.0

        def timed_engine(pool_blocks: int, /, **choices: object) -> BenchEngine:
            adapter = factory(pool_blocks, **choices)
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
            timings = sweep_pool_sizes(requests, points, timed_engine, observer=_Saving(writer))
            swept = time.perf_counter()
            writer.join(timings, {"scenario": {"name": "day34"}, "engine": {"slots": scenario.engine.slots}})
            saved = time.perf_counter()
            draw_all(load_result(Path(folder) / "result"), Path(folder) / "figures")
            drawn = time.perf_counter()
        for part, seconds in {
            "whole": drawn - start,
            "forward": forward_s,
            "engine": sum(timing.engine_s or 0 for timing in timings),
            "run": swept - start,
            "tables": saved - swept,
            "figures": drawn - saved,
        }.items():
            spent[part].append(seconds)
    return {part: statistics.median(values) for part, values in spent.items()}


class _Saving(SweepObserver):
    """Writes a sweep as the command line does."""

    def __init__(self, writer: ResultWriter) -> None:
        self._writer = writer

    def ledger(self, point: Point, engine: EngineDescription) -> LedgerSink:
        return self._writer.open_point(point, engine)

    def on_timing(self, timing: ContinuousTiming) -> None:
        self._writer.save_point(timing)


class TimedDecoder:
    """A decoder and the seconds spent in it: forwards and their best tokens."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.seconds = decoder, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)

    def forward(self, batch: Batch, store: KVStore) -> Tensor:
        start = time.perf_counter()
        logits = self.decoder.forward(batch, store)
        self.seconds += time.perf_counter() - start
        return logits

    def greedy(self, logits: Tensor) -> tuple[list[int], list[float]]:
        start = time.perf_counter()
        best = self.decoder.greedy(logits)
        self.seconds += time.perf_counter() - start
        return best


def shares_at_32_rows() -> dict[str, float]:
    """Median shares of the wall time of 32 requests of 16 + 48 tokens on SmolLM2, all running at once."""
    factory = engine_factory("own", EngineSettings(model=FilePath(str(SMOLLM2)), slots=32, threads=CORES))
    requests = build_requests(Workload(requests=32, prompt_tokens=16, output_tokens=48))
    shares: dict[str, list[float]] = {"decoder": [], "engine": [], "harness": []}
    for _ in range(3):
        adapter = factory(32 * 4)
        runner = adapter.engine.runner  # type: ignore[attr-defined]  # the own engine's adapter
        runner.model = timed = TimedDecoder(runner.model)
        timing = run_workload(adapter, requests)
        shares["decoder"].append(timed.seconds / timing.wall_s)
        assert timing.engine_s is not None
        shares["engine"].append((timing.engine_s - timed.seconds) / timing.wall_s)
        shares["harness"].append(1 - timing.engine_s / timing.wall_s)
    return {part: statistics.median(values) for part, values in shares.items()}


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
    print(f"  then, per sweep: joining the tables {s['tables'] * 1e3:.0f} ms, figures {s['figures'] * 1e3:.0f} ms")
    if not SMOLLM2.is_dir():
        print(f"SmolLM2 at 32 rows: {SMOLLM2} is not there; `make model` makes it")
        return
    s = shares_at_32_rows()
    print(f"SmolLM2 at 32 rows, float32, {CORES} threads: shares of the wall time")
    print(f"  forwards and best tokens              {s['decoder']:6.2%}")
    print(f"  scheduler, runner and books           {s['engine']:6.2%}")
    print(f"  harness: driver and checks            {s['harness']:6.2%}")
    print(f"  scheduler and harness together        {s['engine'] + s['harness']:6.2%}  (target: under 2 %)")


if __name__ == "__main__":
    main()
