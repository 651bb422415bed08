"""The published Day-34 figures, from the real engine, at the published rounding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchbench import build_requests, engine_factory, load_scenario, sweep_pool_sizes
from tests.batchbench.test_cli import invoke

GOLDEN = json.loads(Path("tests/golden/day34.json").read_text())
ROWS = GOLDEN["pools"]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def timings(request):
    scenario = load_scenario("scenarios/day34.toml")
    settings = scenario.engine.model_copy(update={"dtype": request.param, "device": "cpu"})
    swept = sweep_pool_sizes(
        build_requests(scenario.workload), scenario.sweep.pools, engine_factory("own", settings, audit=True)
    )
    return {timing.pool_blocks: timing for timing in swept}


def test_the_scenario_is_the_published_workload():
    scenario, want = load_scenario("scenarios/day34.toml"), GOLDEN["workload"]
    assert scenario.sweep.pools == tuple(row["pool_blocks"] for row in ROWS)
    assert scenario.engine.slots == want["slots"]
    assert scenario.engine.block_size == want["block_size"]
    assert scenario.engine.watermark_blocks == want["watermark_blocks"]
    assert scenario.workload.request_lengths == ((want["prompt_tokens"], want["output_tokens"]),) * want["requests"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"pool{row['pool_blocks']}")
def test_a_row_of_the_table(timings, row):
    timing = timings[row["pool_blocks"]]
    assert round(timing.occupancy, 3) == row["occupancy"]
    assert round(timing.preemptions_per_request, 2) == row["preemptions_per_request"]
    assert round(100 * timing.recompute_fraction, 1) == row["recompute_fraction_percent"]
    assert round(timing.preemption_latency_penalty, 2) == row["preemption_latency_penalty"]
    for name in ("forward_tokens", "recomputed_tokens"):
        if name in row:
            assert getattr(timing, name) == row[name]
    if "recomputed_tokens_per_eviction" in row:
        assert round(timing.recomputed_tokens_per_preemption, 1) == row["recomputed_tokens_per_eviction"]


def test_every_pool_did_the_same_rows_and_the_same_text(timings):
    want = GOLDEN["every_pool"]
    for timing in timings.values():
        assert timing.issued_tokens == want["issued_tokens"]
        assert timing.collected_tokens == want["collected_tokens"]
        assert timing.waste_fraction == want["waste_fraction"]
    assert len({timing.text_digest for timing in timings.values()}) == 1


def test_the_staircase_at_twelve_blocks(timings):
    (row,) = (row for row in ROWS if row["pool_blocks"] == 12)
    timing = timings[12]
    assert timing.latencies == row["latency_iterations"]
    assert sum(timing.latencies.values()) / len(timing.latencies) == row["mean_latency_iterations"]
    for request_id, evictions in row["preemptions"].items():
        assert len(timing.preempted_at.get(request_id, ())) == evictions


def test_the_printed_table_is_the_published_one(tmp_path):
    done = invoke("sweep", "scenarios/day34.toml", "--out", str(tmp_path / "out"), "--no-progress")
    assert done.exit_code == 0
    first = done.stdout.split("\n\n")[0]  # the second says what callers saw, in this machine's seconds
    printed = [line.split() for line in first.splitlines() if "blocks" in line]
    assert printed == [
        [
            str(row["pool_blocks"]),
            "blocks",
            f"{row['occupancy']:.3f}",
            f"{row['preemptions_per_request']:.2f}",
            f"{row['recompute_fraction_percent']:.1f}%",
            f"{row['preemption_latency_penalty']:.2f}x",
            f"{row['preemption_latency_penalty']:.2f}x",  # paired: equal here, since the untouched all take 24
            "identical",
        ]
        for row in ROWS
    ]
