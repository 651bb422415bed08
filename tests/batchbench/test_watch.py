"""Watching a sweep: what it says of itself while it runs, how it ended, and status files that nobody should believe."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from rich.console import Console

from batchbench import build_requests, engine_factory, load_scenario, sweep_pool_sizes
from batchbench import status as status_module
from batchbench.commands.watch_view import sparkline, watch_display, watch_document, watch_line
from batchbench.errors import ResultError
from batchbench.lock import FolderLock
from batchbench.parts import NAME as PARTS
from batchbench.protocol import Point
from batchbench.results import load_result
from batchbench.status import Sighting, Status, StatusWriter, sight
from batchbench.sweep import Pass, SweepObserver
from tests.batchbench.scripted import decoding, it
from tests.batchbench.test_cli import invoke

SLOW = """
name = "slow"
[engine]
model = "tiny"
slots = 8
block_size = 4
[workload]
requests = 120
prompt_tokens = 20
output_tokens = 300
[sweep]
pools = [700, 200, 100]
"""
KNOWN = {
    "version": 1, "pid": os.getpid(), "started_at": 1.5e9, "elapsed_s": 62.5, "points": 6, "point": 2,
    "pass_name": "repetition 1 of 3", "pool_blocks": 24, "choices": "victim youngest", "requests": 6,
    "requests_finished": 3, "iterations": 44, "evictions": 1, "used_blocks": 18, "running": 2, "waiting": 1,
}  # fmt: skip
LINE = (
    "point 3 of 6 (pool of 24 blocks, victim youngest, repetition 1 of 3): 3/6 requests, 44 iterations, "
    "18/24 blocks in use, 2 running, 1 waiting, 1 eviction, 62.50 s"
)


@pytest.fixture
def lock(tmp_path):
    """Of the output folder, held as a sweep that runs holds it."""
    lock = FolderLock(tmp_path)
    lock.acquire()
    yield lock
    lock.release()


@pytest.fixture
def folder(tmp_path, lock):
    """The output folder of a sweep that seems to run, in this process."""
    (tmp_path / PARTS).mkdir()
    return say(tmp_path)


def say(folder, **changes):
    (folder / PARTS / "status.json").write_text(json.dumps(KNOWN | changes))
    return folder


def age(folder, seconds):
    at = time.time() - seconds
    os.utime(folder / PARTS / "status.json", (at, at))


# ---- what a sweep writes -------------------------------------------------------------------------


class Reads(SweepObserver):
    """Reads the status after every iteration of a sweep."""

    def __init__(self, folder):
        self.folder, self.seen = folder, []

    def look(self):
        self.seen.append(sight(self.folder).status)

    def on_iteration(self, iteration, outcome):
        self.look()

    def on_batch(self, first, batch):
        self.look()


@pytest.mark.parametrize("engine", ["own", "schedule"])
def test_the_status_is_the_iterations_as_the_tables_have_them(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(status_module, "_EVERY_S", 0.0)
    (tmp_path / PARTS).mkdir()
    scenario, reads = load_scenario("scenarios/day34.toml"), Reads(tmp_path)
    requests = build_requests(scenario.workload)
    sweep_pool_sizes(
        requests,
        scenario.sweep.pools,
        engine_factory(engine, scenario.engine),
        observer=StatusWriter(tmp_path, len(requests), reads),
    )
    result = load_result("results/day34")
    table = result.tables["iterations"].to_dict("records")
    if engine == "schedule":  # it says many at once: the last of them stands
        table = [row for row in table if row["running"] == 0 and row["waiting"] == 0]
        reads.seen = [seen for seen in reads.seen if seen.requests_finished == 6]
    assert len(reads.seen) == len(table)
    finished = evictions = 0
    for seen, row in zip(reads.seen, table, strict=True):
        if engine == "own":
            fresh = row["iteration"] == 0
            finished = row["finished"] + (0 if fresh else finished)
            evictions = row["preemptions"] + (0 if fresh else evictions)
        else:
            finished, evictions = 6, result.tables["pools"]["preemptions"][row["point"]]
        assert (seen.pid, seen.points, seen.point, seen.pool_blocks) == (
            os.getpid(),
            6,
            row["point"],
            row["pool_blocks"],
        )
        assert (seen.iterations, seen.requests, seen.requests_finished) == (row["iteration"] + 1, 6, finished)
        assert (seen.running, seen.waiting, seen.evictions) == (row["running"], row["waiting"], evictions)
        assert (seen.used_blocks, seen.pass_name, seen.choices) == (row["pool_blocks"] - row["free_blocks"], "", "")


def test_it_is_written_twice_a_second_and_what_is_not_reported_is_null(tmp_path, monkeypatch):
    (tmp_path / PARTS).mkdir()
    now = [100.0]
    monkeypatch.setattr(status_module.time, "monotonic", lambda: now[0])
    points = [Point(8), Point(4, (("victim", "youngest"),))]
    writer = StatusWriter(tmp_path, 3, SweepObserver())
    writer.on_start(points)
    assert sight(tmp_path).state == "silent"
    writer.on_point(points[0], Pass(0, 2, warmup=True))
    first = sight(tmp_path).status
    assert (first.point, first.pool_blocks, first.pass_name, first.iterations) == (0, 8, "warm-up 1 of 2", 0)
    for _ in range(10):
        now[0] += 0.049
        writer.on_iteration(0, it(1, preempted=None))
    assert sight(tmp_path).status == first
    now[0] += 0.049
    writer.on_iteration(10, it(1, preempted=None))
    then = sight(tmp_path).status
    assert (then.iterations, then.used_blocks, then.running, then.waiting) == (11, None, None, None)
    assert then.elapsed_s == pytest.approx(0.539)
    writer.on_point(points[1], Pass(1, 3))
    now[0] += 1
    writer.on_batch(0, decoding(7))
    last = sight(tmp_path).status
    assert (last.point, last.choices, last.pass_name, last.iterations, last.used_blocks, last.running) == (
        1, "victim youngest", "repetition 2 of 3", 7, 4, 1)  # fmt: skip


def test_a_status_that_cannot_be_written_stops_nothing(tmp_path):
    reads = Reads(tmp_path)
    writer = StatusWriter(tmp_path / "not there", 1, reads)
    writer.on_start([Point(1)])
    writer.on_point(Point(1), Pass(0, 1))
    writer.on_iteration(0, it(1))
    assert reads.seen == [None]


def test_a_finished_sweep_leaves_no_status(tmp_path):
    done = invoke("sweep", "scenarios/day34.toml", "--engine", "schedule", "--out", str(tmp_path), "--no-plots")
    assert done.exit_code == 0 and not (tmp_path / PARTS).exists()


# ---- a sweep that runs ---------------------------------------------------------------------------


@contextmanager
def running(tmp_path):
    """A sweep in a process of its own, that has said something."""
    (tmp_path / "slow.toml").write_text(SLOW)
    command = [sys.executable, "-m", "batchbench", "sweep", "slow.toml", "--no-plots", "--no-progress"]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    sweep = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        while sight(tmp_path / "results/slow").state != "running":
            assert sweep.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        yield sweep
    finally:
        sweep.kill()
        sweep.communicate()


def watching(*arguments, cwd):
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-m", "batchbench", "watch", *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.slow
def test_a_sweep_is_watched_to_its_end(tmp_path):
    with running(tmp_path) as sweep:
        lines = watching("slow.toml", cwd=tmp_path)
        documents = watching("results/slow", "--json", cwd=tmp_path)
        told, complaint = lines.communicate(timeout=300)
        document_lines, _ = documents.communicate(timeout=300)
        assert (lines.returncode, documents.returncode, complaint) == (0, 0, "")
        assert sweep.wait(60) == 0
    *news, last = told.splitlines()
    assert last == "results/slow: the sweep has ended; its result is complete"
    assert len(news) > 1 and all(line.startswith("point ") and " evictions, " in line for line in news)
    *seen, end = map(json.loads, document_lines.splitlines())
    assert end == {"folder": "results/slow", "state": "result", "age_s": 0.0, "status": None}
    pools = load_result(tmp_path / "results/slow").tables["pools"]
    so_far = [(s["status"]["point"], s["status"]["iterations"], s["status"]["evictions"]) for s in seen]
    assert so_far == sorted(so_far) and len(set(so_far)) == len(so_far) > 1
    assert {s["status"]["pid"] for s in seen} == {sweep.pid}
    for point, iterations, evictions in so_far:
        assert iterations <= pools["iterations"][point] and evictions <= pools["preemptions"][point]
    begun = [s["status"] for s in seen if s["status"]["iterations"]]
    assert begun and all(0 <= s["used_blocks"] <= s["pool_blocks"] for s in begun)


def test_a_sweep_that_is_killed_is_said_to_have_died(tmp_path):
    with running(tmp_path) as sweep:
        watch = watching("results/slow", cwd=tmp_path)
        assert watch.stdout.readline().startswith("point 1 of 3 (pool of 700 blocks): ")
        sweep.kill()
        sweep.wait()
        _, complaint = watch.communicate(timeout=60)
    assert (watch.returncode, complaint) == (1, (
        f"error: results/slow: the sweep of process {sweep.pid} has died; the points it finished are under "
        "batchbench-parts/\n"))  # fmt: skip


def test_an_interrupt_is_one_word(folder):
    watch = watching(folder, cwd=folder)
    assert watch.stdout.readline() == LINE + "\n"
    watch.send_signal(signal.SIGINT)
    _, complaint = watch.communicate(timeout=30)
    assert (watch.returncode, complaint) == (130, "interrupted\n")


@pytest.mark.parametrize("earlier", [False, True])
def test_a_sweep_that_leaves_no_result_is_said_to(folder, earlier):
    """Its parts are gone, as after texts that differ; what lies there is an older sweep's."""
    if earlier:
        (folder / "run.json").write_text("{}")
    watch = watching(folder, cwd=folder)
    watch.stdout.readline()
    (folder / PARTS / "status.json").unlink()
    (folder / PARTS).rmdir()
    _, complaint = watch.communicate(timeout=30)
    if earlier:
        assert complaint == f"error: {folder}: the sweep has ended without a result\n"
    assert watch.returncode == 1 and complaint.startswith(f"error: {folder}: the sweep has ended without")


