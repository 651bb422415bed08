"""The status file of a running sweep: written between iterations, read by whoever watches, trusted by nobody."""

from __future__ import annotations

import json
import math
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from batchbench.errors import ResultError
from batchbench.lock import is_held
from batchbench.parts import NAME as PARTS
from batchbench.protocol import IterationBatch, IterationOutcome, Point
from batchbench.sweep import Pass, SweepObserver
from batchbench.timing import ContinuousTiming

_EVERY_S = 0.5  # at most that often
_DEAD_S = 2.0  # a status so old, of a sweep whose lock nobody holds, is the last one
_MOST_BYTES = 65_536
_FILE = "status.json"

Count = Annotated[int, Field(ge=0, le=2**53)]
Seconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=1000)]


class Status(BaseModel):
    """How a sweep stands. used_blocks, running and waiting: null before the first iteration of a run of a point, and
    where the engine does not report them.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    version: Literal[1] = 1
    pid: Annotated[int, Field(ge=1, le=2**31 - 1)]
    started_at: Seconds  # since 1970
    elapsed_s: Seconds
    points: Count
    point: Count = 0  # the one that runs, from 0: in this pass, as many are done
    pass_name: Text = ""
    pool_blocks: Count = 0
    choices: Text = ""
    requests: Count
    requests_finished: Count = 0
    iterations: Count = 0  # of this run of the point, as are the next four
    evictions: Count = 0
    used_blocks: Count | None = None
    running: Count | None = None
    waiting: Count | None = None


class StatusWriter(SweepObserver):
    """Writes the status of a sweep into its output folder, and passes everything on. Nothing that fails here counts."""

    def __init__(self, folder: Path, requests: int, following: SweepObserver) -> None:
        self._path, self._requests, self._next = folder / PARTS / _FILE, requests, following
        self._points: Sequence[Point] = ()
        self._point, self._pass = Point(0), Pass(0, 1)
        self._iterations = self._finished = self._evictions = 0
        self._started_at, self._began, self._due = time.time(), time.monotonic(), -math.inf

    def on_start(self, points: Sequence[Point]) -> None:
        self._points = points
        self._next.on_start(points)

    def on_point(self, point: Point, which: Pass) -> None:
        self._point, self._pass = point, which
        self._iterations = self._finished = self._evictions = 0
        if time.monotonic() >= self._due:
            self._write(None, None, None)
        self._next.on_point(point, which)

    def on_iteration(self, iteration: int, outcome: IterationOutcome) -> None:
        self._iterations += 1
        self._finished += len(outcome.finished)
        self._evictions += len(outcome.preempted or ())
        if time.monotonic() >= self._due:
            self._write(outcome.running, outcome.waiting, outcome.free_blocks)
        self._next.on_iteration(iteration, outcome)

    def on_batch(self, first: int, batch: IterationBatch) -> None:
        self._iterations += len(batch)
        self._finished += sum(len(event.finished) for event in batch.events)
        self._evictions += sum(len(event.preempted) for event in batch.events)
        if time.monotonic() >= self._due:
            self._write(batch.running[-1], batch.waiting[-1], batch.free_blocks[-1])
        self._next.on_batch(first, batch)

    def on_timing(self, timing: ContinuousTiming) -> None:
        self._next.on_timing(timing)

    def on_repeated(self, point: Point, which: Pass) -> None:
        self._next.on_repeated(point, which)

    def _write(self, running: int | None, waiting: int | None, free_blocks: int | None) -> None:
        now = time.monotonic()
        self._due = now + _EVERY_S
        repeated = self._pass.of > 1 or self._pass.warmup
        document = {
            "version": 1,
            "pid": os.getpid(),
            "started_at": self._started_at,
            "elapsed_s": now - self._began,
            "points": len(self._points),
            "point": self._points.index(self._point),
            "pass_name": self._pass.name if repeated else "",
            "pool_blocks": self._point.pool_blocks,
            "choices": self._point.label[:1000],
            "requests": self._requests,
            "requests_finished": self._finished,
            "iterations": self._iterations,
            "evictions": self._evictions,
            "used_blocks": None if free_blocks is None else self._point.pool_blocks - free_blocks,
            "running": running,
            "waiting": waiting,
        }
        unfinished = self._path.with_suffix(".unfinished")
        try:
            unfinished.write_text(json.dumps(document), encoding="utf-8")
            os.replace(unfinished, self._path)
        except OSError:  # a disk that is full is for the tables to find
            pass


State = Literal["none", "silent", "running", "died", "result"]


@dataclass(frozen=True, slots=True)
class Sighting:
    """What a folder shows of a sweep at one moment.

    state: `none`, nothing at all; `silent`, parts of a sweep without a status; `running`; `died`, nobody holds its
    lock; `result`, no sweep but a result. age_s: of the status. result_ns: when the result was written, if there is
    one.
    """

    state: State
    status: Status | None = None
    age_s: float = 0.0
    result_ns: int | None = None


def sight(folder: Path) -> Sighting:
    """Look at a sweep's output folder. Raises ResultError if its status file is none of ours, or unreadable."""
    try:
        result_ns = (folder / "run.json").stat().st_mtime_ns
    except OSError:
        result_ns = None
    if not (folder / PARTS).is_dir():
        return Sighting("none" if result_ns is None else "result", result_ns=result_ns)
    found = _read(folder / PARTS / _FILE)
    if found is None:
        return Sighting("silent", result_ns=result_ns)
    status, written_at = found
    age_s = max(0.0, time.time() - written_at)
    died = age_s >= _DEAD_S and not is_held(folder)
    return Sighting("died" if died else "running", status, age_s, result_ns)


def _read(path: Path) -> tuple[Status, float] | None:
    """The status and when it was written; None if there is no such file."""
    try:
        # Whatever lies there is looked at before it is read: a pipe would wait for ever, a link lead elsewhere.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode) or about.st_size > _MOST_BYTES:
                raise ResultError(f"{path}: not a status file that batchbench wrote")
            return Status.model_validate_json(file.read(_MOST_BYTES)), about.st_mtime
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ResultError(f"{path}: {error.strerror or error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        what = ": ".join([*map(str, first["loc"]), first["msg"]])
        raise ResultError(f"{path}: not a status file that batchbench wrote: {what}") from None
