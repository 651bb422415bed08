"""Sweeps to break: a server that forks them, and what must be true of what they leave."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchbench.errors import ResultError
from batchbench.results import load_result
from batchbench.schema import TABLES

DAY34 = Path("scenarios/day34.toml").read_text()
COUNTED = DAY34.replace("[48, 32, 24, 16, 12, 8]", "[48, 12, 8]").replace(
    'name = "day34"', 'name = "day34"\nclock = "virtual"\n[virtual]\niteration_s = 0.001'
)
SHORT = COUNTED.replace("[48, 12, 8]", "[48, 12]")
MEASURED = DAY34.replace("[48, 32, 24, 16, 12, 8]", "[48, 8]").replace(
    "[engine]", "[run]\nwarmup = 1\nrepetitions = 3\n\n[engine]"
)
DIFFERS = ("wall_s",)  # in every clock; under `iterations` every time does


class Server:
    """Asks tests/batchbench/kill_server.py."""

    def __init__(self):
        command = [sys.executable, "-m", "tests.batchbench.kill_server"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, arguments, **when):
        self.process.stdin.write(json.dumps({"arguments": list(map(str, arguments)), **when}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def server():
    started = Server()
    yield started
    started.close()


class Case:
    """A scenario, its unbroken result, and folders to break it in."""

    def __init__(self, server, folder, text, *options):
        self.server, self.root, self.count = server, folder, 0
        (folder / "x.toml").write_text(text)
        self.options = ("sweep", folder / "x.toml", "--no-plots", *options)
        whole = self.run(folder / "whole")
        assert (whole["signal"], whole["code"]) == (0, 0), whole["stderr"]
        self.seconds, self.events = whole["seconds"], whole["events"]
        self.timed = "virtual" in text
        self.rows = self.read(folder / "whole")

    def run(self, out, *options, **when):
        return self.server([*self.options, "--out", out, *options], **when)

    def read(self, out):
        """Every table, but for what differs between two unbroken runs."""
        result = load_result(out)
        rows = {name: result.rows(name) for name in TABLES if self.timed or name not in ("service", "statistics")}
        if not self.timed:
            kept = [row for row in result.rows("service") if row["unit"] != "s"]
            rows["service"] = kept
            rows["statistics"] = [(r["point"], r["metric"], r["n"]) for r in result.rows("statistics")]
        for row in (row for table in rows.values() for row in table if isinstance(row, dict)):
            for column in [c for c in row if c in DIFFERS or (not self.timed and c.endswith("_s"))]:
                row[column] = row[column] is not None
        if self.timed:
            rows["statistics"] = [row["n"] for row in rows["statistics"]]
        return rows

    def fresh(self, earlier):
        """An output folder; `earlier`: with the result of another sweep in it."""
        self.count += 1
        out = self.root / f"out{self.count}"
        if earlier:
            shutil.copytree("results/watermark", out)
        return out

    def check_left(self, out, earlier):
        """Only complete tables: of points, and of a result that is the earlier one or this."""
        for part in (out / "batchbench-parts").glob("point-*"):
            assert {path.stem for path in part.glob("*.parquet")} == set(TABLES)
            assert all(pq.read_table(path) is not None for path in part.glob("*.parquet"))
        try:  # the folder may not even be there
            found = load_result(out)
        except ResultError:
            assert not earlier, "an earlier result is gone"
            assert not list(out.glob("*.parquet"))
            return
        if found.run["scenario"]["name"] == "watermark":
            assert earlier
        else:
            assert self.read(out) == self.rows

    def check_resumed(self, out, *resume):
        done = self.run(out, *resume)
        assert (done["signal"], done["code"]) == (0, 0), done["stderr"]
        assert self.read(out) == self.rows
        assert not (out / "batchbench-parts").exists()
        assert sorted(path.name for path in out.iterdir()) == sorted([*(f"{n}.parquet" for n in TABLES), "run.json"])


def begun(out):
    """Whether a sweep came so far that there is something to resume; before, a resume leaves another result alone."""
    return (out / "batchbench-parts/sweep.json").exists()


def resuming(out, earlier):
    """What the next try is given."""
    return ("--resume",) if begun(out) or not earlier else ()
