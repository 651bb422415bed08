"""Tables: typed columns with units, raw rows that add up, atomic files, and honest reading back."""

from __future__ import annotations

import json
import math
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchbench import (
    Admission,
    Eviction,
    Prefill,
    build_requests,
    engine_factory,
    load_scenario,
    sweep_pool_sizes,
)
from batchbench.adapters.fake import FakeClock, ScriptedEngine
from batchbench.errors import BatchbenchError, ResultError
from batchbench.protocol import Point
from batchbench.results import ResultWriter, load_result
from batchbench.schema import TABLES, arrow_schema
from tests.batchbench.scripted import Saves, it, request, result_of, tables_of
from tests.batchbench.test_cli import everything_under

RUN = {"scenario": {"name": "day34"}, "engine": {"slots": 6}}


def sweep_into(folder, engine="own", pools=None):
    scenario, saves = load_scenario("scenarios/day34.toml"), Saves(folder)
    timings = sweep_pool_sizes(
        build_requests(scenario.workload),
        pools or scenario.sweep.pools,
        engine_factory(engine, scenario.engine),
        observer=saves,
    )
    return saves.writer, timings


@pytest.fixture(scope="module")
def day34(tmp_path_factory):
    """Where a whole result lies."""
    folder = tmp_path_factory.mktemp("result")
    writer, timings = sweep_into(folder)
    writer.join(timings, RUN)
    return folder


@pytest.fixture
def folder(tmp_path, day34):
    """A copy of it to damage."""
    shutil.copytree(day34, tmp_path / "o")
    return tmp_path / "o"


@pytest.fixture(scope="module")
def tables(day34):
    return {name: pq.read_table(day34 / f"{name}.parquet").to_pylist() for name in TABLES}


@pytest.mark.parametrize("name", TABLES)
def test_files_carry_the_schema_with_units_and_meanings(day34, name):
    schema = pq.read_schema(day34 / f"{name}.parquet")
    assert schema.names == [column.name for column in TABLES[name]]
    for column in TABLES[name]:
        field = schema.field(column.name)
        assert field.type == column.type
        assert field.nullable == bool(column.null_when)
        assert field.metadata[b"unit"].decode() == column.unit
        assert field.metadata[b"meaning"].decode() == column.meaning
    assert schema.metadata[b"schema_version"] == b"3"


def test_rows_add_up_across_tables(tables):
    for pool in tables["pools"]:
        requests, iterations, admissions, prefills, evictions = (
            [row for row in tables[name] if row["pool_blocks"] == pool["pool_blocks"]]
            for name in ("requests", "iterations", "admissions", "prefills", "evictions")
        )
        for name in ("issued_tokens", "collected_tokens", "forward_tokens", "padded_tokens", "prefill_rows",
                     "recomputed_tokens", "rebuilt_tokens", "preemptions"):  # fmt: skip
            assert sum(row[name] for row in iterations) == pool[name], name
        for name in ("preemptions", "recomputed_tokens", "rebuilt_tokens"):
            assert sum(row[name] for row in requests) == pool[name], name
        assert len(iterations) == pool["iterations"] >= pool["floor_iterations"]
        assert len(admissions) == len(prefills) == pool["prefill_rows"] == pool["requests"] + pool["preemptions"]
        assert sum(row["positions"] for row in prefills if row["resumed"]) == pool["recomputed_tokens"]
        assert sum(row["rebuilt_tokens"] for row in prefills) == pool["rebuilt_tokens"]
        assert len(evictions) == pool["preemptions"]
        assert sum(row["rebuilt_tokens"] for row in evictions) == pool["rebuilt_tokens"]
        assert sum(row["cached_tokens"] for row in evictions) == pool["rebuilt_tokens"]
        assert sum(row["finished"] for row in iterations) == pool["requests"]


def test_a_latency_is_queueing_plus_waiting_to_return_plus_one_iteration_per_token(tables):
    for row in tables["requests"]:
        assert (
            row["latency_iterations"] == row["queued_iterations"] + row["returning_iterations"] + row["output_tokens"]
        )


def test_paired_latencies_compare_with_the_roomy_pool(tables):
    by = {(row["pool_blocks"], row["request_id"]): row for row in tables["requests"]}
    assert by[12, "r5"]["paired_latency_ratio"] == 64 / 24
    assert all(pool["reference_pool_blocks"] == 48 for pool in tables["pools"])
    assert tables["pools"][4]["paired_latency_penalty"] == pytest.approx(1.9, abs=1e-12)  # a sum of five ratios


