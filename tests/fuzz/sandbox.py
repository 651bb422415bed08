"""Watches what reading a file does: no file written, no process, no connection, no code run, no hang, no blow-up."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS, BYTES = 20, 4 * 2**30  # that reading one small file may take, and memory that it may add
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_NEVER = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.system", "os.exec", "os.fork",
          "os.posix_spawn", "subprocess.Popen", "socket.connect", "socket.bind", "ctypes.dlopen", "pickle.find_class",
          "marshal.load")  # fmt: skip
_DECOYS = ("os", "posix", "nt", "subprocess", "shutil", "decoy")  # modules a hostile file may name
_watching, _seen = False, list[str]()


class Forbidden(AssertionError):
    """Reading did what no data may make it do."""


def _hook(event: str, details: tuple[object, ...]) -> None:
    if not _watching:
        return
    if event == "open":
        path, _, flags = details
        if isinstance(flags, int) and flags & _WRITES and path != os.devnull:
            _seen.append(f"{path!r} is opened for writing")
    elif event in _NEVER:
        _seen.append(f"{event} {details!r:.200}")
    elif event == "import" and str(details[0]).split(".")[0] in _DECOYS and details[0] not in sys.modules:
        _seen.append(f"{details[0]} is imported")


sys.addaudithook(_hook)


@contextmanager
def watched() -> Iterator[None]:
    """Raise Forbidden for what a file must not bring about; TimeoutError after SECONDS."""
    global _watching
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    handler = signal.signal(signal.SIGALRM, _hangs)
    _seen.clear()
    try:
        resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, before[1]))
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        _watching = True
        yield
    finally:
        _watching = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)
    if _seen:
        raise Forbidden("; ".join(_seen))


def _hangs(*_: object) -> None:
    raise TimeoutError(f"reading takes more than {SECONDS} s")
