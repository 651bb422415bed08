"""Whether repeated measurements show that something lies above a limit or below it; if not, what would show it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

Side = Literal["below", "above", "unknown"]
ALPHA = 0.05
_EXACT = 16  # values of both samples up to which every rearrangement is looked at
_MOST = 1000  # repetitions that are still worth naming


@dataclass(frozen=True, slots=True)
class Shown:
    """On which side it was shown to lie, with what probability by chance at most; if on none, what would settle it."""

    side: Side
    p: float
    settles: str = ""


def against_limit(values: Sequence[float], limit: float, alpha: float = ALPHA) -> Shown:
    """One-sided sign tests of the median of `values`. A value on the limit speaks for neither side."""
    above, below, n = sum(v > limit for v in values), sum(v < limit for v in values), len(values)
    p_above, p_below = _sign(above, n), _sign(below, n)
    if min(p_above, p_below) <= alpha:
        return Shown("above" if p_above < p_below else "below", min(p_above, p_below))
    needed = math.ceil(-math.log2(alpha))
    if n < needed:
        return Shown("unknown", min(p_above, p_below), f"at least {needed} repetitions; there are {n}")
    lead = abs(above - below) / n  # by the normal approximation, significant from (z / lead) ** 2 values on
    more = max(n + 1, math.ceil((_z(alpha) / lead) ** 2)) if lead else None
    return Shown("unknown", min(p_above, p_below), _about(more))


def against_baseline(values: Sequence[float], baseline: Sequence[float], alpha: float = ALPHA) -> Shown:
    """One-sided rank tests (Mann and Whitney 1947) of whether `values` tend to lie above those of the baseline.

    Of too few to show anything, p is the least that they could.
    """
    n, m = len(values), len(baseline)
    if (least := 1 / math.comb(n + m, n)) > alpha:
        needed = next(k for k in range(1, _MOST) if 1 / math.comb(2 * k, k) <= alpha)
        return Shown("unknown", least, f"at least {needed} repetitions of both; there are {n} and {m}")
    p_above, p_below = (_rank(values, baseline, side) for side in ("greater", "less"))
    if min(p_above, p_below) <= alpha:
        return Shown("above" if p_above < p_below else "below", min(p_above, p_below))
    return Shown("unknown", min(p_above, p_below), _about(_noether(values, baseline, alpha), " of both"))


def _sign(count: int, n: int) -> float:
    """How likely at least `count` of n fall on one side if the median is the limit."""
    return float(sum(math.comb(n, k) for k in range(count, n + 1)) / 2**n)


def _rank(values: Sequence[float], baseline: Sequence[float], side: Literal["greater", "less"]) -> float:
    from scipy import stats  # half a second to import, and most commands test nothing

    x, y = np.asarray(values, dtype=np.float64), np.asarray(baseline, dtype=np.float64)
    tied = len(np.unique(np.concatenate([x, y]))) < len(x) + len(y)
    if (
        tied and len(x) + len(y) <= _EXACT and min(len(x), len(y)) > 1
    ):  # ties: no formula is exact, so all rearrangements
        return float(
            stats.mannwhitneyu(x, y, alternative=side, method=stats.PermutationMethod(n_resamples=np.inf)).pvalue
        )
    return float(stats.mannwhitneyu(x, y, alternative=side, method="asymptotic" if tied else "auto").pvalue)


def _noether(values: Sequence[float], baseline: Sequence[float], alpha: float) -> int | None:
    """Repetitions of both that would show such a difference four times out of five (Noether, JASA 82, 1987)."""
    wins = sum((v > b) + (v == b) / 2 for v in values for b in baseline) / (len(values) * len(baseline))
    if wins == 0.5:
        return None
    z = _z(alpha) + _z(0.2)
    return max(len(values), len(baseline), math.ceil(z**2 / (6 * (wins - 0.5) ** 2))) + 1


def _z(tail: float) -> float:
    """What a standard normal value exceeds with that probability."""
    return NormalDist().inv_cdf(1 - tail)


def _about(repetitions: int | None, of: str = "") -> str:
    if repetitions is None or repetitions > _MOST:
        return f"no reasonable number of repetitions ({_MOST} would not do), but a limit further away"
    return f"about {repetitions} repetitions{of}, or a limit further away"