def test_the_ledger_of_one_eviction(tables):
    ledger = [row for row in tables["evictions"] if row["pool_blocks"] == 12 and row["request_id"] == "r1"]
    assert ledger == [
        {
            "point": 4,
            "pool_blocks": 12,
            "choices": "",
            "numerics": "exact",
            "iteration": 20,
            "request_id": "r1",
            "slot": 1,
            "cached_tokens": 24,
            "generated_tokens": 20,
            "freed_blocks": 6,
            "thrash": False,
            "reclaim": "recompute",
            "swap_full": False,
            "resumed_iteration": 24,
            "rebuilt_tokens": 24,
            "recovered_tokens": 0,
            "swapped_tokens": 0,
        }
    ]


def test_waiting_counts_from_arrival_and_idle_iterations_are_not_iterations():
    admitted = [(Admission("a", 0, False),), (), (Admission("b", 0, False),)]
    script = [
        it(1, admissions=admitted[0], finished=("a",)),
        it(0, admissions=admitted[1]),
        it(1, admissions=admitted[2], finished=("b",)),
    ]
    tables = tables_of([request("a"), request("b", arrival=1)], script, slots=1)
    assert [row["queued_iterations"] for row in tables["requests"]] == [0, 1]
    assert [row["iterations"] for row in tables["pools"]] == [2]


def test_requests_preempted_counts_requests_not_evictions(tables):
    assert [(row["requests_preempted"], row["preemptions"]) for row in tables["pools"]] == [
        (0, 0), (2, 2), (3, 3), (4, 5), (5, 7), (5, 8),
    ]  # fmt: skip


def test_parts_of_an_earlier_sweep_are_gone_when_one_begins(tmp_path):
    for pool in (48, 32):
        writer, _ = sweep_into(tmp_path, "schedule", [pool])
        writer.close()
    assert [path.name for path in (tmp_path / "batchbench-parts").glob("point-*")] == ["point-0"]
    saved = pq.read_table(tmp_path / "batchbench-parts/point-0/pools.parquet")
    assert saved["pool_blocks"].to_pylist() == [32]


def test_what_an_engine_does_not_report_is_null_not_zero():
    script = [it(1), it(0, preempted=("a",)), it(1, finished=("a",))]
    rows = tables_of([request("a", 2)], script)
    (pool,) = rows["pools"]
    for name in (
        "pool_bytes", "padded_tokens", "prefill_rows", "recomputed_tokens", "rebuilt_tokens", "recompute_fraction",
        "recompute_tax", "thrashes", "straight_through_latency_iterations", "preemption_latency_penalty",
        "preemption_latency_penalty_s", "paired_latency_penalty", "reference_pool_blocks", "recovered_tokens",
        "shared_tokens", "swapped_tokens", "swapped_bytes", "copy_s",
    ):  # fmt: skip
        assert pool[name] is None, name
    assert pool["forward_tokens"] == 2
    assert rows["admissions"] == rows["prefills"] == []
    (row,) = rows["requests"]
    assert row["queued_iterations"] is row["returning_iterations"] is row["rebuilt_tokens"] is None
    (eviction,) = rows["evictions"]
    assert (eviction["iteration"], eviction["slot"], eviction["resumed_iteration"]) == (1, None, None)
    assert rows["iterations"][0]["forward_tokens"] is None
    assert rows["texts"][0]["logit_gaps"] is None


@pytest.mark.parametrize("numerics", ["exact", "fast", None])
def test_every_table_says_what_is_promised_of_the_bits(tmp_path, numerics):
    evicted, admitted = (Eviction("a"),), (Admission("a"),)
    told = {"began": (), "paused": ()}
    script = [
        it(1, admissions=admitted, prefills=(Prefill("a", 1, 0, False),), **told | {"began": ("a",)}),
        it(0, preempted=("a",), evictions=evicted, admissions=(), **told),
        it(1, admissions=admitted, finished=("a",), **told | {"began": ("a",)}),
    ]
    result = result_of(tmp_path, RUN, [request("a", 2)], script, numerics=numerics)
    for name in TABLES:
        assert {row["numerics"] for row in result.rows(name)} == {numerics}, name
        assert str(result.tables[name]["numerics"].dtype) == "category"


def test_admissions_without_evictions_do_not_make_up_a_waiting_time():
    script = [
        it(1, preempted=None, admissions=(Admission("a", 0, False),)),
        it(1, preempted=None, admissions=(), finished=("a",)),
    ]
    (row,) = tables_of([request("a", 2)], script)["requests"]
    assert row["preemptions"] is row["returning_iterations"] is row["queued_iterations"] is None


def test_null_when_is_said_of_every_column_that_can_be_null_and_of_no_other(tables):
    for name, rows in tables.items():
        for column in TABLES[name]:
            if not column.null_when:
                assert all(row[column.name] is not None for row in rows)
        assert arrow_schema(name).names == list(rows[0])


