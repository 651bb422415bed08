"""The timeline: every number of it is a number of the tables, and the file keeps the format's rules."""

from __future__ import annotations

import gzip
import io
import json
import random
import shutil
import subprocess
import sys
from collections import defaultdict
from contextlib import suppress
from copy import deepcopy
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchbench import Admission, Eviction, Prefill
from batchbench.clocks import NS
from batchbench.driver import Pacing
from batchbench.errors import BatchbenchError, ResultError, UsageError
from batchbench.results import load_result
from batchbench.timeline import timeline
from batchbench.timeline_file import save_timeline, write_timeline
from batchbench.trace_events import microseconds
from tests.batchbench.scripted import it, request, result_of
from tests.batchbench.test_cli import invoke
from tests.batchbench.test_scale import ITERATIONS as LARGE
from tests.batchbench.test_scale import large  # noqa: F401  # the fixture
from tests.batchbench.trace_format import ns, read, validate

ITERATION = 1_000_000  # nanoseconds
POOL, SLOTS, REQUESTS = 1, 2, 3
COMMITTED = sorted(path.name for path in Path("results").iterdir())
RUN = {"scenario": {"name": "scripted"}, "engine": {"slots": 2}}


def drawn(result, point, unit=None, window=(0, None)):
    """The document as a file has it, found valid."""
    file = io.BytesIO()
    count = write_timeline(timeline(result, point, unit, window), file)
    document = read(file.getvalue())
    validate(document)
    assert len(document["traceEvents"]) == count
    return document


def tracks(document):
    """(process, thread) -> its name."""
    named = [e for e in document["traceEvents"] if e["name"] == "thread_name"]
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in named}


def slices(document, group, *names):
    """Track -> (name, start, end, args) of its slices, in nanoseconds."""
    found, called = defaultdict(list), tracks(document)
    for e in document["traceEvents"]:
        if e["ph"] == "X" and e["pid"] == group and (not names or e["name"] in names):
            start = ns(e["ts"])
            found[called[e["pid"], e["tid"]]].append((e["name"], start, start + ns(e["dur"]), e["args"]))
    return found


def total(document, name):
    """Request -> how long its slices of that name last together, in nanoseconds."""
    return {track: sum(end - start for _, start, end, _ in found)
            for track, found in slices(document, REQUESTS, name).items()}  # fmt: skip


def arrows(document):
    """(request it leaves, request it reaches, iteration of the eviction, of the resume), in iterations."""
    in_slot, called, found = slices(document, SLOTS), tracks(document), defaultdict(list)
    for e in document["traceEvents"]:
        if e["ph"] in "sf":
            at = ns(e["ts"])
            (held,) = [args for _, start, end, args in in_slot[called[e["pid"], e["tid"]]] if start < at < end]
            found[e["id"]] += [held["request"], round(at / ITERATION)]
    return [(out, back, evicted, resumed) for out, evicted, back, resumed in found.values()]


def counted(document, name, times):
    """The counters of that name as they stand at these times."""
    events = [e for e in document["traceEvents"] if e["ph"] == "C" and e["name"] == name]
    at = np.array([ns(e["ts"]) for e in events])
    places = np.searchsorted(at, times, side="right") - 1
    return [events[place]["args"] for place in places]


