"""Many values in few bins, honestly: the least, the greatest and the mean of each; nothing left out."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Bands:
    """Of each bin between two edges, over the values that hold in it."""

    edges: Values
    low: Values
    high: Values
    mean: Values  # weighted by how long each holds


def bin_edges(start: float, end: float, bins: int, *, whole: bool) -> Values:
    """At most so many equal bins; whole: between whole numbers, so that no value is in two of them."""
    edges = np.linspace(start, end, bins + 1)
    return np.unique(np.round(edges)) if whole else edges


def bands(start: Values, values: Values, end: float, bins: int) -> Bands:
    """Of a state that takes `values[n]` at `start[n]` (ascending), and the last of them until `end`."""
    edges = bin_edges(float(start[0]), end, bins, whole=np.issubdtype(start.dtype, np.integer))
    first = np.maximum(np.searchsorted(start, edges[:-1], side="right") - 1, 0)
    last = np.searchsorted(start, edges[1:], side="left")
    ranges = np.stack([first, last], axis=-1).ravel()
    padded = np.append(values, values[-1:])  # the end of the last range must be a place
    low, high = (extreme.reduceat(padded, ranges)[::2] for extreme in (np.minimum, np.maximum))
    until = np.append(start, end).astype(np.float64)
    sums = np.append(0.0, np.cumsum(values * np.diff(until)))
    mean = np.diff(np.interp(edges, until, sums)) / np.diff(edges)
    return Bands(edges, low, high, np.clip(mean, low, high))  # rounding must not leave the band


def medians(values: Values, edges: Values) -> Values:
    """Of the values between each two edges, which are places."""
    places = edges.astype(np.int64)
    return np.array([np.median(values[a:b]) for a, b in pairwise(places)])


def sums(places: Values, weights: Values | None, edges: Values) -> Values:
    """Of the weights (1 each if None) between each two edges."""
    return np.histogram(places, edges, weights=weights)[0]
