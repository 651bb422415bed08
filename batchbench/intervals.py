"""The median of repeated measurements, and a bootstrap interval of it: what repetition supports, and no more."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
SEED = 20_261_130
RESAMPLES = 10_000  # half of them the mirror images of the others
_OUTSIDE = 250  # of their medians, on either side: 2.5 %


@dataclass(frozen=True, slots=True)
class Interval:
    """The median of n values and a percentile bootstrap interval of it.

    level: how often such an interval is meant to cover the median of what was measured; `attainable`. low, high and
    level are None for a single value: an interval from it would be made up.
    """

    n: int
    median: float
    low: float | None
    high: float | None
    level: float | None


def median_interval(values: Sequence[float]) -> Interval:
    """Of at least one value; their order does not matter. Raises ValueError for none, or one that is not finite."""
    if not values or not all(map(math.isfinite, values)):
        raise ValueError(f"no median of {list(values)}")
    ordered, n = np.sort(np.asarray(values, dtype=np.float64)), len(values)
    median = float(_between(ordered, (n - 1) // 2, n // 2))
    if n == 1:
        return Interval(1, median, None, None, None)
    medians = np.sort(_between(ordered, *_middles(n)))
    return Interval(n, median, float(medians[_OUTSIDE - 1]), float(medians[-_OUTSIDE]), attainable(n))


def attainable(n: int) -> float:
    """LEVEL, or less where n values cannot reach it: the median lies outside even their whole range if all of them fall
    on one side of it, which for a continuous distribution happens once in 2 ** (n - 1).
    """
    return min(LEVEL, 1.0 - 0.5 ** (n - 1))


@lru_cache(maxsize=64)
def _middles(n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of every resample of n ordered values, the places of its two middle ones.

    All that its median needs, so one set serves every metric. `Random.random` is promised to be the same in every
    version of Python. Mirror images make low and high equally far, in places, from the median.
    """
    draw, low, high = random.Random(SEED).random, (n - 1) // 2, n // 2
    resamples = (sorted(int(draw() * n) for _ in range(n)) for _ in range(RESAMPLES // 2))
    drawn = np.array([(places[low], places[high]) for places in resamples], dtype=np.int64)
    both = np.concatenate([drawn, n - 1 - drawn[:, ::-1]])
    return both[:, 0], both[:, 1]


def _between(ordered: NDArray[np.float64], lower: Any, upper: Any) -> Any:
    """Halfway from one of the values to another; exactly it where they are equal."""
    return ordered[lower] + (ordered[upper] - ordered[lower]) / 2
