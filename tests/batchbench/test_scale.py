"""Results too large to hold whole: written, joined, opened and drawn within bounds of memory and time."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchbench.errors import ResultError
from batchbench.ledger import ROW_GROUP, Ledger
from batchbench.results import load_result
from batchbench.schema import SCHEMA_VERSION, TABLES, arrow_schema
from tests.batchbench.scripted import decoding

POINTS, REQUESTS, ITERATIONS = 2, 50_000, 600_000  # requests and iterations of each point


def columns(name, point, count, /, **known):
    """Plausible rows: what is not said is 0, or null where it may be."""
    known |= {
        "point": point,
        "pool_blocks": 2000 - point,
        "choices": "",
        "batching": "continuous",
        "clock": "iterations",
    }
    arrays = []
    for field in arrow_schema(name):
        value = known.get(field.name, None if field.nullable else "" if pa.types.is_dictionary(field.type) else 0)
        each = value if isinstance(value, list | np.ndarray) else [value] * count
        arrays.append(pa.array(each, type=field.type))
    return pa.table(arrays, schema=arrow_schema(name))


def rows(name, point):
    ids, place = [f"r{n}" for n in range(REQUESTS)], np.arange(REQUESTS)
    arrival, latency = place * 11, 100 + place % 900
    each = {"request_id": ids, "iteration": arrival, "slot": place % 128, "resumed": False}
    if name == "pools":
        return columns(name, point, 1, slots=128, block_size=16, requests=REQUESTS, iterations=ITERATIONS,
                       floor_iterations=1, peak_used_blocks=2000, recompute_fraction=0.1 * point, preemptions=0,
                       issued_tokens=9, forward_tokens=9)  # fmt: skip
    if name == "requests":
        return columns(name, point, REQUESTS, request_id=ids, arrival_iteration=arrival, latency_iterations=latency,
                       finished_iteration=arrival + latency - 1, preemptions=0)  # fmt: skip
    if name == "iterations":
        at = np.arange(ITERATIONS)
        return columns(name, point, ITERATIONS, iteration=at, running=at % 40, waiting=at % 7, free_blocks=at % 1900)
    if name in ("admissions", "prefills"):
        return columns(name, point, REQUESTS, **each)
    if name == "service":
        return columns(name, point, 1, metric="e2e", unit="iterations", count=1, **dict.fromkeys(
            ("mean", "p50", "p90", "p95", "p99", "max"), 5.0))  # fmt: skip
    if name == "token_runs":
        return columns(name, point, REQUESTS, request_id=ids, first_iteration=arrival, tokens=1)
    return arrow_schema(name).empty_table()


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    about = {"schema_version": str(SCHEMA_VERSION), "run_id": "x"}
    for name in TABLES:
        with pq.ParquetWriter(folder / f"{name}.parquet", arrow_schema(name).with_metadata(about)) as file:
            for point in range(POINTS):
                table = rows(name, point).replace_schema_metadata(about)
                file.write_table(table, row_group_size=ROW_GROUP)
    run = {"schema_version": SCHEMA_VERSION, "run_id": "x", "scenario": {"name": "large"}, "engine": {}}
    (folder / "run.json").write_text(json.dumps(run))
    return folder


MEASURE = """
import resource, sys, time
from pathlib import Path
import batchbench.figures.drawing, batchbench.results
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before, began = peak(), time.perf_counter()
result = batchbench.results.load_result(sys.argv[1])
print(peak() - before, time.perf_counter() - began)
began = time.perf_counter()
batchbench.figures.drawing.draw_all(result, Path(sys.argv[2]))
print(peak() - before, time.perf_counter() - began)
"""


def test_a_large_result_opens_and_draws_in_seconds_and_little_memory(large, tmp_path):
    done = subprocess.run([sys.executable, "-c", MEASURE, large, tmp_path], check=True, capture_output=True, text=True)
    (opened_mib, opened_s), (drawn_mib, drawn_s) = (map(float, line.split()) for line in done.stdout.splitlines())
    whole_mib = POINTS * ITERATIONS * len(TABLES["iterations"]) * 8 / 2**20
    assert whole_mib > 190  # what one of its tables takes
    assert opened_mib < 150 and opened_s < 10
    assert drawn_mib < 400 and drawn_s < 30


def test_a_point_is_read_alone_and_only_the_columns_asked_for(large):
    result = load_result(large)
    frame = result.point("iterations", 1, ["iteration", "running"])
    assert list(frame.columns) == ["iteration", "running"] and len(frame) == ITERATIONS
    assert (frame["iteration"] == np.arange(ITERATIONS)).all()
    assert set(result.point("requests", 1, ["point", "pool_blocks"])["pool_blocks"]) == {1999}
    assert result.point("evictions", 0, ["request_id"]).empty
    assert len(result.rows("pools")) == POINTS


@pytest.mark.parametrize(
    ("name", "column", "value", "message"),
    [
        ("requests", "request_id", "r7", "does not have every request once per point"),
        ("requests", "point", 1, "does not have every request once per point"),
        ("admissions", "request_id", "zz", "speaks of points or requests that are not there"),
        ("token_runs", "request_id", "zz", "speaks of points or requests that are not there"),
        ("iterations", "point", 2, "speaks of points or requests that are not there"),
        ("admissions", "slot", 128, "has a slot outside the 128 there are"),
    ],
)
def test_one_wrong_value_among_many_is_found(large, tmp_path, name, column, value, message):
    for path in large.iterdir():
        (tmp_path / path.name).symlink_to(path)
    file = tmp_path / f"{name}.parquet"
    table = pq.read_table(file)
    file.unlink()
    values = table[column].to_pylist()
    values[REQUESTS - 3] = value
    place = table.schema.get_field_index(column)
    pq.write_table(table.set_column(place, table.schema.field(column), [values]), file, row_group_size=ROW_GROUP)
    with pytest.raises(ResultError, match=message):
        load_result(tmp_path)


def test_what_is_read_later_is_of_the_files_that_were_opened(large, tmp_path):
    for path in large.iterdir():
        (tmp_path / path.name).symlink_to(path)
    result = load_result(tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
    assert len(result.point("pools", 1)) == 1 and len(result.tables["requests"]) == POINTS * REQUESTS


def peak_of_ledger(stretches):
    """Peak of Python's memory while so many stretches of iterations are recorded."""
    ledger = Ledger({"point": 0, "pool_blocks": 1, "choices": "", "numerics": None}, lambda name, rows: None)
    tracemalloc.start()
    for n in range(stretches):
        ledger.batch(n * 10_000, decoding(10_000), ())
    ledger.close()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_a_ledger_holds_no_more_for_a_longer_run():
    assert peak_of_ledger(40) < 1.2 * peak_of_ledger(10)


JOIN = """
import resource, sys
from pathlib import Path
from batchbench import load_scenario, build_requests, engine_factory, sweep_pool_sizes
from tests.batchbench.scripted import Saves, decoding
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
scenario, saves = load_scenario("scenarios/day34.toml"), Saves(Path(sys.argv[1]))
on_timing = saves.on_timing
def padded(timing):
    for n in range(100):  # a million iterations more than happened
        saves.writer._ledger.batch(n * 10_000, decoding(10_000), ())
    on_timing(timing)
saves.on_timing = padded
before = peak()
requests, make = build_requests(scenario.workload), engine_factory("schedule", scenario.engine)
timings = sweep_pool_sizes(requests, [48, 12], make, observer=saves)
saves.writer.join(timings, {"scenario": {"name": "x"}, "engine": {}})
print(peak() - before)
"""


def test_a_long_run_is_written_and_joined_in_little_memory(tmp_path):
    done = subprocess.run([sys.executable, "-c", JOIN, tmp_path / "o"], check=True, capture_output=True, text=True)
    assert pq.read_metadata(tmp_path / "o/iterations.parquet").num_rows > 2_000_000  # 320 MB as columns
    assert float(done.stdout) < 160