# ---- one look ------------------------------------------------------------------------------------


def test_once_is_a_line_or_a_document(folder):
    done = invoke("watch", str(folder), "--once")
    assert (done.exit_code, done.stdout, done.stderr) == (0, LINE + "\n", "")
    done = invoke("watch", str(folder), "--once", "--json")
    document = json.loads(done.stdout)
    assert document["state"] == "running" and 0 <= document["age_s"] < 60
    assert document["status"] == {name: value for name, value in KNOWN.items() if name != "version"}


def test_a_dead_sweep_is_told_by_its_lock_and_its_silence(folder, lock):
    """Not by the number of its process, which is anybody's again when it is gone; here it is a living one."""
    lock.release()
    assert sight(folder).state == "running"  # it may only just have gone
    age(folder, 3)
    assert sight(folder).state == "died"
    done = invoke("watch", str(folder), "--once")
    assert done.exit_code == 1 and done.stdout == LINE + "\n" and "has died" in done.stderr
    age(folder, 7)
    assert ", nothing new for 7." in invoke("watch", str(folder), "--once").stdout
    lock.acquire()
    assert sight(folder).state == "running"
    lock.release()
    assert sight(folder).state == "died"


def test_without_a_sweep_it_says_what_is_there(tmp_path):
    done = invoke("watch", str(tmp_path), "--wait", "0.5")
    assert (done.exit_code, done.stdout) == (2, "")
    waiting, error = done.stderr.splitlines()
    assert waiting == f"{tmp_path}: waiting for a sweep to begin"
    assert error == f"error: {tmp_path}: no sweep runs here, and there is no result"
    assert invoke("watch", str(tmp_path / "missing"), "--once").exit_code == 2
    (tmp_path / "run.json").write_text("{}")
    done = invoke("watch", str(tmp_path))
    assert (done.exit_code, done.stdout) == (
        0, f"{tmp_path}: no sweep runs here; the result of the last one is complete\n")  # fmt: skip
    assert json.loads(invoke("watch", str(tmp_path), "--json").stdout)["state"] == "result"


