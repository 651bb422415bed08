"""What every worker shares: load once, then answer one JSON line per request. Standard library only.

A worker is started as `python WORKER.py WEIGHTS DTYPE THREADS POOL_TOKENS` in its peer's environment. Its first line
says {"settings", "versions"}; then, for every line {"do": METHOD, its arguments} on standard input, it calls that
method and answers {"seconds", "result"} or {"error"}.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import IO, Any, Protocol

_answers: IO[str]


class Peer(Protocol):
    """An engine that is loaded."""

    settings: str
    versions: dict[str, str]

    def generate(self, prompts: list[list[int]], output_tokens: int, at_most: int) -> list[list[int]]:
        """Greedy texts of `output_tokens` ids each, end of text ignored, at most `at_most` requests at once."""
        ...


def end_with_parent() -> None:
    """Have the system end this process when its parent ends: a stopped worker could not notice by itself."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def start() -> tuple[Path, str, int, int | None]:
    """Read the arguments and bind the process to as many cores as it has threads.

    Returns (weights, dtype, threads, positions that the K/V pool holds). The last is None, written 0, for a pool
    that never runs short.

    Foreign libraries print to standard output, so that descriptor becomes standard error from here on.
    """
    global _answers
    end_with_parent()
    _answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    weights, dtype, threads, pool_tokens = Path(sys.argv[1]).resolve(), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    os.environ["OMP_NUM_THREADS"] = str(threads)
    return weights, dtype, threads, pool_tokens or None


def serve(peer: Peer) -> None:
    """Answer until standard input ends."""
    _answer(settings=peer.settings, versions=peer.versions)
    for line in sys.stdin:
        request = json.loads(line)
        begin = time.perf_counter()
        try:
            result = getattr(peer, request.pop("do"))(**request)
        except Exception as error:
            _answer(error=f"{type(error).__name__}: {error}".splitlines()[0])
        else:
            _answer(seconds=time.perf_counter() - begin, result=result)


def _answer(**fields: Any) -> None:
    _answers.write(json.dumps(fields) + "\n")
    _answers.flush()
