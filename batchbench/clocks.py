"""What arrivals are counted in, and what time an iteration is said to take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from batchbench.errors import UsageError
from batchbench.protocol import Clock, EngineDescription, IterationBatch, IterationOutcome, WorkloadClock

NS = 1_000_000_000  # of a second
FOREVER = 2**62


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

    def until(self, due: int | None) -> tuple[int, Callable[[int, int], int]] | None:
        """What is left until `now` is `due`, and what iterations take of it; None if each takes its real time."""
        ...

    def advanced(self, batch: IterationBatch) -> Sequence[int]:
        """They happened. Returns when each ended, and before them when the first began; nothing if not timed."""
        ...


def _one(rows: int, positions: int) -> int:
    return 1


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

    def until(self, due: int | None) -> tuple[int, Callable[[int, int], int]] | None:
        return FOREVER if due is None else due - self.iteration, _one

    def advanced(self, batch: IterationBatch) -> Sequence[int]:
        self.iteration += len(batch)
        return ()


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

    def until(self, due: int | None) -> tuple[int, Callable[[int, int], int]] | None:
        return FOREVER if due is None else due - self.end_ns, self._cost.of

    def advanced(self, batch: IterationBatch) -> Sequence[int]:
        took = map(self._cost.of, batch.issued_tokens, batch.forward_tokens)
        times = list(accumulate(took, initial=self.end_ns))
        self.iteration += len(batch)
        self.end_ns = times[-1]
        return times


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

    def until(self, due: int | None) -> None:
        return None

    def advanced(self, batch: IterationBatch) -> Sequence[int]:
        raise AssertionError("real time is not advanced")


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
