"""How fast the schedule alone plans: requests of about 1,000 + 200 tokens, all at 0, through 2,048 blocks of 16.

Run with `make bench`. Each size runs in a process of its own, so that its memory can be told.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from batchbench import ContinuousTiming, RequestSpec, build_requests, engine_factory
from batchbench.driver import run_workload
from batchbench.protocol import Point
from batchbench.results import ResultWriter
from batchbench.scenario import EngineSettings
from batchbench.workload_schema import Workload

POOL_BLOCKS, BLOCK_SIZE, SLOTS = 2048, 16, 128
RULES = {"batchbench": {}, "vllm-v1": {"rules": "vllm-v1", "token_budget": 2048}}
TARGETS_S = {10_000: 0.7, 100_000: 8.0}
REPEATS = 3


def requests_of(count: int) -> tuple[RequestSpec, ...]:
    """Seeded, lognormal, all at 0."""
    length = {"dist": "lognormal", "sigma": 0.5, "min": 1, "max": 20_000}
    lengths = {"prompt_tokens": length | {"mean": 1000}, "output_tokens": length | {"mean": 200}}
    return build_requests(Workload.model_validate({"requests": count, **lengths}))


def run(requests: Sequence[RequestSpec], rules: str, *, batches: bool = True) -> tuple[float, ContinuousTiming]:
    """Seconds of one run, from the first submission to the last token."""
    settings = EngineSettings.model_validate({"slots": SLOTS, "block_size": BLOCK_SIZE, **RULES[rules]})
    engine = engine_factory("schedule", settings)(POOL_BLOCKS)
    begin = time.perf_counter()
    timing = run_workload(engine, requests, batches=batches)
    return time.perf_counter() - begin, timing


def written_s(requests: Sequence[RequestSpec]) -> float:
    """Seconds of one run whose tables are written as they come."""
    engine = engine_factory("schedule", EngineSettings(slots=SLOTS, block_size=BLOCK_SIZE))(POOL_BLOCKS)
    with TemporaryDirectory() as folder:
        writer = ResultWriter(Path(folder) / "result")
        writer.open()
        begin = time.perf_counter()
        timing = run_workload(engine, requests, sink=writer.open_point(Point(POOL_BLOCKS), engine.describe()))
        writer.save_point(timing)
        return time.perf_counter() - begin


def measure(count: int, rules: str) -> dict[str, float]:
    """In this process: seconds of a run, of the same step by step, and bytes a request, its description included."""
    run(requests_of(100), rules)  # imports and first-time work
    before = _peak_bytes()
    requests = requests_of(count)
    seconds, stepped, timing = [], [], None
    for _ in range(REPEATS if count < 100_000 else 1):
        timing = None  # one record at a time, or two would be counted
        taken, timing = run(requests, rules)
        seconds.append(taken)
        if len(seconds) == 1:
            bytes_each = (_peak_bytes() - before) / count
        if count <= 10_000:
            stepped.append(run(requests, rules, batches=False)[0])
    assert timing is not None
    return {
        "seconds": statistics.median(seconds),
        "stepped_s": statistics.median(stepped) if stepped else float("nan"),
        "bytes_each": bytes_each,
        "written_s": written_s(requests) if rules == "batchbench" else float("nan"),
        "iterations": len(timing.record.iterations),
        "preemptions": timing.preemptions or 0,
    }


def main() -> None:
    print(f"schedule alone, {POOL_BLOCKS} blocks of {BLOCK_SIZE}, {SLOTS} slots, about 1,000 + 200 tokens, all at 0")
    for rules in RULES:
        for count in (1_000, 10_000, 100_000):
            command = [sys.executable, "-m", "benchmarks.planning", str(count), rules]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            seconds, again = found["seconds"], found["stepped_s"]
            line = f"  {rules:<10} {count:>7,} requests: {seconds:6.2f} s, {seconds / count * 1e6:5.1f} us and "
            line += f"{found['bytes_each']:4.0f} bytes a request, {found['iterations']:,} iterations"
            line += f"; step by step {again:.2f} s ({again / seconds:.1f} x)" if again == again else ""
            written = found["written_s"]
            line += f"; with tables {written:.2f} s" if written == written else ""
            if count in TARGETS_S:
                verdict = "within" if found["seconds"] <= TARGETS_S[count] else "over"
                line += f"  ({verdict} the target of {TARGETS_S[count]:g} s)"
            print(line)


def _peak_bytes() -> int:
    """Most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(measure(int(sys.argv[1]), sys.argv[2])))
    else:
        main()
