"""Bootstrap intervals of a median: symmetric, the same everywhere, and covering as often as the docs say."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchbench.intervals import Interval, _middles, attainable, median_interval

TIMES = st.lists(st.floats(-1e9, 1e9), min_size=2, max_size=12)


def test_one_value_has_no_interval():
    assert median_interval([3.5]) == Interval(1, 3.5, None, None, None)


@pytest.mark.parametrize(
    ("n", "level"), [(2, 0.5), (3, 0.75), (4, 0.875), (5, 0.9375), (6, 0.95), (7, 0.95), (100, 0.95)]
)
def test_few_values_do_not_reach_the_level(n, level):
    assert attainable(n) == median_interval(range(n)).level == level


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_below_six_values_the_interval_is_their_whole_range(n):
    found = median_interval([10.0 * value for value in range(n)])
    assert (found.low, found.high) == (0.0, 10.0 * (n - 1))


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf, 1.0]])
def test_no_median_of_nothing_or_of_what_is_no_number(values):
    with pytest.raises(ValueError, match="no median of"):
        median_interval(values)


@pytest.mark.parametrize("n", [2, 3, 7, 10])
@pytest.mark.parametrize("value", [0.1, -7.0, 1e300, 1e-300])
def test_constant_values_have_an_interval_of_no_width(n, value):
    assert median_interval([value] * n) == Interval(n, value, value, value, attainable(n))


def test_ties_are_values_like_others():
    assert median_interval([1.0] * 9 + [5.0]) == Interval(10, 1.0, 1.0, 1.0, 0.95)
    assert median_interval([1.0, 1.0, 5.0]) == Interval(3, 1.0, 1.0, 5.0, 0.75)


@given(TIMES)
def test_the_interval_holds_the_median_lies_in_the_range_and_knows_no_order(values):
    found = median_interval(values)
    assert math.isclose(found.median, median(values), rel_tol=1e-12, abs_tol=1e-300)
    assert min(values) <= found.low <= found.median <= found.high <= max(values)
    assert median_interval(values[::-1]) == median_interval(sorted(values)) == found


@pytest.mark.parametrize("n", range(2, 25))
def test_low_and_high_are_equally_far_from_the_median(n):
    found = median_interval(range(n))
    assert found.low + found.high == n - 1


def test_resamples_are_the_same_on_every_machine():
    """What the seed gives, written down: another machine, or another Python, must give it too."""
    lower, upper = _middles(6)
    assert list(zip(lower[:4].tolist(), upper[:4].tolist(), strict=True)) == [(3, 4), (4, 4), (3, 3), (3, 4)]
    assert (int(lower.sum()), int(upper.sum())) == (20_704, 29_296)
    spread = median_interval([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0])
    assert (spread.median, spread.low, spread.high) == (12.0, 2.0, 64.0)


def test_a_resample_takes_each_value_equally_often():
    """The middle of three is the first with probability 7/27, the second with 13/27."""
    lower, upper = _middles(3)
    assert (lower == upper).all()
    shares = [(lower == place).mean() for place in range(3)]
    assert shares[0] == shares[2] == pytest.approx(7 / 27, abs=0.01)


DRAWS = {
    "normal": (lambda draw: draw.gauss(0, 1), 0.0),
    "exponential": (lambda draw: draw.expovariate(1), math.log(2)),
    "lognormal": (lambda draw: math.exp(draw.gauss(0, 1)), 1.0),
}


def covered(name, n, times=1000):
    """How often the interval of n values covers the median of what they are drawn from."""
    (one, true), draw = DRAWS[name], random.Random(n)
    found = (median_interval([one(draw) for _ in range(n)]) for _ in range(times))
    return sum(interval.low <= true <= interval.high for interval in found) / times


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("n", [2, 3, 5])
def test_few_values_cover_as_often_as_the_level_says(name, n):
    assert covered(name, n) == pytest.approx(attainable(n), abs=0.045)  # 3 standard errors of 1000 draws at the worst


def test_coverage_is_what_the_metrics_page_says():
    page = Path("docs/metrics.md").read_text()
    (row,) = re.findall(r"^\| covers \|(.*)\|$", page, re.MULTILINE)
    (heads,) = re.findall(r"^\| repetitions \|(.*)\|$", page, re.MULTILINE)
    said = {int(n): int(share.strip(" %")) / 100 for n, share in zip(heads.split("|"), row.split("|"), strict=True)}
    assert {2, 3, 5, 7, 10, 20} <= set(said)
    for n, share in said.items():
        assert covered("lognormal", n) == pytest.approx(share, abs=0.035 if n > 5 else 0.05), n
