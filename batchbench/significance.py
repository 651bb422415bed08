"""Whether repeated measurements show that something lies above a limit or below it; if not, what would show it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

Side = Literal["below", "above", "unknown"]
ALPHA = 0.05
_EXACT = 16  # values of both samples up to which every rearrangement is looked at
_ALL = stats.PermutationMethod(n_resamples=np.inf)
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
    share = max(above, below) / n
    enough = (n for n in range(n + 1, _MOST + 1) if _sign(math.floor(share * n), n) <= alpha)
    return Shown("unknown", min(p_above, p_below), _about(next(enough, None)))


def against_baseline(values: Sequence[float], baseline: Sequence[float], alpha: float = ALPHA) -> Shown:
    """One-sided rank tests (Mann and Whitney 1947) of whether `values` tend to lie above those of the baseline."""
    n, m = len(values), len(baseline)
    p_above, p_below = (_rank(values, baseline, side) for side in ("greater", "less"))
    if min(p_above, p_below) <= alpha:
        return Shown("above" if p_above < p_below else "below", min(p_above, p_below))
    if 1 / math.comb(n + m, n) > alpha:
        needed = next(k for k in range(1, _MOST) if 1 / math.comb(2 * k, k) <= alpha)
        return Shown("unknown", min(p_above, p_below), f"at least {needed} repetitions of both; there are {n} and {m}")
    return Shown("unknown", min(p_above, p_below), _about(_noether(values, baseline, alpha), " of both"))


def _sign(count: int, n: int) -> float:
    """How likely at least `count` of n fall on one side if the median is the limit."""
    return float(sum(math.comb(n, k) for k in range(count, n + 1)) / 2**n)


def _rank(values: Sequence[float], baseline: Sequence[float], side: Literal["greater", "less"]) -> float:
    x, y = np.asarray(values, dtype=np.float64), np.asarray(baseline, dtype=np.float64)
    tied = len(np.unique(np.concatenate([x, y]))) < len(x) + len(y)
    if tied and len(x) + len(y) <= _EXACT:  # ties: no formula is exact, so all rearrangements
        return float(stats.mannwhitneyu(x, y, alternative=side, method=_ALL).pvalue)
    return float(stats.mannwhitneyu(x, y, alternative=side, method="asymptotic" if tied else "auto").pvalue)


def _noether(values: Sequence[float], baseline: Sequence[float], alpha: float) -> int | None:
    """Repetitions of both that would show such a difference four times out of five (Noether, JASA 82, 1987)."""
    wins = sum((v > b) + (v == b) / 2 for v in values for b in baseline) / (len(values) * len(baseline))
    if wins == 0.5:
        return None
    z = float(stats.norm.isf(alpha) + stats.norm.isf(0.2))
    return max(len(values), len(baseline), math.ceil(z**2 / (6 * (wins - 0.5) ** 2))) + 1


def _about(repetitions: int | None, of: str = "") -> str:
    if repetitions is None or repetitions > _MOST:
        return f"no reasonable number of repetitions ({_MOST} would not do), but a limit further away"
    return f"about {repetitions} repetitions{of}, or a limit further away"