def test_parts_without_a_status_are_said_to_say_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("batchbench.commands.watch._SILENT_S", 0.5)
    (tmp_path / PARTS).mkdir()
    done = invoke("watch", str(tmp_path))
    assert done.exit_code == 2 and "a sweep left points here that say nothing of how it stands" in done.stderr


def test_a_scenario_that_is_none_is_refused(tmp_path):
    (tmp_path / "x.toml").write_text("name = [")
    done = invoke("watch", str(tmp_path / "x.toml"))
    assert done.exit_code == 2 and len(done.stderr.splitlines()) == 1


# ---- a status file that nobody should believe ----------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Invalid JSON"),
        ("\0\1\2", "Invalid JSON"),
        ("[" * 60_000, "Invalid JSON"),
        ("[1]", "should be an object"),
        (" " * 70_000, "not a status file"),
        (json.dumps(KNOWN | {"version": 2}), "version"),
        (json.dumps(KNOWN | {"pid": "1"}), "pid"),
        (json.dumps(KNOWN | {"pid": -1}), "pid"),
        (json.dumps(KNOWN | {"pid": 2**40}), "pid"),
        (json.dumps(KNOWN | {"pid": True}), "pid"),
        (json.dumps(KNOWN | {"points": 1e400}), "points"),
        (json.dumps(KNOWN | {"elapsed_s": float("nan")}), "elapsed_s"),
        (json.dumps(KNOWN | {"iterations": 10**30}), "iterations"),
        (json.dumps(KNOWN | {"requests": 1.5}), "requests"),
        (json.dumps(KNOWN | {"choices": "x" * 2000}), "choices"),
        (json.dumps(KNOWN | {"waiting": [1]}), "waiting"),
        (json.dumps({name: value for name, value in KNOWN.items() if name != "points"}), "points"),
    ],
)
def test_a_status_that_is_none_is_refused_in_one_line(text, message, folder):
    (folder / PARTS / "status.json").write_text(text)
    done = invoke("watch", str(folder))
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {folder}/{PARTS}/status.json: not a status file that batchbench wrote")
    assert message in line and line.isprintable() and len(line) < 400


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_what_is_no_file_is_not_read(kind, folder):
    path = folder / PARTS / "status.json"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        (folder / "elsewhere").write_text(json.dumps(KNOWN))
        path.symlink_to(folder / "elsewhere")
    else:
        path.mkdir()
    with pytest.raises(ResultError):
        sight(folder)


