"""--resume: what is finished is not run again, what is not the same is refused, and the proof of equal texts holds."""

from __future__ import annotations

import json
import re
import shutil
from array import array
from dataclasses import fields

import numpy as np
import pyarrow.parquet as pq
import pytest

from batchbench import build_requests, engine_factory, load_scenario, sweep_pool_sizes
from batchbench.clocks import IterationCost
from batchbench.driver import Pacing
from batchbench.errors import ResultError
from batchbench.ledger import LEDGER
from batchbench.paths import FilePath
from batchbench.protocol import Point
from batchbench.recorder import Events, Recorder
from batchbench.results import load_result
from batchbench.saved_timing import load_timing, save_timing
from batchbench.service import Slo
from batchbench.tables import point_tables
from engine.scheduler import Scheduler
from tests.batchbench.scripted import it, play, request
from tests.batchbench.test_cli import DAY34, everything_under, here, invoke, plant, scenario

assert here  # a fixture
QUIET = ("--no-plots", "--no-progress", "--out", "o")
VIRTUAL = Pacing("virtual", IterationCost.of_seconds(0.001, 0.0002, 0.00001))
PARTS = "o/batchbench-parts"


def interrupted_after(monkeypatch, points, here, *arguments, path=DAY34):
    """A sweep that is interrupted when so many points are done."""
    honest, done = Scheduler.__init__, []

    def build(self, *args, **kwargs):
        if len(list((here / PARTS).glob("point-*"))) == points:
            done.append(1)
            raise KeyboardInterrupt
        honest(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "__init__", build)
        ended = invoke("sweep", str(path), *QUIET, *arguments)
    assert (ended.exit_code, ended.stderr) == (130, "interrupted\n")
    assert len(list((here / PARTS).glob("point-*"))) == points


def ran(done):
    """Which pools a sweep ran."""
    return [int(line.split()[1]) for line in done.stderr.splitlines() if line.startswith("pool ")]


# ---- going on ------------------------------------------------------------------------------------


def test_only_what_is_missing_is_run(here, monkeypatch):
    interrupted_after(monkeypatch, 4, here)
    done = invoke("sweep", str(DAY34), "--no-plots", "--out", "o", "--resume")
    assert (done.exit_code, ran(done)) == (0, [12, 8])
    assert done.stderr.startswith("resumed: 4 of 6 runs finished\n")
    found, today = load_result(here / "o"), load_result(DAY34.parents[1] / "results/day34")
    for name in ("pools", "requests", "texts"):
        for row, want in zip(found.rows(name), today.rows(name), strict=True):
            differ = {column for column in row if row[column] != want[column]}
            assert all(column.endswith(("_s", "logit_gaps")) for column in differ), (name, differ)
    assert everything_under(here / "o") == sorted(path.name for path in (DAY34.parents[1] / "results/day34").iterdir())


def test_a_complete_result_is_said_and_not_run_again(here):
    first = invoke("sweep", str(DAY34), *QUIET)
    before = (here / "o/run.json").read_bytes()
    again = invoke("sweep", str(DAY34), *QUIET, "--resume")
    assert (again.exit_code, again.stdout) == (0, first.stdout)
    assert again.stderr == "resumed: the result is complete, there is nothing to run\n"
    assert (here / "o/run.json").read_bytes() == before


def test_a_reader_is_told_of_it(here, monkeypatch):
    interrupted_after(monkeypatch, 1, here)
    assert invoke("plot", "o").stderr == (
        "error: o is not a result folder: it lacks run.json; a sweep into it has not finished, and --resume goes on "
        "with it\n"
    )


@pytest.mark.parametrize("made", [False, True])
def test_with_nothing_there_it_is_a_sweep(here, made):
    if made:
        (here / "o").mkdir()
    assert invoke("sweep", str(DAY34), *QUIET, "--resume", "--engine", "schedule").exit_code == 0
    assert len(load_result(here / "o").rows("pools")) == 6


def test_bad_input_makes_no_folder(here):
    path = scenario(here, ("[48, 32, 24, 16, 12, 8]", "[3]"))
    assert invoke("sweep", path, *QUIET, "--resume").exit_code == 2
    assert everything_under(here) == ["x.toml"] and not (here / "o").exists()


def test_without_it_a_sweep_begins_anew(here, monkeypatch):
    interrupted_after(monkeypatch, 4, here)
    done = invoke("sweep", str(DAY34), "--no-plots", "--out", "o")
    assert ran(done) == [48, 32, 24, 16, 12, 8]


