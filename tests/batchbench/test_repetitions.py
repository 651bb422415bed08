"""Warm-up and repetitions: in passes, proven equal, summed up; and limits that end a sweep."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from batchbench import (
    Eviction,
    RequestSpec,
    SweepObserver,
    Text,
    build_requests,
    engine_factory,
    load_scenario,
    sweep_pool_sizes,
)
from batchbench.adapters.fake import FakeClock, ScriptedEngine
from batchbench.clocks import NS, IterationCost
from batchbench.driver import Limits, Pacing, run_workload
from batchbench.errors import CountsDiffer, EngineFailed, OutcomeRefused, ScenarioError, TextsDiffer, UsageError
from batchbench.intervals import median_interval
from batchbench.repetitions import measured
from batchbench.results import load_result
from batchbench.scenario import EngineSettings, Scenario
from batchbench.schema import MAY_DIFFER, REPEATED_COUNTERS
from batchbench.sheets import sweep_sheet
from tests.batchbench.scripted import Saves, it, request
from tests.batchbench.test_cli import DAY34, assert_refused, everything_under, here, invoke, scenario  # noqa: F401  # a fixture

CALM = [it(1), it(1), it(1, finished=("a",))]
EVICTED = [
    it(1),
    it(0, preempted=("a",), evictions=(Eviction("a", generated_tokens=1),)),
    it(1),
    it(1, finished=("a",)),
]
WALL = Pacing("wall")
VIRTUAL = Pacing("virtual", IterationCost(NS))


class Machine:
    """Builds engines that play a script; `plan` says what the n-th run does otherwise: its script, text or seconds."""

    def __init__(self, plan=None, step_s=lambda run: 1.0):
        self.plan, self.step_s, self.clock = plan or {}, step_s, FakeClock()
        self.runs, self.engines = [], []

    def __call__(self, pool_blocks):
        machine = self

        class Engine(ScriptedEngine):
            def submit(self, request):
                if not self.submitted:
                    number = len(machine.runs)
                    machine.runs.append((pool_blocks, machine.clock.now_s))
                    found = machine.plan.get(number, {})
                    self._script = found.get("script", CALM)
                    self._texts = {"a": Text(found.get("text", (1, 2, 3)))}
                    self._step_s = [machine.step_s(number)] * len(self._script)
                super().submit(request)

        engine = Engine(CALM, {}, slots=1, pool_blocks=pool_blocks, clock=self.clock)
        self.engines.append(engine)
        return engine


def sweep(machine, pools=(16, 8), **options):
    return sweep_pool_sizes([request("a", 3)], pools, machine, clock=machine.clock, **options)


# ---- the order ---------------------------------------------------------------------------------


class Watch(SweepObserver):
    """Notes what it is told, and of which pass."""

    def __init__(self):
        self.seen = []

    def on_point(self, point, which):
        self.seen.append((which.name, point.pool_blocks))

    def ledger(self, point, engine):
        self.seen.append(("ledger", point.pool_blocks))

    def on_timing(self, timing):
        self.seen.append(("timing", timing.pool_blocks))

    def on_repeated(self, point, which):
        self.seen.append(("repeated", point.pool_blocks))


def test_a_turn_goes_through_all_points_before_the_next_begins():
    """A machine that grows slower: the pools of one pass share its drift."""
    machine, watch = Machine(step_s=lambda run: 1.0 + run), Watch()
    timings = sweep(machine, warmup=2, repetitions=3, observer=watch)
    assert [pool for pool, _ in machine.runs] == [16, 8] * 5
    assert [began for _, began in machine.runs] == [3.0 * sum(range(1, run + 1)) for run in range(10)]
    assert [[run["engine_s"] for run in timing.repetitions] for timing in timings] == [
        [3.0 * (1 + run) for run in (4, 6, 8)],
        [3.0 * (1 + run) for run in (5, 7, 9)],
    ]
    assert all(engine.closed for engine in machine.engines)


def test_the_observer_is_told_the_turn_and_only_the_first_repetition_is_written():
    watch = Watch()
    sweep(Machine(), (16, 8), warmup=1, repetitions=2, observer=watch)
    assert watch.seen == [
        ("warm-up 1 of 1", 16), ("repeated", 16), ("warm-up 1 of 1", 8), ("repeated", 8),
        ("repetition 1 of 2", 16), ("ledger", 16), ("timing", 16),
        ("repetition 1 of 2", 8), ("ledger", 8), ("timing", 8),
        ("repetition 2 of 2", 16), ("repeated", 16), ("repetition 2 of 2", 8), ("repeated", 8),
    ]  # fmt: skip


def test_the_result_of_a_point_is_its_first_repetition():
    first, again = (sweep(Machine(), repetitions=n) for n in (1, 2))
    assert [timing.repetitions for timing in first] == [(), ()]
    for once, twice in zip(first, again, strict=True):
        assert twice.repetitions == (measured(once), measured(once))
        assert (once.latencies_s, once.wall_s) == (twice.latencies_s, twice.wall_s)


# ---- the proof ---------------------------------------------------------------------------------


@pytest.mark.parametrize("pacing", [Pacing(), VIRTUAL, WALL])
def test_another_text_in_a_later_repetition_hands_back_nothing(pacing):
    machine = Machine({5: {"text": (1, 7, 3)}})
    with pytest.raises(TextsDiffer) as caught:
        sweep(machine, repetitions=3, pacing=pacing)
    assert str(caught.value) == (
        "texts differ, so there are no timings: request 'a', generated token 1: "
        "pool 8, first, continues [2, 3] (best two logits an unreported distance apart, never evicted); "
        "pool 8, repetition 3 of 3, continues [7, 3] (best two logits an unreported distance apart, never evicted)"
    )


@pytest.mark.parametrize("pacing", [Pacing(), VIRTUAL])
def test_an_eviction_more_in_a_later_repetition_hands_back_nothing(pacing):
    with pytest.raises(CountsDiffer) as caught:
        sweep(Machine({2: {"script": EVICTED}}), repetitions=2, pacing=pacing)
    assert str(caught.value) == (
        "counts differ, so there are no timings: recomputed_tokens is unreported in pool 16, repetition 2 of 2, and "
        f"was 0 in the first; with clock = '{pacing.clock}' every run must count the same"
    )
    assert isinstance(caught.value, OutcomeRefused) and caught.value.exit_code == 1


def test_in_real_time_counts_may_differ_and_every_repetition_tells_its_own():
    timing, _ = sweep(Machine({2: {"script": EVICTED}}), repetitions=3, pacing=WALL)
    assert [run["preemptions"] for run in timing.repetitions] == [0, 1, 0]
    assert [run["iterations"] for run in timing.repetitions] == [3, 3, 3]
    assert timing.preemptions == 0


def moved(outcomes, place, **fields):
    return [replace(outcome, **fields) if at == place else outcome for at, outcome in enumerate(outcomes)]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ([it(1), it(1, 0), it(1), it(1, finished=("a",))], "issued_tokens is 4"),
        (moved(CALM, 0, forward_tokens=5), "forward_tokens is 7"),
        ([it(1), it(0, free_blocks=0), it(1), it(1, finished=("a",))], "latency of 'a' is 4"),
        (moved(CALM, 0, padded_tokens=2), "padded_tokens is 2"),
        (moved(CALM, 0, prefill_rows=1), "prefill_rows is 1"),
        (moved(CALM, 1, free_blocks=3), "the sum of free_blocks is 3"),
        (moved(CALM, 1, unused_tokens=3), "the sum of unused_tokens is 3"),
        (moved(CALM, 0, shared_tokens=3), "shared_tokens is 3"),
        (moved(CALM, 0, swapped_out_tokens=3), "swapped_out_tokens is 3"),
    ],
)
def test_the_first_counter_that_differs_is_named(other, named):
    known = {"padded_tokens": 0, "prefill_rows": 0, "free_blocks": 0, "unused_tokens": 0, "shared_tokens": 0,
             "swapped_out_tokens": 0}  # fmt: skip

    def full(outcomes):
        fill = [{k: v for k, v in known.items() if getattr(outcome, k) is None} for outcome in outcomes]
        return [replace(outcome, **one) for outcome, one in zip(outcomes, fill, strict=True)]

    plan = {0: {"script": full(CALM)}, 1: {"script": full(other)}}
    with pytest.raises(CountsDiffer, match=f"differ, so there are no timings: {named} in pool 8, repetition 2 of 2"):
        sweep(Machine(plan), (8,), repetitions=2)


def test_an_eviction_elsewhere_is_named_by_its_request():
    def evicted_in(place):
        script = [it(1), it(1), it(1, finished=("a",))]
        script.insert(place, it(0, preempted=("a",)))
        return script

    plan = {0: {"script": evicted_in(1)}, 1: {"script": evicted_in(2)}}
    with pytest.raises(CountsDiffer, match=r"preempted_at of 'a' is \(2,\) in pool 8, .*, and was \(1,\) in the first"):
        sweep(Machine(plan), (8,), repetitions=2)


def test_the_real_engine_repeats_itself():
    declared = load_scenario(DAY34)
    make_engine = engine_factory("own", declared.engine)
    timings = sweep_pool_sizes(build_requests(declared.workload), (48, 12), make_engine, warmup=1, repetitions=3)
    for timing in timings:
        assert len(timing.repetitions) == 3
        assert all(run["engine_s"] > 0 and run["itl_p99_s"] > 0 for run in timing.repetitions)
        assert all(run[name] is None for run in timing.repetitions for name in REPEATED_COUNTERS)


# ---- the tables --------------------------------------------------------------------------------


def result(folder, machine, **options):
    saves = Saves(folder)
    timings = sweep(machine, observer=saves, **options)
    run = {"scenario": {"name": "x"}, "engine": {}}
    saves.writer.join(timings, run)
    return load_result(folder)


def test_tables_hold_every_repetition_and_no_warmup(tmp_path):
    seconds = (100.0, 100.0, 1.0, 2.0, 5.0, 4.0, 3.0, 8.0)
    found = result(tmp_path, Machine(step_s=lambda run: seconds[run]), warmup=1, repetitions=3)
    rows = found.rows("repetitions")
    assert [(row["point"], row["repetition"]) for row in rows] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert [row["engine_s"] for row in rows] == [3.0, 15.0, 9.0, 6.0, 12.0, 24.0]
    assert [row["e2e_p50_s"] for row in rows] == [row["duration_s"] for row in rows] == [row["wall_s"] for row in rows]
    assert [row["collected_per_s"] for row in rows] == [3 / row["duration_s"] for row in rows]
    assert all(row[name] is None for row in rows for name in REPEATED_COUNTERS)
    pools = found.rows("pools")
    assert [(pool["repetitions"], pool["counters"], pool["engine_s"]) for pool in pools] == [
        (3, "exact", 3.0),
        (3, "exact", 6.0),
    ]
    assert len(found.rows("iterations")) == 6  # of the first repetition alone
    statistics = {(row["point"], row["metric"]): row for row in found.rows("statistics")}
    row = statistics[0, "engine_s"]
    assert (row["n"], row["median"], row["low"], row["high"], row["level"]) == (3, 9.0, 3.0, 15.0, 0.75)
    assert (row["unit"], statistics[1, "collected_per_s"]["unit"]) == ("s", "tokens/s")
    named = ("wall_s", "engine_s", "duration_s", "collected_per_s", "e2e_p50_s", "e2e_p99_s")
    assert [metric for point, metric in statistics if point == 1] == list(named)  # tokens are not told: no TTFT


def test_one_run_has_no_interval(tmp_path):
    found = result(tmp_path, Machine())
    assert [pool["repetitions"] for pool in found.rows("pools")] == [1, 1]
    for row in found.rows("statistics"):
        assert row["n"] == 1 and row["median"] > 0
        assert row["low"] is row["high"] is row["level"] is None


def test_in_real_time_the_tables_say_that_counters_may_differ(tmp_path):
    found = result(tmp_path, Machine({2: {"script": EVICTED}}), repetitions=3, pacing=WALL)
    assert [pool["counters"] for pool in found.rows("pools")] == [MAY_DIFFER] * 2
    assert [row["preemptions"] for row in found.rows("repetitions")] == [0, 1, 0, 0, 0, 0]
    (row,) = (row for row in found.rows("statistics") if row["point"] == 0 and row["metric"] == "preemptions")
    assert (row["unit"], row["median"], row["low"], row["high"]) == ("evictions", 0.0, 0.0, 1.0)
    sheet = sweep_sheet(found.rows("pools"), found.rows("statistics"))
    assert sheet.headings[-2:] == ("counters", "engine time, median [low, high]")
    assert sheet.rows[0][-2:] == (MAY_DIFFER, "3.00 s [3.00 s, 4.00 s] n=3")


def test_what_a_model_makes_the_same_is_no_statistic(tmp_path):
    found = result(tmp_path, Machine(), repetitions=2, pacing=VIRTUAL)
    assert {row["metric"] for row in found.rows("statistics")} == {"wall_s"}
    assert all(row["engine_s"] == 3.0 for row in found.rows("repetitions"))
    assert sweep_sheet(found.rows("pools"), found.rows("statistics")).headings[-1].startswith("wall time")


def test_every_service_time_of_a_real_run_has_its_row(tmp_path):
    declared, saves = load_scenario(DAY34), Saves(tmp_path)
    timings = sweep_pool_sizes(
        build_requests(declared.workload),
        (48, 12),
        engine_factory("own", declared.engine),
        observer=saves,
        repetitions=2,
    )
    saves.writer.join(timings, {"scenario": {"name": "x"}, "engine": {}})
    found = load_result(tmp_path)
    first = [row for row in found.rows("repetitions") if row["repetition"] == 0]
    for row in found.rows("service"):
        if row["unit"] == "s" and row["metric"] != "queue":
            assert first[row["point"]][f"{row['metric']}_p50_s"] == row["p50"], row["metric"]
            assert first[row["point"]][f"{row['metric']}_p99_s"] == row["p99"], row["metric"]
    for row in found.rows("statistics"):
        runs = [run[row["metric"]] for run in found.rows("repetitions") if run["point"] == row["point"]]
        assert (row["median"], row["low"], row["high"]) == (median_interval(runs).median, min(runs), max(runs))
    assert len(found.rows("statistics")) == 2 * 12


# ---- limits ------------------------------------------------------------------------------------

SETTINGS = EngineSettings(slots=1, block_size=4)
TWO = [RequestSpec("a", (1, 2), 5), RequestSpec("b", (1, 2), 5)]


def test_a_run_that_reaches_its_iterations_ends_the_sweep_and_says_what_to_raise():
    machine = Machine({3: {"script": EVICTED}})
    sweep(machine, limits=Limits(max_iterations=3))
    with pytest.raises(EngineFailed) as caught:
        sweep(machine, limits=Limits(max_iterations=3))
    assert str(caught.value) == (
        "pool 8: 3 iterations are over and 0 of 1 requests have finished; an incomplete run gives no result: raise "
        "max_iterations in [run], or ask for less"
    )
    assert all(engine.closed for engine in machine.engines)


@pytest.mark.parametrize("engine", ["own", "schedule"])
@pytest.mark.parametrize("most", [1, 5, 9, 10])
def test_iterations_that_are_run_at_once_count_too(engine, most):
    requests = [replace(one, arrival=1000 * place) for place, one in enumerate(TWO)]  # nobody is there in between
    one = engine_factory(engine, SETTINGS)(8)
    if most == 10:
        assert run_workload(one, requests, limits=Limits(max_iterations=most)).busy_iterations == 10
        return
    told = f"{most} iterations are over and {int(most >= 5)} of 2 requests have finished"
    with pytest.raises(EngineFailed, match=told):
        run_workload(one, requests, limits=Limits(max_iterations=most))


def test_a_run_that_takes_its_time_ends_the_sweep():
    machine = Machine(step_s=lambda run: 0.5)
    assert len(sweep(machine, limits=Limits(max_s=1.5))) == 2  # its last iteration ends then
    with pytest.raises(EngineFailed, match=r"^pool 16: 1 s are over and 0 of 1 .* raise max_s in \[run\]"):
        sweep(machine, limits=Limits(max_s=1.0))


def test_real_time_is_not_waited_for_beyond_the_limit():
    late = [replace(TWO[0], arrival=0), replace(TWO[1], arrival=3600 * NS)]
    with pytest.raises(EngineFailed, match="pool 8: 0.2 s are over and 1 of 2 requests have finished"):
        run_workload(engine_factory("own", SETTINGS)(8), late, pacing=WALL, limits=Limits(max_s=0.2))


def test_a_warmup_has_the_same_limits():
    with pytest.raises(EngineFailed, match="2 iterations are over"):
        sweep(Machine(), warmup=1, limits=Limits(max_iterations=2))


# ---- scenarios and the command line ------------------------------------------------------------


@pytest.mark.parametrize("options", [{"warmup": -1}, {"repetitions": 0}])
def test_no_repetitions_are_no_sweep(options):
    machine = Machine()
    with pytest.raises(UsageError, match="must be at least 0 and 1"):
        sweep(machine, **options)
    assert not machine.engines


def test_a_schedule_is_not_repeated():
    with pytest.raises(
        UsageError, match="^a schedule counts the same every time: 2 repetitions would tell nothing more; use 1$"
    ):
        sweep_pool_sizes(TWO, (8,), engine_factory("schedule", SETTINGS), repetitions=2, pacing=VIRTUAL)


RUN = "[run]\nwarmup = 1\nrepetitions = 3\n\n[engine]"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("repetitions = 0", "run.repetitions: must be at least 1, got 0"),
        ("warmup = -1", "run.warmup: must be at least 0, got -1"),
        ("max_iterations = 0", "run.max_iterations: must be at least 1, got 0"),
        ("max_s = 0", "run.max_s: must be above 0.0, got 0"),
        ("max_s = inf", "run.max_s: must be a finite number, got inf"),
        ("repetition = 2", "unknown key 'run.repetition', did you mean 'run.repetitions'?"),
    ],
)
def test_bad_runs(here, line, message):  # noqa: F811
    path = scenario(here, ("[engine]", f"[run]\n{line}\n\n[engine]"))
    assert_refused(invoke("sweep", path), here, message)
    with pytest.raises(ScenarioError):
        load_scenario(path)


def test_a_scenario_without_the_table_runs_once():
    run = load_scenario(DAY34).run
    assert (run.warmup, run.repetitions, run.max_iterations, run.max_s) == (0, 1, None, None)
    assert "run" in Scenario.model_json_schema()["properties"]


@pytest.mark.parametrize(
    ("options", "want"), [((), (1, 3)), (("--repetitions", "2"), (1, 2)), (("--warmup", "0"), (0, 3))]
)
def test_sweep_repeats_as_the_scenario_or_the_options_say(here, monkeypatch, options, want):  # noqa: F811
    monkeypatch.setattr("batchbench.commands.sweep.draw", lambda result, folder: [folder / "none.png"])
    path = scenario(here, ("[engine]", RUN), ("[48, 32, 24, 16, 12, 8]", "[48, 12]"))
    done = invoke("sweep", path, "--out", "o", *options)
    assert done.exit_code == 0, done.output
    warmup, repetitions = want
    passes = [f"warm-up {n + 1} of {warmup}" for n in range(warmup)]
    passes += [f"repetition {n + 1} of {repetitions}" for n in range(repetitions)]
    lines = done.stderr.splitlines()
    assert [" ".join(line.split()[1:6]) for line in lines] == [f"{pool} {t}" for t in passes for pool in (48, 12)]
    assert f"n={repetitions}" in done.stdout and "median [low, high]" in " ".join(done.stdout.split())
    found = load_result(here / "o")
    assert [pool["repetitions"] for pool in found.rows("pools")] == [repetitions] * 2
    assert len(found.rows("repetitions")) == 2 * repetitions
    assert found.run["scenario"]["run"]["repetitions"] == repetitions


def test_json_has_the_statistics(here, monkeypatch):  # noqa: F811
    monkeypatch.setattr("batchbench.commands.sweep.draw", lambda result, folder: [folder / "none.png"])
    path = scenario(here, ("[48, 32, 24, 16, 12, 8]", "[48]"))
    document = json.loads(invoke("sweep", path, "--format", "json", "--repetitions", "2").stdout)
    assert {row["n"] for row in document["statistics"]} == {2}
    assert all(math.isfinite(row["high"]) for row in document["statistics"])


@pytest.mark.parametrize("command", [("sweep",), ("sweep", "--dry-run"), ("validate",)])
def test_repetitions_of_a_schedule_are_refused_before_anything_runs(here, command):  # noqa: F811
    path = scenario(here, ("[engine]", RUN))
    done = invoke(*command, path, "--engine", "schedule")
    assert_refused(done, here, "a schedule counts the same every time: 3 repetitions would tell nothing more; use 1")


def test_an_incomplete_run_leaves_no_result(here):  # noqa: F811
    path = scenario(here, ("[engine]", "[run]\nmax_iterations = 30\n\n[engine]"))
    done = invoke("sweep", path, "--out", "o", "--no-progress")
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("error: pool 32: 30 iterations are over and ")
    assert not [path for path in everything_under(here / "o") if not path.startswith("batchbench-parts/")]


def test_counts_that_differ_leave_nothing(here, monkeypatch):  # noqa: F811
    """An engine that evicts once more whenever it is built again."""
    monkeypatch.setattr("batchbench.running.engine_factory", lambda *_, **__: Machine({1: {"script": EVICTED}}))
    text = 'name = "x"\n[engine]\nslots = 1\n[workload]\nlengths = [[1, 3]]\n[sweep]\npools = [8]\n'
    (here / "x.toml").write_text(text)
    monkeypatch.setattr("batchbench.running.build_requests", lambda *_, **__: (request("a", 3),))
    done = invoke("sweep", "x.toml", "--repetitions", "2", "--no-progress", "--out", "o")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "counts differ, so there are no timings: recomputed_tokens is" in done.stderr
    assert everything_under(here / "o") == []
