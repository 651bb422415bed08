"""What arrivals are counted in, and what time an iteration is said to take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from batchbench.errors import UsageError
from batchbench.protocol import Clock, EngineDescription, IterationOutcome, QuietIterations, WorkloadClock

NS = 1_000_000_000  # of a second
STRETCH = 65_536  # most iterations that are skipped at once, so that what is said of each fits in memory


@dataclass(frozen=True, slots=True)
class IterationCost:
    """A modelled iteration: a part that each takes, a part per row, and a part per position beyond one per row.

    Nanoseconds, so that sums are exact and the same on every machine. Raises UsageError unless an iteration takes time.
    """

    base_ns: int
    row_ns: int = 0
    position_ns: int = 0

    @classmethod
    def of_seconds(cls, iteration_s: float, row_s: float = 0.0, position_s: float = 0.0) -> IterationCost:
        """Rounded to nanoseconds."""
        return cls(round(iteration_s * NS), round(row_s * NS), round(position_s * NS))

    def __post_init__(self) -> None:
        if self.base_ns < 0 or self.row_ns < 0 or self.position_ns < 0 or not self.base_ns + self.row_ns:
            raise UsageError("an iteration must take time: its parts are not negative, the first two not both 0")

    def of(self, rows: int, positions: int) -> int:
        """Nanoseconds; an iteration that forwards nothing takes none."""
        return self.base_ns + rows * self.row_ns + (positions - rows) * self.position_ns if rows else 0


class RunClock(Protocol):
    """The time of one run. `iteration` is the next one, `now` the workload's clock before it."""

    name: WorkloadClock
    timed: bool  # whether start_ns and end_ns of an iteration mean anything
    iteration: int
    start_ns: int  # of the last iteration, or of the first of a stretch
    end_ns: int  # of the last iteration

    @property
    def now(self) -> int:
        """Iterations, or nanoseconds."""
        ...

    def wait(self, until: int) -> None:
        """Nobody has work until then."""
        ...

    def run(self, step: Callable[[], IterationOutcome]) -> IterationOutcome:
        """Let one iteration happen."""
        ...

    def room(self, until: int | None, rows: int) -> int:
        """How many quiet iterations of that many rows begin before `now` is `until`; 0 if they may not be skipped."""
        ...

    def skipped(self, quiet: QuietIterations) -> None:
        """They happened."""
        ...


class IterationClock:
    """Arrivals in iterations. Seconds are those inside the engine: what happens in between is nobody's latency."""

    name: WorkloadClock = "iterations"

    def __init__(self, read: Clock, engine: EngineDescription) -> None:
        self._read, self.timed = read, engine.computes_text
        self.iteration = self.start_ns = self.end_ns = 0

    @property
    def now(self) -> int:
        return self.iteration

    def wait(self, until: int) -> None:
        self.iteration = max(self.iteration, until)

    def run(self, step: Callable[[], IterationOutcome]) -> IterationOutcome:
        begin = self._read()
        outcome = step()
        self.start_ns = self.end_ns
        self.end_ns += round((self._read() - begin) * NS)
        self.iteration += 1
        return outcome

    def room(self, until: int | None, rows: int) -> int:
        return STRETCH if until is None else min(STRETCH, until - self.iteration)

    def skipped(self, quiet: QuietIterations) -> None:
        self.iteration += len(quiet)


class VirtualClock:
    """Arrivals in nanoseconds against a modelled iteration time: every counter is the same on every machine."""

    name: WorkloadClock = "virtual"
    timed = True

    def __init__(self, cost: IterationCost) -> None:
        self._cost = cost
        self.iteration = self.start_ns = self.end_ns = 0

    @property
    def now(self) -> int:
        return self.end_ns

    def wait(self, until: int) -> None:
        self.end_ns = max(self.end_ns, until)

    def run(self, step: Callable[[], IterationOutcome]) -> IterationOutcome:
        outcome = step()
        self.start_ns = self.end_ns
        self.end_ns += self._cost.of(outcome.issued_tokens, outcome.positions)
        self.iteration += 1
        return outcome

    def room(self, until: int | None, rows: int) -> int:
        return STRETCH if until is None else min(STRETCH, -(-(until - self.end_ns) // self._cost.of(rows, rows)))

    def skipped(self, quiet: QuietIterations) -> None:
        self.start_ns = self.end_ns
        self.end_ns += len(quiet) * self._cost.of(quiet.issued_tokens, quiet.issued_tokens)
        self.iteration += len(quiet)


class WallClock:
    """Arrivals in nanoseconds of real time. Who arrives when depends on the machine's speed, and so may counters."""

    name: WorkloadClock = "wall"
    timed = True

    def __init__(self, read: Clock, sleep: Callable[[float], None] = time.sleep) -> None:
        self._read, self._sleep, self._began = read, sleep, read()
        self.iteration = self.start_ns = self.end_ns = 0

    @property
    def now(self) -> int:
        return round((self._read() - self._began) * NS)

    def wait(self, until: int) -> None:
        while (left := until - self.now) > 0:
            self._sleep(left / NS)

    def run(self, step: Callable[[], IterationOutcome]) -> IterationOutcome:
        self.start_ns = self.now
        outcome = step()
        self.end_ns = self.now
        self.iteration += 1
        return outcome

    def room(self, until: int | None, rows: int) -> int:
        return 0

    def skipped(self, quiet: QuietIterations) -> None:
        raise AssertionError("nothing is skipped in real time")


def run_clock(name: WorkloadClock, cost: IterationCost | None, read: Clock, engine: EngineDescription) -> RunClock:
    """The clock of one run. read: this machine's seconds. Raises UsageError for a schedule in real time."""
    if name == "iterations":
        return IterationClock(read, engine)
    if name == "virtual":
        if cost is None:
            raise UsageError("clock = 'virtual' needs what an iteration takes")
        return VirtualClock(cost)
    if not engine.computes_text:
        raise UsageError("clock = 'wall': a schedule computes nothing, so it takes no real time; use 'virtual'")
    return WallClock(read)
