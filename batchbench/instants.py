"""When each iteration began and ended, in nanoseconds, told from a result's tables."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchbench.clocks import NS
from batchbench.errors import ResultError, UsageError
from batchbench.results import Result

Ints = NDArray[np.int64]
TimeUnit = Literal["s", "iterations"]
_MOST_NS = 2**60  # 36 years
ITERATION_NS = 1_000_000  # what an iteration is drawn as where time is counted in iterations


class Instants:
    """The time axis of one point: nanoseconds of its clock, or ITERATION_NS for each iteration.

    unit: seconds where the point has them, if None. Raises UsageError if it asks for seconds that there are not;
    ResultError for iterations or times that cannot be.
    """

    def __init__(self, result: Result, point: int, unit: TimeUnit | None = None) -> None:
        columns = ["iteration", "step_s"]
        frame = result.point("iterations", point, columns)
        arrivals = result.point("requests", point, ["arrival_s"])["arrival_s"]  # older results do not have them
        timed = bool(frame["step_s"].notna().all() and arrivals.notna().all())
        if unit == "s" and not timed:
            raise UsageError(f"point {point} does not say when its iterations began, in seconds")
        self.unit: TimeUnit = unit or ("s" if timed else "iterations")
        self.iterations: Ints = frame["iteration"].to_numpy(dtype=np.int64)
        if not len(frame) or self.iterations[0] < 0 or (np.diff(self.iterations) <= 0).any():
            raise ResultError(f"damaged file: the iterations of point {point} are not in order")
        if self.unit == "s":
            self._begin, self._end = begin_ns(result, point, frame), nanoseconds(frame["step_s"])
            self._end += self._begin

    def begin(self, iterations: Ints) -> Ints:
        """When these iterations began."""
        return iterations * ITERATION_NS if self.unit == "iterations" else self._begin[self._place(iterations)]

    def end(self, iterations: Ints) -> Ints:
        """When they ended."""
        return (iterations + 1) * ITERATION_NS if self.unit == "iterations" else self._end[self._place(iterations)]

    def arrival(self, requests: pd.DataFrame) -> Ints:
        """When these requests arrived. requests: rows with arrival_iteration and arrival_s."""
        if self.unit == "s":
            return nanoseconds(requests["arrival_s"])
        return self.begin(requests["arrival_iteration"].to_numpy(dtype=np.int64))

    def _place(self, iterations: Ints) -> Ints:
        return np.minimum(np.searchsorted(self.iterations, iterations), len(self.iterations) - 1)


def begin_ns(result: Result, point: int, frame: pd.DataFrame) -> Ints:
    """When each iteration began. The tables have durations: what lies between two is told by who arrived or finished.

    frame: the point's iterations. Exact where someone finished and after a time without work, never too late.
    """
    columns = ["arrival_iteration", "finished_iteration", "arrival_s", "latency_s"]
    requests = result.point("requests", point, columns)
    step = nanoseconds(frame["step_s"])
    worked = np.append(0, np.cumsum(step)[:-1])  # before each iteration
    idle = np.zeros_like(step)
    arrival = nanoseconds(requests["arrival_s"])
    iterations = frame["iteration"].to_numpy()
    for at, known, spent in (
        (requests["arrival_iteration"], arrival, worked),
        (requests["finished_iteration"], arrival + nanoseconds(requests["latency_s"]), worked + step),
    ):
        place = np.minimum(np.searchsorted(iterations, at.to_numpy()), len(frame) - 1)
        np.maximum.at(idle, place, known - spent[place])
    return np.asarray(worked + np.maximum.accumulate(idle), dtype=np.int64)


def nanoseconds(seconds: pd.Series[float]) -> Ints:
    """Seconds as the tables have them: whole nanoseconds over a power of ten, so that nothing is lost.

    Raises ResultError for what is no time.
    """
    exact = np.rint(seconds.to_numpy(dtype=np.float64) * NS)
    if not ((exact >= 0) & (exact < _MOST_NS)).all():
        raise ResultError("damaged file: the tables have a time that is none")
    return exact.astype(np.int64)
