"""Whether repeated measurements show that a limit is kept or broken; if neither, what would show it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Side = Literal["below", "above", "unknown"]
ALPHA = 0.05
_POWER = 0.8  # how often the repetitions that are named would show a difference such as was seen
_EXACT = 80  # values of both samples up to which every arrangement is counted
_MOST = 1000  # repetitions that are still worth naming
_FURTHER = "a limit further away"


@dataclass(frozen=True, slots=True)
class Shown:
    """On which side it was shown to lie, with what probability by chance at most; if on none, what would settle it.

    p: None where no test was needed, since no value breaks a limit that any of the baseline's sets.
    """

    side: Side
    p: float | None
    settles: str = ""


def against_limit(values: Sequence[float], limit: float, *, upper: bool, alpha: float = ALPHA) -> Shown:
    """One-sided sign tests of the median of `values`. A value on the limit keeps it: it is "below" an upper one."""
    n = len(values)
    broken = sum(value > limit if upper else value < limit for value in values)
    p_broken, p_kept = _sign(broken, n), _sign(n - broken, n)
    kept_side, broken_side = _sides(upper)
    p = min(p_broken, p_kept)
    if p <= alpha:
        return Shown(kept_side if p_kept <= p_broken else broken_side, p)
    needed = math.ceil(-math.log2(alpha))
    if n < needed:
        return Shown("unknown", p, f"at least {needed} repetitions; there are {n}")
    share = max(broken, n - broken) / n
    return Shown("unknown", p, _about(None if share == 0.5 else max(n + 1, _for_sign_test(share, alpha)), _FURTHER))


def against_baseline(values: Sequence[float], baseline: Sequence[float], *, upper: bool, alpha: float = ALPHA) -> Shown:
    """One-sided rank tests (Mann and Whitney 1947) of whether `values` tend to lie above, or below, limits that the
    baseline's values set, exact for ties too; where no value breaks any of these limits, they are kept.

    That is no evidence of a difference: ask `difference` for it.
    """
    n, m = len(values), len(baseline)
    p_above, p_below = rank_tests(values, baseline)
    p = min(p_above, p_below)
    if few := _too_few(n, m, alpha):
        return Shown("unknown", p, few)
    if p <= alpha:
        return Shown("above" if p_above < p_below else "below", p)
    if max(values) <= min(baseline) if upper else min(values) >= max(baseline):
        return Shown(_sides(upper)[0], None)
    return Shown("unknown", p, _about(_noether(values, baseline, alpha), _FURTHER, " of both"))


def difference(values: Sequence[float], baseline: Sequence[float], *, alpha: float = ALPHA) -> Shown:
    """A two-sided rank test of whether `values` tend to lie above or below those of the baseline, which of the two
    being seen from them: twice the smaller one-sided p, at most 1.
    """
    p_above, p_below = rank_tests(values, baseline)
    p = min(1.0, 2 * min(p_above, p_below))
    if few := _too_few(len(values), len(baseline), alpha / 2):
        return Shown("unknown", p, few)
    if p <= alpha:
        return Shown("above" if p_above < p_below else "below", p)
    return Shown("unknown", p, _about(_noether(values, baseline, alpha / 2), "", " of both"))


def _too_few(n: int, m: int, alpha: float) -> str:
    """How many would be enough, where even samples that do not overlap show nothing in a one-sided test at alpha."""
    if 1 / math.comb(n + m, n) <= alpha:
        return ""
    needed = next(k for k in range(1, _MOST) if 1 / math.comb(2 * k, k) <= alpha)
    return f"at least {needed} repetitions of both; there are {n} and {m}"


def rank_tests(values: Sequence[float], baseline: Sequence[float]) -> tuple[float, float]:
    """How likely, if all arrangements of both samples are, is a rank sum of `values` at least, and at most, as large.

    Exact up to 80 values, by counting arrangements; beyond, the normal approximation with its correction for ties.
    """
    n, total = len(values), len(values) + len(baseline)
    doubled = _doubled_ranks(np.array([*values, *baseline], dtype=np.float64))
    seen = int(doubled[:n].sum())
    if total <= _EXACT:
        ways = _ways(doubled, n)
        return float(ways[seen:].sum() / ways.sum()), float(ways[: seen + 1].sum() / ways.sum())
    ranks = doubled / 2
    mean, spread = n * ranks.mean(), math.sqrt(n * (total - n) / total * ranks.var(ddof=1))
    normal = NormalDist(mean, spread or 1.0)
    return 1 - normal.cdf(seen / 2 - 0.5), normal.cdf(seen / 2 + 0.5)


def _doubled_ranks(pooled: NDArray[np.float64]) -> NDArray[np.int64]:
    """Twice the mean rank of each value among all, which is whole for ties too."""
    ordered = np.sort(pooled)
    first, last = np.searchsorted(ordered, pooled, "left"), np.searchsorted(ordered, pooled, "right")
    return np.asarray(first + 1 + last, dtype=np.int64)


def _ways(doubled: NDArray[np.int64], n: int) -> NDArray[np.float64]:
    """In how many choices of n values their doubled ranks have which sum."""
    largest = int(np.sort(doubled)[-n:].sum())
    ways = np.zeros((n + 1, largest + 1))
    ways[0, 0] = 1
    for rank in doubled:
        more = ways[:-1, : largest + 1 - rank].copy()
        ways[1:, rank:] += more
    found: NDArray[np.float64] = ways[n]
    return found


def _sides(upper: bool) -> tuple[Side, Side]:
    """Where values lie that keep a limit, and those that break it."""
    return ("below", "above") if upper else ("above", "below")


def _sign(count: int, n: int) -> float:
    """How likely at least `count` of n fall on one side if the median is the limit."""
    return float(sum(math.comb(n, k) for k in range(count, n + 1)) / 2**n)


def _for_sign_test(share: float, alpha: float) -> int:
    """Repetitions with which a sign test would show a side that has that share of them."""
    return math.ceil(((_z(alpha) / 2 + _z(1 - _POWER) * math.sqrt(share * (1 - share))) / (share - 0.5)) ** 2)


def _noether(values: Sequence[float], baseline: Sequence[float], alpha: float) -> int | None:
    """Repetitions of both with which a rank test would show such a difference (Noether, JASA 82, 1987)."""
    wins = sum((v > b) + (v == b) / 2 for v in values for b in baseline) / (len(values) * len(baseline))
    if wins == 0.5:
        return None
    return max(
        len(values) + 1,
        len(baseline) + 1,
        math.ceil((_z(alpha) + _z(1 - _POWER)) ** 2 / (6 * (wins - 0.5) ** 2)),
    )


def _z(tail: float) -> float:
    """What a standard normal value exceeds with that probability."""
    return NormalDist().inv_cdf(1 - tail)


def _about(repetitions: int | None, otherwise: str, of: str = "") -> str:
    """otherwise: what else would settle it."""
    if repetitions is None or repetitions > _MOST:
        return f"no reasonable number of repetitions ({_MOST} would not do)" + (
            f", but {otherwise}" if otherwise else ""
        )
    return f"about {repetitions} repetitions{of}" + (f", or {otherwise}" if otherwise else "")
