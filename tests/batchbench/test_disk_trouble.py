"""A full disk, a folder that cannot be written or goes away: one line, nothing complete lost, and a sweep can go on."""

from __future__ import annotations

import errno
import gc
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.batchbench.breaking import SHORT, Case, begun, resuming, server
from tests.batchbench.test_cli import invoke

assert server  # a fixture


@pytest.fixture(scope="module")
def case(server, tmp_path_factory):
    return Case(server, tmp_path_factory.mktemp("disk"), SHORT, "--engine", "schedule", "--no-progress")


@pytest.fixture
def mounted(tmp_path):
    """A small file system of memory: `mounted(options)` mounts it and says where."""
    folder, taken = tmp_path / "small", []

    def mount(options):
        folder.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("needs root and CAP_SYS_ADMIN, to mount a small file system: sudo make test")
        taken.append(folder)
        return folder

    yield mount
    for path in taken:
        subprocess.run(["umount", str(path)], check=True)


def assert_one_line(done, message):
    """Exit code 2 before anything ran, 1 after; no traceback."""
    assert done["signal"] == 0 and done["code"] in (1, 2), done
    assert done["stderr"].startswith("error: output folder ") and done["stderr"].count("\n") == 1, done["stderr"]
    assert message in done["stderr"], done["stderr"]


def moments(case):
    """Some of the changes of the folder, those of the replacement among them."""
    return sorted(random.Random(8).sample(range(2, case.events), 20))


@pytest.mark.slow
def test_from_any_moment_on_nothing_can_be_written(case):
    """As on a full disk; what only removes and renames gets through."""
    refused = 0
    for place in moments(case):
        earlier = place % 2 == 0
        out = case.fresh(earlier)
        done = case.run(out, at_event=place, trouble="full")
        if done["code"]:
            assert_one_line(done, f"output folder {out}: ")
            assert "File too large" in done["stderr"]
            refused += 1
        case.check_left(out, earlier)
        case.check_resumed(out, *resuming(out, earlier))
    assert refused >= 5


@pytest.mark.slow
def test_the_folder_goes_away_at_any_moment(case):
    vanished = 0
    for place in moments(case):
        earlier = place % 2 == 0
        out = case.fresh(earlier)
        done = case.run(out, at_event=place, trouble="vanish")
        gone = out.with_name(out.name + ".gone")
        assert gone.is_dir()
        if done["code"]:
            assert_one_line(done, "No such file or directory")
            vanished += 1
        case.check_left(gone, earlier)
        case.check_resumed(gone, *resuming(gone, earlier))
    assert vanished >= 15


@pytest.mark.parametrize("kilobytes", [40, 100, 200, 280, 360, 440])
def test_a_disk_that_fills_up(case, mounted, kilobytes):
    small = mounted("size=1m")
    filler = small / "filler"
    filler.write_bytes(b"x" * (1024 - kilobytes) * 1024)
    done = case.run(small / "o")
    assert_one_line(done, f"output folder {small}/o: No space left on device")
    filler.unlink()
    case.check_left(small / "o", earlier=False)
    if kilobytes >= 200:
        assert (small / "o/batchbench-parts/point-0").is_dir(), "what was finished is lost"
    case.check_resumed(small / "o", "--resume")


WRITES = ((pq.ParquetWriter, "write_table"), (pq.ParquetWriter, "close"), (np, "savez"), (Path, "write_text"))


def full_after(monkeypatch, place):
    """From that write on, the disk stays full. Returns the writes so far, and what was said to nobody."""
    seen, unraised = [], []

    def full(name, honest):
        def write(*args, **kwargs):
            seen.append(name)
            if len(seen) > place:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return honest(*args, **kwargs)

        return write

    for owner, name in WRITES:
        monkeypatch.setattr(owner, name, full(name, getattr(owner, name)))
    monkeypatch.setattr(sys, "unraisablehook", unraised.append)
    return seen, unraised


def swept(tmp_path, *options):
    done = invoke("sweep", str(tmp_path / "x.toml"), "--no-plots", "--no-progress", "--out", str(tmp_path / "o"),
                  "--engine", "schedule", *options)  # fmt: skip
    gc.collect()
    return done


@pytest.mark.slow
def test_a_disk_that_is_full_from_any_write_on_is_one_line(monkeypatch, tmp_path):
    (tmp_path / "x.toml").write_text(SHORT)
    with monkeypatch.context() as patch:
        seen, unraised = full_after(patch, sys.maxsize)
        assert swept(tmp_path).exit_code == 0 and not unraised
    line = f"error: output folder {tmp_path}/o: No space left on device\n"
    for place in range(0, len(seen), 7):
        shutil.rmtree(tmp_path / "o")
        with monkeypatch.context() as patch:
            _, unraised = full_after(patch, place)
            done = swept(tmp_path)
            assert (done.exit_code, done.stderr, unraised) == (1 + (place == 0), line, []), (place, seen[place])
            again = swept(tmp_path, "--resume")  # it is still full
            assert again.exit_code in (1, 2) and again.stderr.endswith(line) and not unraised, (place, seen[place])
            assert again.stderr.removesuffix(line) in ("", "resumed: 1 of 2 runs finished\n",
                                                       "resumed: 2 of 2 runs finished\n")  # fmt: skip
    assert swept(tmp_path, "--resume").exit_code == 0


def test_a_full_disk_leaves_an_earlier_result_whole(case, mounted):
    small = mounted("size=2m")
    shutil.copytree("results/watermark", small / "o")
    left = 2 * 1024 * 1024 - sum(path.stat().st_size + 4096 for path in (small / "o").iterdir()) - 100_000
    (small / "filler").write_bytes(b"x" * left)
    assert_one_line(case.run(small / "o"), "No space left on device")
    case.check_left(small / "o", earlier=True)
    (small / "filler").unlink()
    case.check_resumed(small / "o", *resuming(small / "o", earlier=True))


def test_a_folder_that_cannot_be_written(case, mounted, tmp_path):
    if os.geteuid():  # root writes to what it is not allowed to
        folder, why = tmp_path / "locked", "Permission denied"
        folder.mkdir(mode=0o555)
    else:
        folder, why = mounted("ro"), "Read-only file system"
    for out in (folder, folder / "o"):
        done = case.run(out)
        assert_one_line(done, why)
        assert done["code"] == 2
    assert list(folder.iterdir()) == []


def test_a_result_in_the_middle_of_its_replacement_is_read_as_it_is(case):
    """Half put into place by a sweep that died: readers change nothing."""
    out = case.fresh(earlier=False)
    for place in range(case.events - 40, case.events):
        shutil.rmtree(out, ignore_errors=True)
        case.run(out, at_event=place)
        if begun(out) and len(list(out.glob("*.parquet"))) == 5:
            break
    else:
        pytest.fail("no moment in the middle of the replacement was found")
    assert len(list(out.glob("batchbench-parts/joined/*.parquet"))) == 6
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert case.read(out) == case.rows
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
