"""Sweeps killed at any moment: nothing incomplete is left, and --resume makes the result of an unbroken one."""

from __future__ import annotations

import random
import signal
import subprocess
import sys

import pytest

from tests.batchbench.breaking import COUNTED, MEASURED, SHORT, Case, begun, resuming, server

assert server  # a fixture


@pytest.fixture(scope="module")
def counted(server, tmp_path_factory):
    return Case(server, tmp_path_factory.mktemp("counted"), COUNTED, "--engine", "schedule")


@pytest.fixture(scope="module")
def measured(server, tmp_path_factory):
    return Case(server, tmp_path_factory.mktemp("measured"), MEASURED)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kills"), [("counted", 30), ("measured", 22)])
def test_kills_at_random_moments(request, name, kills):
    """A sweep and its resumes are killed until one gets through; again and again, in new folders."""
    case, draw, killed = request.getfixturevalue(name), random.Random(34), 0
    while killed < kills:
        earlier, resume = draw.random() < 0.5, ()
        out = case.fresh(earlier)
        for _ in range(4):
            done = case.run(out, *resume, after_s=draw.uniform(0, 1.05 * case.seconds))
            assert done["signal"] == signal.SIGKILL or done["code"] == 0, done["stderr"]
            killed += done["signal"] == signal.SIGKILL
            case.check_left(out, earlier)
            resume = resuming(out, earlier)
        case.check_resumed(out, *resume)


@pytest.mark.slow
def test_kills_at_every_change_of_the_folder(server, tmp_path):
    """The process dies before its n-th file is opened, renamed, removed, and so on: for every n of the replacement."""
    case = Case(server, tmp_path, SHORT, "--engine", "schedule")
    assert case.events > 80
    for place in (*range(1, case.events - 45, 8), *range(case.events - 45, case.events + 1)):
        earlier = place % 2 == 0
        out = case.fresh(earlier)
        assert case.run(out, at_event=place)["signal"] == signal.SIGKILL
        case.check_left(out, earlier)
        if begun(out) and place % 3 == 0:  # and then the resume, too
            case.run(out, "--resume", at_event=place // 3)
            case.check_left(out, earlier)
        case.check_resumed(out, *resuming(out, earlier))


@pytest.mark.parametrize(
    ("by", "code", "line"), [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, "terminated\n")]
)
def test_signals_end_in_one_line_at_any_moment(counted, by, code, line):
    draw, met = random.Random(by), 0
    while met < 6:
        out = counted.fresh(earlier=False)
        done = counted.run(out, "--no-progress", by=by, after_s=draw.uniform(0.05, counted.seconds))
        if (done["signal"], done["code"]) != (0, 0):
            assert (done["signal"], done["code"], done["stderr"]) == (0, code, line)
            met += 1
        counted.check_left(out, earlier=False)
        counted.check_resumed(out, "--resume")
        assert not (out / ".batchbench-lock").exists()


@pytest.mark.parametrize(("by", "code", "line"), [("SIGINT", 130, "interrupted\n"), ("SIGTERM", 143, "terminated\n")])
def test_signals_while_modules_are_imported(tmp_path, by, code, line):
    """From the first moment that is this program's: before, Python itself is starting."""
    script = (
        "import os, signal, sys\n"
        "class Early:\n"
        "    def find_spec(self, name, *_):\n"
        f"        name == {{module!r}} and os.kill(os.getpid(), signal.{by})\n"
        "sys.meta_path.insert(0, Early())\n"
        "sys.argv = ['batchbench', '--version']\n"
        "from batchbench.__main__ import main\n"
        "main()\n"
    )
    for module in ("batchbench.cli", "numpy", "pyarrow.lib", "pydantic", "rich.console"):
        command = [sys.executable, "-c", script.format(module=module)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (code, "", line), module