def test_show_text_shows_what_was_computed_before(here, monkeypatch):
    whole = invoke("sweep", str(DAY34), "--no-plots", "--no-progress", "--out", "whole", "--show-text")
    interrupted_after(monkeypatch, 4, here)
    done = invoke("sweep", str(DAY34), *QUIET, "--resume", "--show-text")
    assert done.stdout.split("r0 prompt")[1] == whole.stdout.split("r0 prompt")[1]


def test_repetitions_go_on_pass_by_pass(here, monkeypatch):
    """Times of finished repetitions are those that were measured then; the warm-up is run again."""
    path = scenario(here, ("pools = [48, 32, 24, 16, 12, 8]", "pools = [48, 8]\n[run]\nwarmup = 1\nrepetitions = 3"))
    seen = []

    def counted(self, place, which, run):
        self._writer.save_repetition(which.number, place, run)
        seen.append((place, which.number, run["wall_s"]))
        if len(seen) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("batchbench.running._Saves.on_measured", counted)
    assert invoke("sweep", path, *QUIET).exit_code == 130
    kept = list(seen)
    done = invoke("sweep", path, "--no-plots", "--out", "o", "--resume")
    assert done.exit_code == 0
    assert done.stderr.startswith("resumed: 5 of 6 runs finished\n")
    assert [re.search("(warm-up|repetition) . of .", line)[0] for line in done.stderr.splitlines()[1:]] == [
        "warm-up 1 of 1", "warm-up 1 of 1", "repetition 3 of 3",
    ]  # fmt: skip
    assert [(place, number) for place, number, _ in seen[3:]] == [(1, 2)]
    rows = load_result(here / "o").rows("repetitions")
    assert [(row["point"], row["repetition"]) for row in rows] == [(n, m) for n in (0, 1) for m in (0, 1, 2)]
    by = {(row["point"], row["repetition"]): row["wall_s"] for row in rows}
    assert [by[place, number] for place, number, _ in kept] == [wall_s for *_, wall_s in kept]
    statistics = {(row["point"], row["metric"]): row for row in load_result(here / "o").rows("statistics")}
    assert statistics[0, "wall_s"]["n"] == 3
    assert statistics[0, "wall_s"]["median"] == sorted(by[0, n] for n in range(3))[1]


# ---- the proof -----------------------------------------------------------------------------------


def test_texts_are_compared_with_those_of_finished_points(here, monkeypatch):
    interrupted_after(monkeypatch, 1, here)
    plant(monkeypatch)
    done = invoke("sweep", str(DAY34), *QUIET, "--resume")
    assert done.exit_code == 4
    assert done.stderr.splitlines()[1].startswith(
        "error: texts differ, so there are no timings: request 'r4', generated"
    )
    assert everything_under(here / "o") == []


def test_counts_are_compared_with_those_of_finished_points(here, monkeypatch):
    path = scenario(here, ("pools = [48, 32, 24, 16, 12, 8]", "pools = [48]\n[run]\nrepetitions = 2"))
    interrupted_after(monkeypatch, 1, here, path=path)
    facts = json.loads((here / PARTS / "point-0/run.json").read_text())
    facts["record"]["free_sum"] += 1
    (here / PARTS / "point-0/run.json").write_text(json.dumps(facts))
    done = invoke("sweep", path, *QUIET, "--resume")
    assert done.exit_code == 1
    assert "counts differ, so there are no timings: the sum of free_blocks is" in done.stderr


# ---- what is not the same --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (("slots = 6", "slots = 5"), (), "cannot resume, scenario.engine.slots was 6 and is 5;"),
        (("requests = 6", "requests = 7"), (), "scenario.workload.requests was 6 and is 7;"),
        (
            ("16, 12, 8]", "16, 12]"),
            (),
            "scenario.sweep.pools was [48, 32, 24, 16, 12, 8] and is [48, 32, 24, 16, 12];",
        ),
        (None, ("--numerics", "fast"), "scenario.engine.numerics was 'exact' and is 'fast';"),
        (None, ("--repetitions", "2"), "scenario.run.repetitions was 1 and is 2;"),
        (None, ("--engine", "schedule"), "engine.engine was 'batchbench' and is 'schedule';"),
    ],
)
def test_another_sweep_is_refused_by_what_differs(here, monkeypatch, change, options, message):
    interrupted_after(monkeypatch, 2, here)
    before = {path: (here / path).read_bytes() for path in everything_under(here)}
    path = scenario(here, change) if change else str(DAY34)
    done = invoke("sweep", path, *QUIET, "--resume", *options)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: output folder o: cannot resume, ") and done.stderr.count("\n") == 1
    assert message in done.stderr
    (here / "x.toml").unlink(missing_ok=True)
    assert {path: (here / path).read_bytes() for path in everything_under(here)} == before


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("schema_version", 2), ("workload_hash", "0"), ("versions.torch", "1.0"), ("git.commit", "0"),
        ("machine.processor", "another"), ("engine.numerics_detail", "exact (by magic)"), ("points", ["pool 48"]),
        ("inputs.calibration", "0"),
    ],
)  # fmt: skip
def test_another_machine_version_or_input_is_refused(here, monkeypatch, key, value):
    interrupted_after(monkeypatch, 2, here)
    manifest = json.loads((here / PARTS / "sweep.json").read_text())
    *parents, leaf = key.split(".")
    place = manifest
    for parent in parents:
        if place[parent] is None:
            pytest.skip(f"no {parent} is known of this checkout: run the tests in a clone of the repository")
        place = place[parent]
    place[leaf] = value
    (here / PARTS / "sweep.json").write_text(json.dumps(manifest))
    done = invoke("sweep", str(DAY34), *QUIET, "--resume")
    assert done.exit_code == 2 and f"cannot resume, {key} was {value!r} and is " in done.stderr


