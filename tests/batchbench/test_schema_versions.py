"""Results of older versions open as the current tables; those of newer ones are refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchbench.errors import ResultError
from batchbench.results import load_result
from batchbench.schema import TABLES, arrow_schema
from tests.batchbench.test_cli import everything_under, invoke

OLD = {"v1": Path("tests/results/v1").resolve(), "v2": Path("tests/results/v2").resolve()}
TIMES = {"engine_s", "wall_s", "latency_s", "step_s", "preemption_latency_penalty_s"}
DERIVED = {
    "share_preempted", "preemptions_per_victim", "most_preemptions", "mean_used_blocks", "peak_used_blocks",
    "collected_per_iteration", "forward_per_iteration", "worst_paired_latency_ratio", "clock", "counters",
    "repetitions", "utilization", "slots", "block_size", "watermark_blocks", "victim", "point", "choices",
}  # fmt: skip


@pytest.fixture(params=OLD)
def old(request, tmp_path):
    """A copy of an old result."""
    return Path(shutil.copytree(OLD[request.param], tmp_path / request.param))


def test_every_value_is_todays_or_unknown(old):
    """The sweep counts the same today, so what an old result tells or implies must be what today's says."""
    found, today = load_result(old), load_result("results/day34")
    assert found.run["schema_version"] == int(old.name[1:])
    for name in set(TABLES) - {"token_runs", "service", "repetitions", "statistics"}:
        rows, expected = found.rows(name), today.rows(name)
        assert len(rows) == len(expected) > 0, name
        for row, want in zip(rows, expected, strict=True):
            told = {column: value for column, value in row.items() if value is not None and column not in TIMES}
            assert told == {column: want[column] for column in told}
    assert {c for c, v in found.rows("pools")[5].items() if v is None and c in DERIVED} == set()


def test_what_was_not_known_then_is_missing(old):
    found, today = load_result(old), load_result("results/day34")
    assert found.rows("token_runs") == []
    assert {(row["metric"], row["unit"]) for row in found.rows("service")} == {
        ("e2e", "iterations"), ("queue", "iterations"), ("e2e", "s"),
    }  # fmt: skip
    counted = [row for row in found.rows("service") if row["unit"] == "iterations"]
    assert all(row in today.rows("service") for row in counted)
    assert {(row["metric"], row["n"], row["low"]) for row in found.rows("statistics")} == {
        ("wall_s", 1, None), ("engine_s", 1, None),
    }  # fmt: skip
    assert [row["wall_s"] for row in found.rows("repetitions")] == [row["wall_s"] for row in found.rows("pools")]
    pool, request = found.rows("pools")[4], found.rows("requests")[28]
    assert [pool["fragmentation"], pool["goodput_requests"], pool["victims_extra_iterations"]] == [None] * 3
    assert [request[name] for name in ("ttft_iterations", "tpot_iterations", "arrival_s", "meets_slo")] == [None] * 4
    assert all(arrow_schema(name).equals(found.files[name].schema) for name in TABLES)


def test_it_can_be_drawn(old):
    done = invoke("plot", str(old))
    assert (done.exit_code, done.stderr) == (0, "")
    assert [path for path in everything_under(old) if path.startswith("plots")] == [
        f"plots/{name}.png"
        for name in ("pool_sweep", "pool_use", "rows_against_positions", "service", "slot_timeline", "staircase")
    ]


def test_the_first_results_of_version_2_number_no_points(tmp_path):
    old = Path(shutil.copytree(OLD["v2"], tmp_path / "v2"))
    for path in old.glob("*.parquet"):
        pq.write_table(pq.read_table(path).drop_columns(["point", "choices"]), path)
    assert load_result(old).rows("requests") == load_result(OLD["v2"]).rows("requests")


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (7, "has schema version 7, newer than the 3 that this batchbench reads; upgrade"),
        (10**30, "newer than the 3 that this batchbench reads"),
        (0, "has schema version 0, which no batchbench has written"),
        (-1, "which no batchbench has written"),
        (True, "has schema version True, which no"),
        ("3", "has schema version '3', which no"),
        (None, "has schema version None, which no"),
        (2.0, "has schema version 2.0, which no"),
    ],
)
def test_other_versions_are_refused_by_name(old, version, message):
    run = json.loads((old / "run.json").read_text())
    (old / "run.json").write_text(json.dumps(run | {"schema_version": version}))
    with pytest.raises(ResultError, match=message):
        load_result(old)


def drop(name, column):
    return lambda old: pq.write_table(
        pq.read_table(old / f"{name}.parquet").drop_columns([column]), old / f"{name}.parquet"
    )


def set_column(name, column, value):
    def damage(old):
        table = pq.read_table(old / f"{name}.parquet")
        place = table.schema.get_field_index(column)
        pq.write_table(table.set_column(place, column, pa.array([value] * len(table))), old / f"{name}.parquet")

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        drop("pools", "pool_blocks"),
        drop("requests", "request_id"),
        drop("requests", "evicted_iterations"),
        drop("iterations", "issued_tokens"),
        set_column("pools", "iterations", 0),
        set_column("pools", "waste_fraction", "much"),
        set_column("requests", "pool_blocks", 5),
        set_column("requests", "latency_s", "long"),
        set_column("evictions", "pool_blocks", None),
        lambda old: (old / "texts.parquet").write_bytes(b"PAR1"),
        lambda old: (old / "admissions.parquet").unlink(),
        lambda old: (old / "run.json").write_text(
            json.dumps(json.loads((old / "run.json").read_text()) | {"run_id": "another"})
        ),
    ],
)
def test_a_damaged_old_result_is_refused(tmp_path, damage):
    old = Path(shutil.copytree(OLD["v1"], tmp_path / "v1"))
    damage(old)
    with pytest.raises(ResultError, match="v1"):
        load_result(old)
