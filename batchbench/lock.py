"""One writer per folder: an advisory lock that the system drops when its process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from batchbench.errors import UsageError

_FILE = ".batchbench-lock"
_MOST_BYTES = 200  # of what a holder says of itself
_ASKING_S = 0.05  # whoever only asks holds it for far less


class FolderLock:
    """`flock` on a file in the folder. Readers do not ask for it.

    The lock is the open file's, not the file's: one that a killed process left is locked by nobody. The file says who
    holds it, and goes when the lock is released. On NFS, Linux asks the server, so that one machine's lock holds on
    the others; a server without locks is an error (ENOLCK), never two writers.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / _FILE
        self._fd: int | None = None

    def acquire(self) -> None:
        """Take the lock, or raise UsageError at once if another process, or another of this one, holds it.

        Raises OSError if the folder cannot be written.
        """
        while self._fd is None:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                _lock(fd)
            except BlockingIOError:
                holder = _signature(fd)
                os.close(fd)
                raise _taken(self._folder, holder) from None
            except OSError:
                os.close(fd)
                raise
            if self._is_ours(fd):
                self._fd = fd
            else:  # released, and so removed, between opening and locking
                os.close(fd)
        self._sign(self._fd)

    def release(self) -> None:
        """Give it back and remove its file; nothing happens if it is not held."""
        if self._fd is not None:
            with suppress(OSError):  # the folder is gone, or is read-only by now
                if self._is_ours(self._fd):
                    self._path.unlink()  # while it is held: who opened it meanwhile sees that it is gone
            os.close(self._fd)
            self._fd = None

    def __del__(self) -> None:
        self.release()

    def _is_ours(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self._path, follow_symlinks=False))
        except FileNotFoundError:
            return False

    def _sign(self, fd: int) -> None:
        """Say who holds it. On a full disk the lock holds without."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        with suppress(OSError):
            os.truncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} since {now}".encode(), 0)


def require_free(folder: Path) -> None:
    """Raise UsageError if somebody holds the folder's lock now: before an hour's preparations, not after them."""
    if (holder := _holder(folder)) is not None:
        raise _taken(folder, holder)


def is_held(folder: Path) -> bool:
    """Whether a living process holds the folder's lock; True, too, where that cannot be known."""
    return _holder(folder) is not None


def _holder(folder: Path) -> str | None:
    """What who holds the lock says of itself, which may be nothing; None if nobody does."""
    try:
        fd = os.open(folder / _FILE, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError:
        return ""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _signature(fd)
    except OSError:
        return ""
    finally:
        os.close(fd)
    return None


def _signature(fd: int) -> str:
    return os.pread(fd, _MOST_BYTES, 0).decode(errors="replace")


def _taken(folder: Path, holder: str) -> UsageError:
    said = f" ({holder})" if holder.isprintable() and holder else ""
    return UsageError(f"output folder {folder}: another sweep writes there{said}")


def _lock(fd: int) -> None:
    """Raises BlockingIOError if somebody holds it, and does not only ask."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(_ASKING_S)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