def test_each_pool_is_on_disk_as_soon_as_it_is_done_and_parts_go_when_joined(tmp_path):
    writer, timings = sweep_into(tmp_path, "schedule", [48])
    part = tmp_path / "batchbench-parts/point-0"
    assert everything_under(part) == sorted([*(f"{name}.parquet" for name in TABLES), "run.json", "run.npz"])
    assert pq.read_table(part / "pools.parquet").num_rows == 1
    writer.join(timings, RUN)
    assert everything_under(tmp_path) == sorted([*(f"{name}.parquet" for name in TABLES), "run.json"])


def test_reading_back_gives_what_was_written(day34):
    result = load_result(day34)
    assert result.run["scenario"] == {"name": "day34"}
    assert list(result.tables["pools"]["pool_blocks"]) == [48, 32, 24, 16, 12, 8]
    assert list(result.point("requests", 4)["latency_iterations"]) == [24, 28, 36, 44, 56, 64]
    assert math.isnan(result.point("pools", 0)["recomputed_tokens_per_preemption"].item())
    assert result.rows("pools")[0]["recomputed_tokens_per_preemption"] is None


def damage_missing(folder):
    (folder / "texts.parquet").unlink()


def damage_version(folder):
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(run | {"schema_version": 99}))


def damage_run_id(folder):
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(run | {"run_id": "another"}))


def damage_engine(folder):
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(run | {"engine": "six"}))


def damage_empty(folder):
    table = pq.read_table(folder / "pools.parquet")
    pq.write_table(table.slice(0, 0), folder / "pools.parquet")


def rewrite(folder, name, change):
    """Replace a table's rows, its schema and metadata kept."""
    table = pq.read_table(folder / f"{name}.parquet")
    pq.write_table(pa.Table.from_pylist(change(table.to_pylist()), schema=table.schema), folder / f"{name}.parquet")


def damage_requests(folder):
    rewrite(folder, "requests", lambda rows: rows[1:])


def damage_ledger(folder):
    rewrite(folder, "evictions", lambda rows: [row | {"request_id": "zz"} for row in rows])


def damage_slot(folder):
    rewrite(folder, "admissions", lambda rows: [row | {"slot": -4} for row in rows])


def damage_pool(folder):
    rewrite(folder, "pools", lambda rows: [rows[0], *rows])


def damage_nesting(folder):
    (folder / "run.json").write_text("[" * 100_000)


def damage_name(folder):
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(run | {"scenario": {"name": "\ud800"}}))


def damage_columns(folder):
    table = pq.read_table(folder / "pools.parquet")
    pq.write_table(table.drop_columns(["occupancy"]), folder / "pools.parquet")


def damage_truncate(folder):
    data = (folder / "pools.parquet").read_bytes()
    (folder / "pools.parquet").write_bytes(data[: len(data) // 2])


def damage_json(folder):
    (folder / "run.json").write_text('{"schema_version": 1')


def damage_json_type(folder):
    (folder / "run.json").write_text("[]")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_missing, "is not a result folder: it lacks texts.parquet"),
        (damage_version, "has schema version 99, newer than the 3 that this batchbench reads"),
        (damage_run_id, "pools.parquet is from another run than run.json"),
        (damage_requests, "requests.parquet does not have every request once per point"),
        (damage_ledger, "evictions.parquet speaks of points or requests that are not there"),
        (damage_slot, "admissions.parquet has a slot outside the 6 there are"),
        (damage_pool, "pools.parquet has no points, or one twice"),
        (damage_nesting, "damaged file"),
        (damage_name, "run.json lacks the scenario's name"),
        (damage_engine, "run.json lacks the scenario's name, its engine or"),
        (damage_empty, "pools.parquet has no points"),
        (damage_columns, "pools.parquet has other columns than schema version 3"),
        (damage_truncate, "damaged file"),
        (damage_json, "damaged file"),
        (damage_json_type, "has schema version None"),
    ],
)
def test_a_damaged_folder_is_refused(folder, damage, message):
    damage(folder)
    with pytest.raises(ResultError, match=message):
        load_result(folder)


def test_a_folder_that_vanishes_is_one_error(tmp_path):
    about = ScriptedEngine([], {}, slots=1, pool_blocks=4, clock=FakeClock()).describe()
    writer = ResultWriter(tmp_path / "o")
    writer.open()
    shutil.rmtree(tmp_path / "o/batchbench-parts")
    with pytest.raises(BatchbenchError, match="output folder .*o: .*No such file or directory"):
        writer.open_point(Point(4), about)
    with pytest.raises(BatchbenchError, match="output folder .*o: .*No such file or directory"):
        writer.join([], {})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_figure_that_is_no_number_is_damage(folder, value):
    rewrite(folder, "pools", lambda rows: [row | {"occupancy": value} for row in rows])
    with pytest.raises(ResultError, match=r"pools\.parquet has a occupancy that is no number"):
        load_result(folder)