def test_day34_at_twelve_blocks_is_as_the_figure_shows_it():
    document = drawn(load_result("results/day34"), 4, "iterations")
    ms = ITERATION

    def told(found):
        return [(name, start // ms, end // ms) for name, start, end, _ in found]

    # r5 is evicted in iterations 4, 40 and 52, and resumed in 36, 44 and 56.
    assert told(slices(document, REQUESTS)["r5"]) == [
        ("r5", 0, 64), ("decode", 0, 4), ("prompt row", 0, 1), ("returning", 4, 36),
        ("decode", 36, 40), ("resume row", 36, 37), ("returning", 40, 44),
        ("decode", 44, 52), ("resume row", 44, 45), ("returning", 52, 56), ("decode", 56, 64), ("resume row", 56, 57),
    ]  # fmt: skip
    slots = slices(document, SLOTS)
    assert list(slots) == [f"slot {n}" for n in range(6)]
    assert told(slots["slot 2"]) == [
        ("r2 prefill", 0, 1), ("r2", 1, 12), ("r5 resume", 36, 37), ("r5", 37, 40),
    ]  # fmt: skip
    assert slots["slot 2"][0][3] == {"request": "r2", "iteration": 0, "iterations": 1, "stay_ends": "evicted"}
    (whole,) = slices(document, REQUESTS, "r5")["r5"]
    assert whole[3] == {
        "prompt_tokens": 5, "output_tokens": 24, "arrival_iteration": 0, "finished_iteration": 63,
        "latency_iterations": 64, "ttft_iterations": 1, "preemptions": 3, "recomputed_tokens": 43, "rebuilt_tokens": 40,
    }  # fmt: skip
    evicted = next(e for e in document["traceEvents"] if e["ph"] == "i")
    assert (evicted["ts"], evicted["args"]) == (4000, {
        "iteration": 4, "slot": 5, "cached_tokens": 8, "generated_tokens": 4, "freed_blocks": 2, "thrash": False,
        "reclaim": "recompute", "swap_full": False, "resumed_iteration": 36, "rebuilt_tokens": 8,
        "recovered_tokens": 0, "swapped_tokens": 0,
    })  # fmt: skip
    called = tracks(document)
    arrows = defaultdict(list)
    for e in document["traceEvents"]:
        if e["ph"] in "sf":
            arrows[e["id"]].append((called[e["pid"], e["tid"]], ns(e["ts"])))
    assert sorted(arrows.values()) == sorted([
        [("slot 5", 4 * ms - 1), ("slot 2", 36 * ms + 1)], [("slot 4", 4 * ms - 1), ("slot 1", 36 * ms + 1)],
        [("slot 3", 8 * ms - 1), ("slot 0", 28 * ms + 1)], [("slot 2", 12 * ms - 1), ("slot 1", 24 * ms + 1)],
        [("slot 1", 20 * ms - 1), ("slot 0", 24 * ms + 1)], [("slot 2", 40 * ms - 1), ("slot 0", 44 * ms + 1)],
        [("slot 0", 52 * ms - 1), ("slot 1", 56 * ms + 1)],
    ])  # fmt: skip
    assert document["otherData"] == {
        "made_by": "batchbench trace", "scenario": "day34", "point": 4, "pool_blocks": 12, "choices": "",
        "clock": "iterations", "time": "iterations", "unit": "1000 us per iteration", "from_iteration": 0,
        "to_before_iteration": 64, "not_reported": [],
    }  # fmt: skip


@pytest.fixture(scope="module")
def schedule(tmp_path_factory):
    """A schedule on the clock of iterations: it has no seconds."""
    folder = tmp_path_factory.mktemp("schedule")
    done = invoke("sweep", "scenarios/chunks.toml", "--engine", "schedule", "--out", str(folder), "--no-plots")
    assert done.exit_code == 0, done.output
    return load_result(folder)


@pytest.fixture(scope="module", params=[*COMMITTED, "schedule"])
def result(request):
    """Own schedule and others', static batches, chunks, swap, prefix cache, modelled time; and a schedule alone."""
    if request.param == "schedule":
        return request.getfixturevalue("schedule")
    return load_result(f"results/{request.param}")


def points(result):
    """Each point's place."""
    return range(len(result.tables["pools"]))


def nonzero(table, column):
    return {r: v for r, v in zip(table["request_id"], table[column], strict=True) if v}


def test_every_sum_of_the_timeline_is_the_tables(result):
    for point in points(result):
        document = drawn(result, point, "iterations")
        requests, evictions = result.point("requests", point), result.point("evictions", point)
        tokens = result.point("token_runs", point).groupby("request_id")["tokens"].sum()
        assert total(document, "decode") == {r: n * ITERATION for r, n in tokens.items()}
        for part in ("queued", "returning", "rebuilding"):
            found = {r: n // ITERATION for r, n in total(document, part).items()}
            assert found == nonzero(requests, f"{part}_iterations"), part
        latency = dict(zip(requests["request_id"], requests["latency_iterations"] * ITERATION, strict=True))
        whole = {r: sum(end - start for name, start, end, _ in found if name == r)
                 for r, found in slices(document, REQUESTS).items()}  # fmt: skip
        assert whole == latency
        inside = defaultdict(int)
        for name in ("queued", "returning", "rebuilding", "prefill", "decode", "paused"):
            for r, n in total(document, name).items():
                inside[r] += n
        assert inside == latency  # what a request did, one thing after the other, is all of it
        marks = [e for e in document["traceEvents"] if e["ph"] == "i"]
        assert len(marks) == len(evictions) == result.tables["pools"]["preemptions"][point]
        assert [e["args"]["iteration"] for e in marks] == list(evictions["iteration"])
        back = evictions[evictions["resumed_iteration"].notna()]
        columns = (back[c] for c in ("request_id", "iteration", "resumed_iteration"))
        assert sorted(arrows(document)) == sorted(
            (r, r, out, int(again)) for r, out, again in zip(*columns, strict=True)
        )
        rows = [args for found in slices(document, REQUESTS, "prompt row", "resume row").values()
                for *_, args in found]  # fmt: skip
        prefills = result.point("prefills", point)
        for column in ("positions", "rebuilt_tokens"):
            assert sum(args[column] for args in rows) == prefills[column].sum()
        assert len(rows) == len(prefills)


def test_every_counter_is_the_iterations_tables(result):
    for point in points(result):
        document, frame = drawn(result, point, "iterations"), result.point("iterations", point)
        begin = frame["iteration"].to_numpy() * ITERATION
        assert [c["positions"] for c in counted(document, "forward", begin)] == list(frame["forward_tokens"])
        blocks = result.tables["pools"]["pool_blocks"][point]
        for now, free in zip(counted(document, "pool", begin + ITERATION), frame["free_blocks"], strict=True):
            assert now == {"free_blocks": free, "used_blocks": blocks - free}
        queue = counted(document, "queue", begin + ITERATION)
        assert queue == frame[["running", "waiting"]].to_dict("records")
        gaps = np.flatnonzero(np.diff(frame["iteration"]) > 1)  # nobody had work
        assert all(c == {"positions": 0} for c in counted(document, "forward", begin[gaps] + ITERATION))
        assert counted(document, "forward", begin[-1:] + ITERATION) == [{"positions": 0}]


def test_every_slot_holds_whom_the_iterations_say(result):
    """As many slices of stays lie over an iteration as rows were forwarded, held members of static batches too."""
    for point in points(result):
        document, frame = drawn(result, point, "iterations"), result.point("iterations", point)
        if result.tables["pools"]["token_budget"].notna()[point]:
            continue  # who gets nothing of a budget is in a slot without a row
        over = np.zeros(int(frame["iteration"].max()) + 2, dtype=int)
        for found in slices(document, SLOTS).values():
            for _, start, end, _ in found:
                over[start // ITERATION] += 1
                over[end // ITERATION] -= 1
        assert list(np.cumsum(over)[frame["iteration"]]) == list(frame["issued_tokens"])


def test_seconds_are_the_clocks(result):
    timed = [point for point in points(result) if result.point("iterations", point)["step_s"].notna().all()]
    for point in timed:
        document, requests = drawn(result, point), result.point("requests", point)
        assert document["otherData"]["time"] == "s"
        whole = {r: (start, end - start) for r, found in slices(document, REQUESTS).items()
                 for name, start, end, _ in found if name == r}  # fmt: skip
        columns = (requests[c] for c in ("request_id", "arrival_s", "latency_s"))
        assert whole == {r: (round(at * NS), round(s * NS)) for r, at, s in zip(*columns, strict=True)}
        for part in ("queued", "returning"):
            spent = {r: round(s * NS) for r, s in nonzero(requests, f"{part}_s").items()}
            assert {r: n for r, n in total(document, part).items() if n} == spent, part
        last = max(ns(e["ts"]) for e in document["traceEvents"])
        assert last == round((requests["arrival_s"] + requests["latency_s"]).max() * NS)
    assert timed or result.run["engine"]["engine"] == "schedule"


def test_a_schedule_without_seconds_is_in_iterations(schedule):
    assert drawn(schedule, 0)["otherData"]["time"] == "iterations"
    with pytest.raises(UsageError, match="point 0 does not say when its iterations began"):
        timeline(schedule, 0, "s")


def test_a_static_batch_holds_who_has_finished():
    result = load_result("results/reservation")
    (point, *_) = np.flatnonzero(result.tables["pools"]["batching"] == "static")
    document = drawn(result, int(point), "iterations")
    held = [name for found in slices(document, SLOTS).values() for name, *_ in found if name.endswith(", held")]
    assert held and set(held) <= {f"{r} finished, held" for r in result.tables["requests"]["request_id"]}


def test_a_swap_shows_who_was_swapped_in():
    result = load_result("results/swap")
    (point, *_) = np.flatnonzero(result.tables["pools"]["swapped_tokens"] > 0)
    document = drawn(result, int(point), "iterations")
    back = result.point("admissions", int(point))
    names = [name for found in slices(document, SLOTS).values() for name, *_ in found if name.endswith(" swap in")]
    assert sorted(names) == sorted(f"{r} swap in" for r in back["request_id"][back["swapped_tokens"] > 0])


def test_a_window_keeps_whole_slices_and_what_happens_in_it():
    result = load_result("results/day34")
    whole, part = (drawn(result, 4, "iterations", window) for window in ((0, None), (10, 30)))
    kept = [e for e in part["traceEvents"] if e["ph"] != "M"]
    assert all(e in whole["traceEvents"] for e in kept if e["ph"] == "X")
    spans = [(ns(e["ts"]), ns(e["ts"]) + ns(e["dur"])) for e in kept if e["ph"] == "X"]
    assert all(start < 30 * ITERATION and end > 10 * ITERATION for start, end in spans)
    assert [e["args"]["iteration"] for e in kept if e["ph"] == "i"] == [12, 20]
    assert sorted({e["id"] for e in kept if e["ph"] in "sf"}) == [0, 1]  # 12 -> 24 and 20 -> 24; 8 -> 28 left before
    frame = result.point("iterations", 4)[10:30]
    at = (frame["iteration"].to_numpy() + 1) * ITERATION
    assert counted(part, "queue", at) == frame[["running", "waiting"]].to_dict("records")
    assert part["otherData"]["from_iteration"] == 10 and part["otherData"]["to_before_iteration"] == 30
    assert len(drawn(result, 4, "iterations", (63, 999))["traceEvents"]) > 0
    for window in ((64, None), (5, 5), (7, 3), (-1, None)):
        with pytest.raises(UsageError, match="no iteration from"):
            timeline(result, 4, None, window)


def test_what_an_engine_does_not_report_is_left_out_and_named(tmp_path):
    script = [it(1, preempted=None), it(1, finished=("a",), preempted=None)]
    result = result_of(tmp_path, RUN, [request("a", 2)], script)
    document = drawn(result, 0)
    assert document["otherData"]["not_reported"] == [
        "free_blocks", "running", "waiting", "forward_tokens", "evictions", "slots", "whose tokens come",
    ]  # fmt: skip
    assert slices(document, SLOTS) == {} and not [e for e in document["traceEvents"] if e["ph"] in "Csfi"]
    assert slices(document, REQUESTS)["a"] == [("a", 0, 2 * NS, {
        "prompt_tokens": 1, "output_tokens": 2, "arrival_iteration": 0, "finished_iteration": 1,
        "latency_iterations": 2})]  # fmt: skip


def eviction_in_the_iteration_of_its_resume(*, told=True):
    """`a` gives way in iteration 1 and is back in it, in another slot."""
    began, none = ({"began": ("a",), "paused": ()}, {"began": (), "paused": ()}) if told else ({}, {})
    return [
        it(1, admissions=(Admission("a", 0, False, 0, 0, 0),), prefills=(Prefill("a", 1, 0, False),), evictions=(),
           forward_tokens=1, **began),
        it(1, admissions=(Admission("a", 1, True, 0, 0, 0),), prefills=(Prefill("a", 2, 1, True),), preempted=("a",),
           evictions=(Eviction("a", 0, 1, 1, 1, False, "recompute", False),), forward_tokens=2, **began),
        it(1, admissions=(), prefills=(), evictions=(), forward_tokens=1, finished=("a",), **none),
    ]  # fmt: skip


def test_back_in_the_iteration_of_the_eviction_returns_at_once(tmp_path):
    result = result_of(tmp_path, RUN, [request("a", 3)], eviction_in_the_iteration_of_its_resume())
    document = drawn(result, 0, "iterations")
    told = [(name, start // ITERATION, end // ITERATION) for name, start, end, _ in slices(document, REQUESTS)["a"]]
    assert told == [("a", 0, 3), ("decode", 0, 1), ("prompt row", 0, 1), ("decode", 1, 3), ("resume row", 1, 2)]
    arrows = [(e["ph"], ns(e["ts"])) for e in document["traceEvents"] if e["ph"] in "sf"]
    assert arrows == [("s", ITERATION - 1), ("f", ITERATION + 1)]


def test_iterations_that_take_no_time_still_nest(tmp_path):
    result = result_of(tmp_path, RUN, [request("a", 3)], eviction_in_the_iteration_of_its_resume(),
                       step_s=[0.0, 0.0, 0.0])  # fmt: skip
    assert drawn(result, 0)["otherData"]["time"] == "s"


def test_real_time_is_drawn_as_far_as_it_is_known(tmp_path):
    """1 s an iteration, and 0 in between, on a clock that only the script moves."""
    script = eviction_in_the_iteration_of_its_resume()
    result = result_of(tmp_path, RUN, [request("a", 3)], script, pacing=Pacing("wall"))
    document = drawn(result, 0)
    assert document["otherData"]["unit"].startswith("microseconds, real; when an iteration began is known where")
    assert [(name, start // NS, end // NS) for name, start, end, _ in slices(document, REQUESTS)["a"]] == [
        ("a", 0, 3), ("decode", 0, 1), ("prompt row", 0, 1), ("decode", 1, 3), ("resume row", 1, 2),
    ]  # fmt: skip


def test_stays_without_told_tokens_are_just_running(tmp_path):
    result = result_of(tmp_path, RUN, [request("a", 3)], eviction_in_the_iteration_of_its_resume(told=False))
    document = drawn(result, 0, "iterations")
    assert document["otherData"]["not_reported"] == ["free_blocks", "running", "waiting", "whose tokens come"]
    names = [name for name, *_ in slices(document, REQUESTS)["a"]]
    assert names == ["a", "running", "prompt row", "running", "resume row"]


ODD = ["<script>alert(1)</script>", 'a"|\\', "\x00\x1b[31m\x7f\n", "é\u2028 日本", "名" * 500]


def test_odd_names_stay_themselves(tmp_path):
    requests = [request(name) for name in ODD]
    script = [it(1, finished=(name,)) for name in ODD]
    result = result_of(tmp_path, RUN, requests, script)
    document = drawn(result, 0)  # no control character, by the rules
    assert [name for (group, _), name in tracks(document).items() if group == REQUESTS] == ODD


@given(st.integers(0, 2**51))  # 26 days
def test_nanoseconds_survive_rounding_and_cutting_off(count):
    value = microseconds(count)
    again = json.loads(json.dumps(value))
    assert int(again * 1000) == round(again * 1000) == count


def test_two_in_one_slot_are_refused(tmp_path):
    script = [
        it(2, admissions=(Admission("a", 0, False, 0, 0, 0), Admission("b", 0, False, 0, 0, 0)), prefills=(),
           preempted=(), evictions=(), finished=("a", "b")),
    ]  # fmt: skip
    result = result_of(tmp_path, RUN, [request("a"), request("b")], script)
    with pytest.raises(ResultError, match="a slot that does two things at once"):
        timeline(result, 0)


@pytest.mark.parametrize("seed", [*range(40), 575])
def test_a_damaged_result_is_refused_or_drawn_by_the_rules(seed, tmp_path):
    """One number of the tables that the timeline reads becomes another one."""
    draw = random.Random(seed)
    name = draw.choice(["admissions", "evictions", "iterations", "prefills", "requests", "token_runs"])
    table = pq.read_table(f"results/day34/{name}.parquet")
    column = draw.choice([f.name for f in table.schema if f.name != "point" and str(f.type) in ("int64", "double")])
    values = table[column].to_pylist()
    as_column = float if str(table.schema.field(column).type) == "double" else int
    place = draw.choice([n for n, at in enumerate(table["point"].to_pylist()) if at == 4])
    values[place] = as_column(draw.choice([-1, 0, 1, 7, 63, 64, 10**6, 2**62]))
    if table.schema.field(column).nullable and draw.random() < 0.2:
        values[place] = None
    index = table.schema.get_field_index(column)
    shutil.copytree("results/day34", tmp_path / "o")
    changed = table.set_column(index, table.schema.field(index), pa.array(values, table.schema.field(index).type))
    pq.write_table(changed, tmp_path / "o" / f"{name}.parquet")
    for unit in (None, "iterations"):
        with suppress(ResultError):
            drawn(load_result(tmp_path / "o"), 4, unit)


# ---- the file ------------------------------------------------------------------------------------


def test_a_compressed_file_is_the_same_document_and_the_same_bytes_again(tmp_path):
    result = load_result("results/day34")
    for name in ("a.json", "b.json.gz", "c.json.gz"):
        save_timeline(timeline(result, 4), tmp_path / name)
    plain, packed, again = ((tmp_path / name).read_bytes() for name in ("a.json", "b.json.gz", "c.json.gz"))
    assert gzip.decompress(packed) == plain and packed == again


def test_a_file_is_whole_or_not_at_all(tmp_path):
    drawing = timeline(load_result("results/day34"), 4)

    def broken():
        yield from (next(drawing.events) for _ in range(3))
        raise BatchbenchError("the disk is gone")

    (tmp_path / "t.json").write_text("before")
    with pytest.raises(BatchbenchError, match="the disk is gone"):
        save_timeline(type(drawing)(drawing.metadata, broken()), tmp_path / "t.json")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("t.json", "before")]


def test_a_full_disk_is_one_line():
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full, which Linux has")
    command = [sys.executable, "-m", "batchbench", "trace", "results/day34", "-o", "-"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "error: output: No space left on device\n")


MEASURE = """
import resource, sys
from pathlib import Path
from batchbench.results import load_result
from batchbench.timeline import timeline
from batchbench.timeline_file import save_timeline
result = load_result(sys.argv[1])
save_timeline(timeline(result, 1, window=(0, 1000)), Path(sys.argv[2]) / "small.json")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
count = save_timeline(timeline(result, 1), Path(sys.argv[2]) / "large.json")
print(count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_a_long_run_is_written_without_holding_its_text(large, tmp_path):  # noqa: F811
    done = subprocess.run([sys.executable, "-c", MEASURE, large, tmp_path], check=True, capture_output=True, text=True)
    count, grown_kb = map(int, done.stdout.split())
    assert count > 2 * LARGE
    assert grown_kb * 1024 < (tmp_path / "large.json").stat().st_size
    small = read((tmp_path / "small.json").read_bytes())
    validate(small)
    assert max(e["args"]["iteration"] for e in small["traceEvents"] if e.get("cat") == "forward") <= 999


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_writes_the_point_that_is_named_and_says_what_it_wrote(tmp_path):
    path = tmp_path / "timeline.json"
    done = invoke("trace", "results/day34", "--pool", "12", "--time", "iterations", "-o", str(path))
    assert (done.exit_code, done.stderr) == (0, "")
    document = read(path.read_bytes())
    assert document == drawn(load_result("results/day34"), 4, "iterations")
    size = f"{path.stat().st_size / 1024:.1f} KiB"
    assert done.stdout.splitlines() == [
        f"timeline: {path} ({len(document['traceEvents'])} events, {size})",
        "pool of 12 blocks; iterations: 1000 us per iteration",
    ]


@pytest.mark.parametrize(
    ("result", "options", "point"),
    [
        ("day34", (), 4),  # recomputes most
        ("day34", ("--point", "5"), 5),
        ("swap", ("--pool", "48", "--choices", "reclaim swap, swap_blocks 8"), 7),
    ],
)
def test_points_are_named_by_pool_choices_or_place(result, options, point, tmp_path):
    done = invoke("trace", f"results/{result}", *options, "-o", str(tmp_path / "t.json"), "--to", "9")
    assert done.exit_code == 0, done.output
    assert read((tmp_path / "t.json").read_bytes())["otherData"]["point"] == point


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--pool", "48"), "3 points fit; use --point, or --pool and --choices: 1: pool of 48 blocks, "
         "reclaim recompute; 4: pool of 48 blocks, reclaim swap, swap_blocks 64; 7: pool of 48 blocks, "),
        (("--pool", "7"), "no point fits: 0: pool of "),
        (("--choices", "<script>\x1b[31m"), "no point fits: 0: pool of "),
        (("--choices", "reclaim recompute"), "3 points fit"),
        (("--point", "9"), "the result has no point 9; it has 0 to 8"),
        (("--point", "0", "--pool", "48"), "--point names a point by itself"),
        (("--from", "100000"), "no iteration from 100000 to before"),
        (("--from", "5", "--to", "5"), "no iteration from 5 to before 5"),
    ],
)  # fmt: skip
def test_a_point_or_window_that_is_not_there_is_one_line(options, message, tmp_path):
    done = invoke("trace", "results/swap", *options, "-o", str(tmp_path / "t.json"))
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and message in line and line.isprintable()
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_no_timelines_are_not_written(tmp_path):
    for name, message in (
        ("", "is a folder; name a file in it"),
        ("missing/t.json", "No such file or directory"),
        ("pools.parquet", "must be a .json or .json.gz"),
    ):
        done = invoke("trace", "results/day34", "-o", str(tmp_path / name))
        assert done.exit_code == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1
    before = Path("results/day34/run.json").read_bytes()
    done = invoke("trace", "results/day34", "-o", "results/day34/run.json")
    assert done.exit_code == 2 and "must be a .json or .json.gz of its own" in done.stderr
    assert Path("results/day34/run.json").read_bytes() == before
    assert list(tmp_path.iterdir()) == []


def test_standard_output_has_the_document_alone():
    done = subprocess.run([sys.executable, "-m", "batchbench", "trace", "results/day34", "--point", "1", "-o", "-"],
                          check=True, capture_output=True)  # fmt: skip
    assert done.stderr == b""
    assert read(done.stdout) == drawn(load_result("results/day34"), 1)


# ---- the rules themselves ------------------------------------------------------------------------


def _broken(change):
    document = drawn(load_result("results/day34"), 4, "iterations")
    events = document["traceEvents"]
    first = {phase: next(e for e in events if e["ph"] == phase) for phase in "MXCisf"}
    change(document, events, first)
    return document


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d, e, f: d.update(more=1), "more"),
        (lambda d, e, f: d.update(displayTimeUnit="s"), "display"),
        (lambda d, e, f: f["X"].pop("dur"), "fields"),
        (lambda d, e, f: f["X"].update(dur=-1), "dur"),
        (lambda d, e, f: f["X"].update(dur=True), "dur"),
        (lambda d, e, f: f["X"].update(dur="1"), "dur"),
        (lambda d, e, f: f["X"].update(ph="Q"), "no such phase"),
        (lambda d, e, f: f["X"].update(tid="10"), "track"),
        (lambda d, e, f: f["X"].update(pid=0), "track"),
        (lambda d, e, f: f["X"].update(dur=1000.5005), "dur"),  # half a nanosecond
        (lambda d, e, f: f["X"].update(dur=1001), "overlaps"),
        (lambda d, e, f: f["X"].update(tid=999), "no name"),
        (lambda d, e, f: f["X"].update(pid=9), "a process without a name"),
        (lambda d, e, f: f["M"].update(args={"name": 1}), "'name': 1"),
        (lambda d, e, f: e.insert(0, deepcopy(f["M"])), "named twice"),
        (lambda d, e, f: e.reverse(), "not in order"),
        (lambda d, e, f: f["C"]["args"].update(positions="1"), "positions"),
        (lambda d, e, f: f["C"].update(args={"other": 1}), "now these"),
        (lambda d, e, f: f["i"].update(s="x"), "scope"),
        (lambda d, e, f: f["f"].update(bp="s"), "binding"),
        (lambda d, e, f: f["f"].update(id=77), "not one start and one end"),
        (lambda d, e, f: e.remove(f["f"]), "not one start and one end"),
        (lambda d, e, f: f["f"].update(tid=15), "in no slice"),
    ],
)
def test_the_rules_find_what_breaks_them(change, message):
    with pytest.raises(AssertionError, match=message):
        validate(_broken(change))


def test_text_that_a_scanner_refuses_is_found():
    for text in ('[{"ph":"X"}]', '{"a":1,"a":2}', '{"a":NaN}', '{"a":"\x7f"}', '{"a":"é"}'):
        with pytest.raises((AssertionError, json.JSONDecodeError)):
            read(text.encode())


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_older_results_are_drawn_in_iterations(version, tmp_path):
    """They do not say when anybody arrived."""
    done = invoke("trace", f"tests/results/{version}", "--pool", "12", "-o", str(tmp_path / "t.json"))
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "t.json").read_text())["otherData"]["time"].startswith("iterations")
    assert "in seconds" in invoke("trace", f"tests/results/{version}", "--time", "s", "-o", "x.json").stderr
