"""Lengths and delays by distribution: their statistics at a fixed seed, their bounds, and what is refused."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from statistics import NormalDist, fmean, pvariance

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from batchbench.distributions import (
    DELAYS,
    LENGTHS,
    NANO,
    TAGS,
    Delay,
    Length,
    correlated,
    delay_quantile,
    length_quantile,
    uniforms,
)
from batchbench.errors import ScenarioError
from batchbench.length_files import read_columns

DRAWS = 20_000
STANDARD = NormalDist()
LENGTH, DELAY = TypeAdapter(Length), TypeAdapter(Delay)


def ln_phi(mean, sigma):
    """CDF of a lognormal, from its own mean."""
    return lambda x: STANDARD.cdf((math.log(x) - math.log(mean) + sigma**2 / 2) / sigma) if x > 0 else 0.0


def rounded(cdf, least, greatest):
    """P(n) of a continuous distribution whose values are rounded and kept only if they are in least..greatest."""
    share = cdf(greatest + 0.5) - cdf(least - 0.5)
    return {n: (cdf(n + 0.5) - cdf(n - 0.5)) / share for n in range(least, greatest + 1)}


def zipf(alpha, least, greatest):
    total = sum(n**-alpha for n in range(least, greatest + 1))
    return {n: n**-alpha / total for n in range(least, greatest + 1)}


LAWS = {  # what a scenario says, and P(n)
    "uniform": ({"dist": "uniform", "min": 10, "max": 29}, dict.fromkeys(range(10, 30), 1 / 20)),
    "normal": ({"dist": "normal", "mean": 100, "std": 20}, rounded(NormalDist(100, 20).cdf, 1, 400)),
    "normal, cut": (
        {"dist": "normal", "mean": 100, "std": 40, "min": 90, "max": 130},
        rounded(NormalDist(100, 40).cdf, 90, 130),
    ),
    "lognormal": ({"dist": "lognormal", "mean": 100, "sigma": 0.5}, rounded(ln_phi(100, 0.5), 1, 5000)),
    "lognormal, cut": (
        {"dist": "lognormal", "mean": 1000, "sigma": 1.0, "min": 50, "max": 1500},
        rounded(ln_phi(1000, 1.0), 50, 1500),
    ),
    "zipf": ({"dist": "zipf", "alpha": 1.2, "max": 1000}, zipf(1.2, 1, 1000)),
    "zipf, from 5": ({"dist": "zipf", "alpha": 0.7, "min": 5, "max": 50}, zipf(0.7, 5, 50)),
}


def drawn(said, draws=DRAWS, key="test"):
    draw, at = uniforms(key), length_quantile(LENGTH.validate_python(said))
    return [at(draw()) for _ in range(draws)]


def delays(said, draws=DRAWS):
    draw, at = uniforms("test"), delay_quantile(DELAY.validate_python(said))
    return [at(draw()) for _ in range(draws)]


def ks_distance(sample, cdf):
    """Kolmogorov and Smirnov's: the greatest distance of a sample's distribution function from cdf, at its points."""
    counts, below, distance = Counter(sample), 0, 0.0
    for value in sorted(counts):
        below += counts[value]
        distance = max(distance, abs(below / len(sample) - cdf(value)))
    return distance


def ks_limit(draws):
    """Passed by 1 seed of 1000 (of a continuous distribution; by fewer of a discrete one)."""
    return 1.95 / math.sqrt(draws)


# ---- statistics ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAWS)
def test_lengths_have_the_moments_and_the_distribution_that_their_formula_says(name):
    said, law = LAWS[name]
    sample = drawn(said)
    assert set(sample) <= set(law)
    mean = sum(n * p for n, p in law.items())
    moments = [sum((n - mean) ** k * p for n, p in law.items()) for k in (2, 4)]
    # 4 standard errors: of a mean sqrt(variance / draws), of a variance sqrt((fourth moment - variance^2) / draws)
    assert fmean(sample) == pytest.approx(mean, abs=4 * math.sqrt(moments[0] / DRAWS))
    spread = 4 * math.sqrt((moments[1] - moments[0] ** 2) / DRAWS)
    assert pvariance(sample) == pytest.approx(moments[0], abs=spread)
    cumulative, below = {}, 0.0
    for n in sorted(law):
        cumulative[n] = below = below + law[n]
    assert ks_distance(sample, cumulative.__getitem__) < ks_limit(DRAWS)


@pytest.mark.parametrize("name", ["normal, cut", "lognormal, cut", "zipf, from 5"])
def test_nothing_piles_up_at_a_bound(name):
    said, law = LAWS[name]
    counts = Counter(drawn(said))
    for bound in (said["min"], said["max"]):
        error = math.sqrt(law[bound] * (1 - law[bound]) / DRAWS)  # of a share, one standard error
        assert counts[bound] / DRAWS == pytest.approx(law[bound], abs=4 * error)


def test_the_mean_of_a_lognormal_is_the_lengths_own_and_its_median_follows():
    sample = sorted(drawn({"dist": "lognormal", "mean": 1000, "sigma": 0.8}))
    deviation = 1000 * math.sqrt(math.exp(0.8**2) - 1)
    assert fmean(sample) == pytest.approx(1000, abs=4 * deviation / math.sqrt(DRAWS))  # 4 standard errors
    median = 1000 * math.exp(-(0.8**2) / 2)
    error = 0.8 * median * math.sqrt(math.pi / 2 / DRAWS)  # of a median 1 / (2 density sqrt(draws))
    assert sample[DRAWS // 2] == pytest.approx(median, abs=4 * error)


def test_a_fixed_length_is_what_it_says():
    assert set(drawn(7, 10)) == set(drawn({"dist": "fixed", "value": 7}, 10)) == {7}


@pytest.mark.parametrize(
    ("said", "cdf", "mean", "deviation"),
    [
        ({"dist": "uniform", "min": 1, "max": 4}, lambda t: (t - 1) / 3, 2.5, 3 / math.sqrt(12)),
        ({"dist": "exponential", "mean": 2.5}, lambda t: 1 - math.exp(-t / 2.5), 2.5, 2.5),
        ({"dist": "lognormal", "mean": 3, "sigma": 0.5}, ln_phi(3, 0.5), 3, 3 * math.sqrt(math.exp(0.25) - 1)),
        (
            {"dist": "lognormal", "mean": 3, "sigma": 0.5, "max": 2.5},
            lambda t: ln_phi(3, 0.5)(t) / ln_phi(3, 0.5)(2.5),
            None,
            None,
        ),
    ],
    ids=["uniform", "exponential", "lognormal", "lognormal, cut"],
)
def test_delays_have_the_mean_and_the_distribution_that_their_formula_says(said, cdf, mean, deviation):
    sample = [delay / NANO for delay in delays(said)]
    assert ks_distance(sample, cdf) < ks_limit(DRAWS)
    assert max(sample) <= said.get("max", math.inf)
    if mean is not None:
        assert fmean(sample) == pytest.approx(mean, abs=4 * deviation / math.sqrt(DRAWS))  # 4 standard errors


def test_a_delay_that_is_a_number_is_itself_in_billionths():
    assert set(delays(1.5, 10)) == {1_500_000_000} and set(delays(0, 10)) == {0}


# ---- two lengths together --------------------------------------------------------------------


def ranks(values):
    order = sorted(range(len(values)), key=values.__getitem__)
    placed = [0] * len(values)
    for rank, index in enumerate(order):
        placed[index] = rank
    return placed


def pairs(rank_correlation):
    draw = uniforms("pairs")
    firsts = [draw() for _ in range(DRAWS)]
    return firsts, [correlated(first, draw(), rank_correlation) for first in firsts]


@pytest.mark.parametrize("rank_correlation", [-0.9, -0.3, 0.0, 0.5, 0.95])
def test_the_rank_correlation_is_what_was_asked_and_the_second_stays_uniform(rank_correlation):
    firsts, seconds = pairs(rank_correlation)
    n, squares = DRAWS, sum((a - b) ** 2 for a, b in zip(ranks(firsts), ranks(seconds), strict=True))
    spearman = 1 - 6 * squares / (n * (n * n - 1))
    assert spearman == pytest.approx(rank_correlation, abs=4 / math.sqrt(n))  # its standard error is at most 1/sqrt(n)
    assert ks_distance(seconds, lambda u: u) < ks_limit(DRAWS)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_correlation_of_one_is_the_same_order_or_the_opposite(sign):
    firsts, seconds = pairs(sign)
    assert ranks(firsts) == ranks([sign * u for u in seconds])
    assert all(math.isclose(b, a if sign > 0 else 1 - a, abs_tol=1e-6) for a, b in zip(firsts, seconds, strict=True))


# ---- determinism -----------------------------------------------------------------------------


def samples():
    """A few draws of every distribution, to be compared between processes."""
    found = {name: drawn(said, 200) for name, (said, _) in LAWS.items()}
    found |= {f"{said['dist']} delay": delays(said, 200) for said in DELAYS_SAID}
    return found | {"correlated": [round(u * NANO) for u in pairs(0.5)[1][:200]]}


DELAYS_SAID = (
    {"dist": "uniform", "min": 1, "max": 4},
    {"dist": "exponential", "mean": 2.5},
    {"dist": "lognormal", "mean": 3, "sigma": 0.5},
)


def of_another_process(module):
    """What `samples` of a test module gives in a process of its own, whose strings hash differently."""
    code = f"import json; from {module} import samples; print(json.dumps(samples()))"
    ran = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": "7"}, check=True, capture_output=True
    )
    return json.loads(ran.stdout)


@pytest.fixture(scope="module")
def elsewhere():
    return of_another_process(__name__)


@pytest.mark.parametrize("name", samples())
def test_another_process_draws_the_same(name, elsewhere):
    assert elsewhere[name] == samples()[name]


def test_the_numbers_are_the_same_on_every_machine():
    assert drawn(LAWS["lognormal"][0], 8) == [108, 121, 63, 126, 57, 37, 191, 77]
    assert drawn(LAWS["zipf"][0], 8) == [20, 39, 2, 49, 1, 1, 382, 3]
    assert drawn(LAWS["lognormal"][0], 3, key="other") != drawn(LAWS["lognormal"][0], 3)


# ---- bounds ----------------------------------------------------------------------------------

QUANTILES = st.floats(2.0**-54, 1 - 2.0**-53)
RANGES = st.tuples(st.integers(1, 10_000), st.integers(1, 10_000)).map(sorted)


def table(dist, **fields):
    return st.builds(
        lambda bounds, rest: {"dist": dist, "min": bounds[0], "max": bounds[1], **rest},
        RANGES,
        st.fixed_dictionaries(fields),
    )


POSITIVE = st.floats(0.5, 20_000)
TABLES = st.one_of(
    table("uniform"),
    table("normal", mean=POSITIVE, std=POSITIVE),
    table("lognormal", mean=POSITIVE, sigma=st.floats(0.01, 5)),
    table("zipf", alpha=st.floats(0.01, 9)),
)


def accepted(said):
    """The length, or None if its range holds too little of it: the only reason to refuse one of TABLES."""
    try:
        return LENGTH.validate_python(said)
    except ValidationError as error:
        if "of the distribution lies in" in str(error):
            return None
        raise


@given(TABLES.map(accepted).filter(bool), QUANTILES, QUANTILES)
@settings(deadline=None)
def test_every_length_is_in_its_range_and_grows_with_its_quantile(length, one, other):
    at = length_quantile(length)
    low, high = at(min(one, other)), at(max(one, other))
    assert length.min <= low <= high <= length.max


@given(st.floats(0, 1e7), st.floats(1e-6, 1e7), st.floats(0.01, 10), QUANTILES)
@settings(deadline=None)
def test_no_delay_is_negative_or_above_its_maximum(least, size, sigma, u):
    if least <= size:
        uniform = DELAY.validate_python({"dist": "uniform", "min": least, "max": size})
        assert least * NANO - 1 <= delay_quantile(uniform)(u) <= size * NANO + 1
    assert delay_quantile(DELAY.validate_python({"dist": "exponential", "mean": size}))(u) >= 0
    if size * 3 <= 1e7:
        lognormal = DELAY.validate_python({"dist": "lognormal", "mean": size, "sigma": sigma, "max": size * 3})
        assert 0 <= delay_quantile(lognormal)(u) <= size * 3 * NANO * (1 + 1e-9)  # exp rounds


# ---- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"dist": "uniform", "min": 5, "max": 4}, "min = 5 is above max = 4"),
        ({"dist": "uniform", "min": 5}, "max"),
        ({"dist": "normal", "mean": 5, "std": 1, "min": 50}, "only 0 of the distribution lies in min = 50..max"),
        (
            {"dist": "lognormal", "mean": 1000, "sigma": 0.1, "max": 700},
            "only .* of the distribution lies in min = 1",
        ),
        ({"dist": "normal", "mean": 5, "std": 0}, "std"),
        ({"dist": "lognormal", "mean": 5, "sigma": math.nan}, "sigma"),
        ({"dist": "zipf", "alpha": 1}, "max"),
        ({"dist": "zipf", "alpha": 1, "max": 10**7}, "max"),
        ({"dist": "fixed", "value": 0}, "value"),
        ({"dist": "poisson", "mean": 5}, "must be an integer, or a table whose dist is 'fixed', 'uniform'"),
        ({"mean": 5}, "must be an integer, or a table whose dist is"),
        (2.5, "integer"),
    ],
)
def test_a_length_that_is_refused(said, message):
    with pytest.raises(ValidationError, match=message):
        LENGTH.validate_python(said)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (-1, "greater than or equal to 0"),
        (math.inf, "finite"),
        ({"dist": "uniform", "min": 5, "max": 4}, "min = 5.0 is above max = 4.0"),
        ({"dist": "lognormal", "mean": 5, "sigma": 0.1, "max": 1}, "only .* of the distribution lies in 0..max = 1.0"),
        ({"dist": "zipf", "alpha": 1, "max": 5}, "must be a number, or a table whose dist is 'uniform', 'exponential'"),
    ],
)
def test_a_delay_that_is_refused(said, message):
    with pytest.raises(ValidationError, match=message):
        DELAY.validate_python(said)


def test_every_distribution_has_a_name_that_messages_leave_out():
    named = {f"dist {model.model_fields['dist'].annotation.__args__[0]}" for model in (*LENGTHS, *DELAYS)}
    assert named | {"a number"} == TAGS


# ---- files -----------------------------------------------------------------------------------


def test_a_file_of_lengths_is_drawn_with_the_frequencies_it_has(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("\ufeffprompt, output\n10, 1\r\n# a note\n20, 1\n\n20, 3\n40, 4\n")
    assert [list(column) for column in read_columns(str(path), 2)] == [[10, 20, 20, 40], [1, 1, 3, 4]]
    counts = Counter(drawn({"dist": "empirical", "file": str(path)}))
    error = math.sqrt(0.25 * 0.75 / DRAWS)  # of a share of a quarter, one standard error
    assert counts[10] / DRAWS == pytest.approx(0.25, abs=4 * error)
    assert counts[20] / DRAWS == pytest.approx(0.5, abs=4 * error * 2 / math.sqrt(3))
    assert set(counts) == {10, 20, 40}
    assert set(drawn({"dist": "empirical", "file": str(path), "column": 2, "min": 3}, 100)) == {3, 4}


def test_columns_may_be_apart_by_space_and_there_may_be_one(tmp_path):
    (tmp_path / "x.txt").write_text("3\t4\n 5   6\n")
    (tmp_path / "y.txt").write_text("3\n5\n")
    assert [list(column) for column in read_columns(str(tmp_path / "x.txt"), 2)] == [[3, 5], [4, 6]]
    assert [list(column) for column in read_columns(str(tmp_path / "y.txt"), 1)] == [[3, 5]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "there is no length in 1..10000000 in it"),
        (b"prompt,output\n", "there is no length in 1..10000000 in it"),
        (b"3\n", "line 1: 1 columns, not 2"),
        (b"3 4\n5\n", "line 2: 1 columns, not 2"),
        (b"3 4 5\n", "line 1: 3 columns, not 2"),
        (b"3 4\n5 x\n", "line 2: 'x' is no whole number from 1 to 10000000"),
        (b"3 4\n\n5 0\n", "line 3: '0' is no whole number"),
        (b"3 4\n5 -1\n", "line 2: '-1' is no whole number"),
        (b"3 4\n5 1.5\n", "line 2: '1.5' is no whole number"),
        (b"3 4\n5 " + b"9" * 9000, "line 2: '9{40}' is no whole number"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_a_bad_file_of_lengths_is_one_line(tmp_path, content, message):
    (tmp_path / "x.csv").write_bytes(content)
    with pytest.raises(ScenarioError, match=message) as caught:
        read_columns(str(tmp_path / "x.csv"), 2)
    assert str(caught.value).startswith(f"{tmp_path}/x.csv: ") and "\n" not in str(caught.value)


def test_files_that_are_not_there_or_too_large(tmp_path, monkeypatch):
    with pytest.raises(ScenarioError, match=r"nope\.csv: No such file"):
        read_columns(str(tmp_path / "nope.csv"), 2)
    monkeypatch.setattr("batchbench.length_files._MAX_BYTES", 3)
    (tmp_path / "x.csv").write_text("1 2\n")
    with pytest.raises(ScenarioError, match="more than 3 bytes"):
        read_columns(str(tmp_path / "x.csv"), 2)
