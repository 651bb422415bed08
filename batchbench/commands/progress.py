"""A live line per run of a pool on a terminal, a plain line per finished run elsewhere; drawn between iterations."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from batchbench.protocol import IterationBatch, IterationOutcome, Point
from batchbench.sweep import Pass, SweepObserver
from batchbench.timing import ContinuousTiming
from batchbench.units import show_seconds

_REDRAW_S = 0.1


class ProgressLines(SweepObserver):
    """Counts finished requests per pool. `close` ends the live display."""

    def __init__(self, console: Console, requests: int) -> None:
        self._console, self._requests = console, requests
        self._bar = Progress(
            TextColumn("pool {task.fields[pool]}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[state]}"),
            console=console,
            auto_refresh=False,  # a drawing thread would take the processor from the engine
        )
        self._task: TaskID | None = None
        self._shown = ""
        self._iterations = self._finished = self._evictions = 0
        self._drawn = self._began = 0.0

    def on_start(self, points: Sequence[Point]) -> None:
        if self._console.is_terminal:
            self._bar.start()

    def on_point(self, point: Point, which: Pass) -> None:
        self._iterations = self._finished = self._evictions = 0
        self._began = time.monotonic()
        self._shown = _column(point, which)
        self._task = self._bar.add_task("", total=self._requests, pool=self._shown, state="")
        self._draw()

    def on_iteration(self, iteration: int, outcome: IterationOutcome) -> None:
        self._iterations += 1
        self._finished += len(outcome.finished)
        self._evictions += len(outcome.preempted or ())
        if time.monotonic() - self._drawn >= _REDRAW_S:
            self._draw()

    def on_batch(self, first: int, batch: IterationBatch) -> None:
        self._iterations += len(batch)
        self._finished += sum(len(event.finished) for event in batch.events)
        self._evictions += sum(len(event.preempted) for event in batch.events)
        if time.monotonic() - self._drawn >= _REDRAW_S:
            self._draw()

    def on_timing(self, timing: ContinuousTiming) -> None:
        self._end()

    def on_repeated(self, point: Point, which: Pass) -> None:
        self._end()

    def close(self) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def _end(self) -> None:
        self._draw()
        if not self._console.is_terminal:
            self._console.print(f"pool {self._shown}  {self._state()}", highlight=False, soft_wrap=True)

    def _state(self) -> str:
        return (
            f"{self._finished}/{self._requests} requests, {self._iterations} iterations, "
            f"{self._evictions} evictions, {show_seconds(time.monotonic() - self._began)}"
        )

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        if self._task is not None and self._console.is_terminal:
            self._bar.update(self._task, completed=self._finished, state=self._state(), refresh=True)


def _column(point: Point, which: Pass) -> str:
    """The pass is named where there is more than one."""
    said = f"{point.pool_blocks:>6}" + (f"  {point.label:<30}" if point.choices else "")
    return said if which.of == 1 and not which.warmup else f"{said}  {which.name}"
