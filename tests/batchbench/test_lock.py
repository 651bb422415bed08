"""One writer per folder, whoever died before."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from batchbench.errors import UsageError
from batchbench.lock import FolderLock, is_held
from tests.batchbench.test_cli import DAY34, everything_under, here, invoke

assert here  # a fixture
HOLD = """
import sys, time
from pathlib import Path
from batchbench.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of `o`."""
    (tmp_path / "o").mkdir()
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / "o"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_the_second_sweep_is_refused_by_name(here, holder):
    done = invoke("sweep", str(DAY34), "--engine", "schedule", "--out", "o", "--no-plots", "--no-progress")
    assert (done.exit_code, done.stdout) == (2, "")
    said = f"error: output folder o: another sweep writes there (process {holder.pid} since "
    assert done.stderr.startswith(said) and done.stderr.count("\n") == 1
    assert everything_under(here) == ["o/.batchbench-lock"]


def test_a_dead_process_holds_nothing(here, holder):
    holder.kill()
    holder.wait()
    assert (here / "o/.batchbench-lock").exists()
    done = invoke("sweep", str(DAY34), "--engine", "schedule", "--out", "o", "--no-plots", "--no-progress")
    assert (done.exit_code, done.stderr) == (0, "")
    assert not (here / "o/.batchbench-lock").exists()


def test_readers_do_not_ask(here, holder):
    done = invoke("plot", str(DAY34.parents[1] / "results/day34"), "--out", "o/plots")
    assert done.exit_code == 0


def test_one_process_has_one_writer_too(tmp_path):
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.acquire()
    with pytest.raises(UsageError, match=rf"another sweep writes there \(process {os.getpid()} since 2"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()
    first.release()
    assert list(tmp_path.iterdir()) == []


def test_it_can_be_asked_whether_somebody_holds_it(here, holder):
    assert is_held(here / "o") and not is_held(here)
    holder.kill()
    holder.wait()
    assert (here / "o/.batchbench-lock").exists() and not is_held(here / "o")
    (here / ".batchbench-lock").symlink_to("o/.batchbench-lock")
    assert is_held(here), "nobody can tell, so it is not called dead"


def test_who_asks_keeps_nobody_out(tmp_path):
    """A sweep that begins in the moment of a question waits for its end."""
    (tmp_path / ".batchbench-lock").touch()
    with open(tmp_path / ".batchbench-lock") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        released = threading.Timer(0.02, lambda: fcntl.flock(asking, fcntl.LOCK_UN))
        released.start()
        lock = FolderLock(tmp_path)
        lock.acquire()
        released.join()
    lock.release()


def test_a_file_that_is_removed_is_no_lock(tmp_path):
    """Who waits at the old file while its holder leaves, and who comes later, must not both get in."""
    first, second, third = (FolderLock(tmp_path) for _ in range(3))
    first.acquire()
    (tmp_path / ".batchbench-lock").unlink()
    second.acquire()  # a lock that somebody deletes protects nothing
    first.release()  # but its holder does not remove the file of another
    with pytest.raises(UsageError, match="another sweep"):
        third.acquire()
    second.release()


@pytest.mark.parametrize("content", [b"", b"\x1b[31mred", b"\xff\xfe", b"x\ny"])
def test_what_the_file_says_cannot_drive_the_terminal(tmp_path, content):
    lock = FolderLock(tmp_path)
    lock.acquire()
    (tmp_path / ".batchbench-lock").write_bytes(content)
    with pytest.raises(UsageError) as caught:
        FolderLock(tmp_path).acquire()
    assert str(caught.value).isprintable()
    lock.release()


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "o").mkdir()
    (tmp_path / "o/.batchbench-lock").symlink_to(tmp_path / "precious")
    (tmp_path / "precious").write_text("years of work")
    with pytest.raises(OSError, match="symbolic links"):
        FolderLock(tmp_path / "o").acquire()
    assert (tmp_path / "precious").read_text() == "years of work"


def test_many_processes_are_never_two_at_once(tmp_path):
    """Many processes at one folder: never two at once."""
    script = (
        "import sys, os, time\nfrom pathlib import Path\nfrom batchbench.lock import FolderLock\n"
        "from batchbench.errors import UsageError\nfolder, got = Path(sys.argv[1]), 0\n"
        "end = time.monotonic() + 30\n"
        "while got < 100 and time.monotonic() < end:\n"
        "    lock = FolderLock(folder)\n"
        "    try:\n        lock.acquire()\n    except UsageError:\n        continue\n"
        "    fd = os.open(folder / 'inside', os.O_CREAT | os.O_EXCL)\n"
        "    os.close(fd)\n    os.unlink(folder / 'inside')\n    got += 1\n    lock.release()\n"
        "print(got)\n"
    )
    (tmp_path / "o").mkdir()
    command = [sys.executable, "-c", script, tmp_path / "o"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [process.communicate()[0] for process in started] == ["100\n"] * 4
    assert list(Path(tmp_path / "o").iterdir()) == []
    assert [process.returncode for process in started] == [0] * 4