def test_odd_names_cannot_drive_the_terminal(folder):
    say(folder, choices="[red]<script>\x1b[2J\n\x07|", pass_name="\x1b]0;x\x07")
    line = invoke("watch", str(folder), "--once").stdout
    assert "[red]<script> [2J  |,  ]0;x ): 3/6 requests" in line and line.rstrip("\n").isprintable()
    shown = rendered(sight(folder), folder / "\x1b[31m", plain=False)
    assert "[red]<script>" in shown and "\x1b" not in shown and "\x07" not in shown


# ---- the display ---------------------------------------------------------------------------------


def rendered(seen, folder="o", fills=(0.0, 0.5, 1.0), *, plain):
    console = Console(width=200, no_color=True, force_terminal=False)
    with console.capture() as capture:
        console.print(watch_display(folder, seen, fills, plain=plain))
    return capture.get()


def test_the_display_has_all_of_it():
    seen = Sighting("running", Status.model_validate(KNOWN), 6.0)
    lines = [
        " ".join(line.translate({ord("━"): None, ord("╸"): None}).split())
        for line in rendered(seen, plain=False).splitlines()
    ]
    assert lines == [
        "o: point 3 of 6 (pool of 24 blocks, victim youngest, repetition 1 of 3)",
        "points 2 of 6 done", "requests 3 of 6 done", "pool 18 of 24 blocks in use", "▁▅█ lately",
        "running 2", "waiting 1", "evictions 1", "iterations 44", "elapsed 62.50 s nothing new for 6.00 s",
    ]  # fmt: skip
    bars = [line.count("━") for line in rendered(seen, plain=False).splitlines()]
    assert bars[1:4] == [10, 16, 24]  # of 32: the share that is done, to the half sign


def test_what_is_not_reported_is_left_out():
    status = Status.model_validate(KNOWN | {"used_blocks": None, "running": None, "waiting": None})
    seen = Sighting("running", status)
    assert "pool of 24" in watch_line(seen) and "in use" not in watch_line(seen) and "waiting" not in watch_line(seen)
    assert "in use" not in rendered(seen, plain=True)
    assert watch_document("o", seen)["status"]["waiting"] is None


def test_a_history_is_drawn_by_height():
    assert sparkline([0, 0.07, 0.5, 0.93, 1, 2, -1], "01234567") == "0047770"
    assert sparkline([], "01") == ""