def test_a_reboot_changes_nothing(here, monkeypatch):
    interrupted_after(monkeypatch, 5, here)
    manifest = json.loads((here / PARTS / "sweep.json").read_text())
    manifest["machine"]["memory_bytes"] -= 4096
    manifest["versions"]["pandas"] = "0.1"
    (here / PARTS / "sweep.json").write_text(json.dumps(manifest))
    assert invoke("sweep", str(DAY34), *QUIET, "--resume").exit_code == 0


def test_another_calibration_is_refused(here, monkeypatch):
    """A file that decides what becomes of victims."""
    shutil.copy(DAY34.parents[1] / "scenarios/cheaper.calibration.json", here / "c.json")
    text = (DAY34.parents[1] / "scenarios/cheaper.toml").read_text()
    (here / "x.toml").write_text(text.replace("cheaper.calibration.json", "c.json"))
    interrupted_after(monkeypatch, 1, here, "--engine", "schedule", path="x.toml")
    (here / "c.json").write_text((here / "c.json").read_text() + "\n")
    done = invoke("sweep", "x.toml", *QUIET, "--engine", "schedule", "--resume")
    assert done.exit_code == 2 and "cannot resume, inputs.calibration was '" in done.stderr


def test_another_complete_result_is_left_alone(here):
    invoke("sweep", str(DAY34), *QUIET)
    before = (here / "o/run.json").read_bytes()
    done = invoke("sweep", str(DAY34), *QUIET, "--resume", "--engine", "schedule")
    assert done.exit_code == 2
    assert done.stderr == (
        "error: output folder o: nothing to resume but another result, engine.engine was 'batchbench' and is "
        "'schedule'; sweep without --resume to replace it\n"
    )
    assert (here / "o/run.json").read_bytes() == before


# ---- damage --------------------------------------------------------------------------------------


def write(name, data):
    return lambda parts: (parts / name).write_bytes(data)


def edit(name, old, new):
    def change(parts):
        data = (parts / name).read_bytes()
        assert data.count(old)
        (parts / name).write_bytes(data.replace(old, new))

    return change


@pytest.mark.parametrize(
    "damage",
    [
        write("sweep.json", b"{"),
        write("sweep.json", b"[]"),
        write("sweep.json", b"\xff"),
        write("point-0/run.json", b"{}"),
        write("point-0/run.json", b"[" * 100_000),
        write("point-0/run.npz", b"PK\x03\x04"),
        write("point-0/run.npz", b""),
        edit("point-0/run.npz", b"PK\x01\x02-\x03-", b"PK\x01\x02-\x03l"),  # a zip of version 10.8
        edit("point-0/run.json", b'"free_sum": ', b'"free_sum": "1", "was": '),
        write("point-0/texts.parquet", b"PAR1PAR1"),
        lambda parts: (parts / "point-0/run.npz").unlink(),
        lambda parts: np.savez(parts / "point-0/run.npz", arrived=np.array([1, 2])),
        lambda parts: np.savez(parts / "point-0/run.npz", arrived=np.array([object()]), allow_pickle=True),
    ],
)
def test_damaged_parts_are_one_line(here, monkeypatch, damage):
    interrupted_after(monkeypatch, 2, here)
    damage(here / PARTS)
    done = invoke("sweep", str(DAY34), *QUIET, "--resume")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.endswith(": damaged; sweep again without --resume\n") and done.stderr.count("\n") == 1
    assert invoke("sweep", str(DAY34), *QUIET).exit_code == 0


def shortened(path):
    table = pq.read_table(path)
    pq.write_table(table.slice(1), path)


def of_another_run(path):
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({b"run_id": b"0"}), path)


def without_a_column(path):
    pq.write_table(pq.read_table(path).drop_columns(["request_id" if path.stem == "prefills" else "iteration"]), path)


def a_bit_turned(path):
    """In the rows: the footer is whole."""
    data = bytearray(path.read_bytes())
    data[len(data) // 8] ^= 0xFF
    path.write_bytes(data)


LEDGER_DAMAGE = [
    lambda path: path.unlink(),
    lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    lambda path: path.write_bytes(b""),
    shortened,
    of_another_run,
    without_a_column,
]


@pytest.mark.parametrize("name", LEDGER)
def test_a_damaged_ledger_of_a_finished_point_is_found_before_anything_runs(here, monkeypatch, name):
    interrupted_after(monkeypatch, 2, here, "--engine", "schedule")
    path = here / PARTS / f"point-1/{name}.parquet"
    whole = path.read_bytes()
    damages = LEDGER_DAMAGE + [a_bit_turned] * (name == "iterations")
    if name == "prefills":
        damages.remove(shortened)  # the run does not know how many rows that has
    if name == "token_runs":
        damages.remove(without_a_column)  # it has no iteration
    for damage in damages:
        damage(path)
        done = invoke("sweep", str(DAY34), *QUIET, "--engine", "schedule", "--resume")
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr == f"error: {PARTS}/point-1: damaged; sweep again without --resume\n"
        path.write_bytes(whole)
    assert invoke("sweep", str(DAY34), *QUIET, "--engine", "schedule", "--resume").exit_code == 0


# ---- a run out of its files is the run -------------------------------------------------------------


def same(was, now):
    if isinstance(was, Events):
        return isinstance(now, Events) and all(same(getattr(was, f.name), getattr(now, f.name)) for f in fields(Events))
    if isinstance(was, array):
        return isinstance(now, array) and was.typecode == now.typecode and was == now
    return type(was) is type(now) and was == now


def assert_kept(tmp_path, timing):
    for name, data in point_tables(0, timing, None, Slo()).items():
        if name == "texts":
            pq.write_table(data, tmp_path / "texts.parquet")
    save_timing(tmp_path, timing)
    found = load_timing(tmp_path, timing.point, timing.requests)
    for name, value in vars(timing.record).items():
        if name not in ("_sink", "_running", "_open"):  # of a run that goes on
            assert same(value, getattr(found.record, name)), name
    assert vars(found.record).keys() == vars(timing.record).keys()
    for field in fields(timing):
        if field.name != "record":
            assert getattr(found, field.name) == getattr(timing, field.name), field.name
    slo = Slo(ttft_s=0.01, e2e_s=0.1)
    assert point_tables(0, found, found, slo) == point_tables(0, timing, timing, slo)


@pytest.mark.parametrize("name", ["day34", "chunks", "swap", "prefix_cache", "victims", "agents", "closed_loop"])
def test_a_schedule_is_kept_exactly(tmp_path, name):
    declared = load_scenario(f"scenarios/{name}.toml")
    settings = declared.engine.model_copy(update={"model": FilePath("tiny")})
    workload = declared.workload.model_copy(
        update={"prompts": None, "prompt_tokens": 40} if declared.workload.prompts else {}
    )
    (timing,) = sweep_pool_sizes(
        build_requests(workload, clock=declared.clock),
        [Point(90)],
        engine_factory("schedule", settings),
        pacing=VIRTUAL,
    )
    assert_kept(tmp_path, timing)


def test_a_run_of_the_engine_is_kept_exactly(tmp_path):
    declared = load_scenario(DAY34)
    (timing,) = sweep_pool_sizes(build_requests(declared.workload), [8], engine_factory("own", declared.engine))
    assert timing.texts and timing.texts["r0"].logit_gaps
    assert_kept(tmp_path, timing)


def test_what_an_engine_does_not_report_stays_unreported(tmp_path):
    script = [it(1, preempted=None, free_blocks=3), it(1, copy_s=0.1), it(1, finished=("a",))]
    timing = play([request("a", 3)], script, slots=1)
    assert timing.record.runs is None and timing.record.unsaid
    assert_kept(tmp_path, timing)


def test_a_run_of_other_requests_is_damage(tmp_path):
    timing = play([request("a", 2)], [it(1), it(1, finished=("a",))], slots=1)
    save_timing(tmp_path, timing)
    with pytest.raises(ResultError, match="damaged; sweep again without --resume"):
        load_timing(tmp_path, timing.point, [request("a"), request("b")])
    with pytest.raises(ValueError, match="other requests"):
        Recorder.restored([request("a"), request("b")], 4, timing.record.columns(), timing.record.facts())
