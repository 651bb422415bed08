"""Arrival processes: their statistics at a fixed seed, and that every process draws the same."""

from __future__ import annotations

import math
from itertools import islice, pairwise
from statistics import fmean, pvariance

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from batchbench.arrivals import DRAWN, PROCESSES, TAGS, Arrivals, ClosedLoop, arrival_times, on_clock, standard_gamma
from batchbench.distributions import NANO, uniforms
from batchbench.errors import ScenarioError
from tests.batchbench.test_distributions import ks_distance, ks_limit, of_another_process

ARRIVALS = TypeAdapter(Arrivals)
COUNT = 20_000

SAID = {
    "burst": {"process": "burst"},
    "bursts": {"process": "burst", "size": 3, "every": 2.5},
    "constant": {"process": "constant", "rate": 0.3},
    "poisson": {"process": "poisson", "rate": 4},
    "gamma": {"process": "gamma", "rate": 4, "burstiness": 0.25},
    "on-off": {"process": "on-off", "rate": 8, "on": 3, "off": 5},
    "ramp": {"process": "ramp", "start_rate": 2, "end_rate": 30, "over": 100},
}


def times(said, count=COUNT):
    """In seconds, or iterations, with their fractions."""
    process = ARRIVALS.validate_python(said)
    return [time / NANO for time in arrival_times(process, count, "test", "virtual")]


def gaps(moments):
    return [after - before for before, after in pairwise([0.0, *moments])]


def exponential_cdf(mean):
    return lambda t: 1 - math.exp(-t / mean)


# ---- statistics ------------------------------------------------------------------------------


def test_bursts():
    assert set(times(SAID["burst"], 10)) == {0}
    assert times(SAID["bursts"], 8) == [0, 0, 0, 2.5, 2.5, 2.5, 5, 5]


def test_a_constant_rate_does_not_drift():
    assert times(SAID["constant"], 4) == [0, pytest.approx(10 / 3), pytest.approx(20 / 3), 10]
    assert times(SAID["constant"], COUNT)[18_000] == 60_000
    process = ARRIVALS.validate_python({"process": "constant", "rate": 2})
    assert list(arrival_times(process, 5, "", "iterations")) == [0, 0, 1, 1, 2]


def test_the_gaps_of_poisson_arrivals_are_exponential_and_windows_hold_what_they_should():
    moments = times(SAID["poisson"])
    assert ks_distance(gaps(moments), exponential_cdf(1 / 4)) < ks_limit(COUNT)
    assert fmean(gaps(moments)) == pytest.approx(1 / 4, abs=4 / 4 / math.sqrt(COUNT))  # 4 standard errors
    windows = [0] * (COUNT // 40)  # of 10 seconds, without the unfinished last ones
    for time in moments:
        if time < 10 * len(windows):
            windows[int(time // 10)] += 1
    full = windows[: int(moments[-1] // 10)]
    # Counts of a Poisson process have a variance equal to their mean; its standard error is about sqrt(2 / windows).
    assert pvariance(full) / fmean(full) == pytest.approx(1, abs=4 * math.sqrt(2 / len(full)))


@pytest.mark.parametrize("burstiness", [0.05, 0.25, 0.5, 1, 2, 20])
def test_the_gaps_of_gamma_arrivals_have_a_variance_of_one_over_burstiness(burstiness):
    sample = gaps(times({"process": "gamma", "rate": 4, "burstiness": burstiness}))
    mean, variance = 1 / 4, 1 / 16 / burstiness
    assert fmean(sample) == pytest.approx(mean, abs=4 * math.sqrt(variance / COUNT))  # 4 standard errors
    error = variance * math.sqrt((2 + 6 / burstiness) / COUNT)  # of a variance; a gamma's excess kurtosis is 6 / shape
    assert pvariance(sample) == pytest.approx(variance, abs=4 * error)


@pytest.mark.parametrize(
    ("shape", "cdf"),
    [
        (0.5, lambda x: math.erf(math.sqrt(x))),
        (1, exponential_cdf(1)),
        (2, lambda x: 1 - (1 + x) * math.exp(-x)),
    ],
)
def test_gamma_numbers_have_the_distribution_where_it_is_a_formula(shape, cdf):
    draw = uniforms("gamma")
    assert ks_distance([standard_gamma(shape, draw) for _ in range(COUNT)], cdf) < ks_limit(COUNT)


def test_on_and_off_are_a_poisson_process_with_pauses():
    moments = times(SAID["on-off"])
    assert all(time % 8 <= 3 for time in moments)
    busy = [time // 8 * 3 + time % 8 for time in moments]
    assert ks_distance(gaps(busy), exponential_cdf(1 / 8)) < ks_limit(COUNT)
    # On average 8 * 3 / (3 + 5) a second; the last arrival's own standard error is 1 / sqrt(arrivals), relatively.
    assert COUNT / moments[-1] == pytest.approx(3, rel=4 / math.sqrt(COUNT))


@pytest.mark.parametrize(("start", "end"), [(2, 30), (0, 30), (30, 2), (5, 5)])
def test_a_ramp_is_a_poisson_process_once_time_runs_at_its_rate(start, end):
    moments = times({"process": "ramp", "start_rate": start, "end_rate": end, "over": 100}, 4000)

    def expected(t):
        """Arrivals up to t: the integral of the rate."""
        ramp = min(t, 100)
        return start * ramp + (end - start) * ramp**2 / 200 + end * (t - ramp)

    assert moments[-1] > 100  # past the ramp, too
    assert ks_distance(gaps([expected(t) for t in moments]), exponential_cdf(1)) < ks_limit(4000)
    early = sum(time < 50 for time in moments)
    assert early == pytest.approx(expected(50), abs=4 * math.sqrt(expected(50)))  # a Poisson count


def test_a_process_of_arrivals_per_iteration_is_the_same_one_rounded_down():
    process = ARRIVALS.validate_python(SAID["poisson"])
    per_iteration = list(arrival_times(process, 100, "test", "iterations"))
    assert per_iteration == [int(time) for time in times(SAID["poisson"], 100)]
    assert list(arrival_times(process, 100, "test", "wall")) == list(arrival_times(process, 100, "test", "virtual"))
    assert (on_clock(2 * NANO - 1, "iterations"), on_clock(5, "virtual")) == (1, 5)


# ---- determinism -----------------------------------------------------------------------------


def samples():
    """The first arrivals of every process, in nanoseconds, to be compared between processes."""
    return {
        name: list(arrival_times(ARRIVALS.validate_python(said), 200, "test", "virtual")) for name, said in SAID.items()
    }


@pytest.fixture(scope="module")
def elsewhere():
    return of_another_process(__name__)


@pytest.mark.parametrize("name", SAID)
def test_another_process_draws_the_same(name, elsewhere):
    assert elsewhere[name] == samples()[name]


def test_the_times_are_the_same_on_every_machine():
    assert samples()["poisson"][:3] == [105552610, 182649247, 528848885]
    assert samples()["gamma"][:3] == [5328800, 5333402, 6550800]


# ---- bounds ----------------------------------------------------------------------------------

RATE, TIME = st.floats(1e-3, 1e4), st.floats(1e-3, 1e4)
PROCESS = st.one_of(
    st.builds(lambda size, every: {"process": "burst", "size": size, "every": every}, st.integers(1, 50), TIME),
    st.builds(lambda rate: {"process": "constant", "rate": rate}, RATE),
    st.builds(lambda rate: {"process": "poisson", "rate": rate}, RATE),
    st.builds(
        lambda rate, burstiness: {"process": "gamma", "rate": rate, "burstiness": burstiness},
        RATE,
        st.floats(0.001, 1000),
    ),
    # No sixty arrivals of any of these come near the latest that is allowed, 1e9: here a mean gap is at most 1e6.
    st.builds(
        lambda rate, on, off: {"process": "on-off", "rate": rate, "on": on, "off": off},
        st.floats(0.1, 1e4),
        st.floats(0.1, 1e4),
        TIME,
    ),
    st.builds(
        lambda start, end, over: {"process": "ramp", "start_rate": start, "end_rate": end, "over": over},
        st.floats(0, 1e4),
        RATE,
        TIME,
    ),
)


@given(PROCESS, st.text(max_size=3), st.sampled_from(["iterations", "virtual"]))
@settings(deadline=None)
def test_arrivals_are_whole_numbers_from_0_that_never_go_back(said, key, clock):
    found = list(arrival_times(ARRIVALS.validate_python(said), 30, key, clock))
    assert len(found) == 30 and all(type(time) is int for time in found)
    assert found == sorted(found) and found[0] >= 0
    assert found == list(arrival_times(ARRIVALS.validate_python(said), 60, key, clock))[:30]  # more do not move these


# ---- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"process": "burst", "size": 3}, "size and every belong together"),
        ({"process": "burst", "every": 3}, "size and every belong together"),
        ({"process": "poisson"}, "rate"),
        ({"process": "poisson", "rate": 0}, "greater than or equal to 0.000000001"),
        ({"process": "poisson", "rate": math.inf}, "less than or equal|finite"),
        ({"process": "gamma", "rate": 1}, "burstiness"),
        ({"process": "gamma", "rate": 1, "burstiness": 0}, "greater than or equal to 0.001"),
        ({"process": "ramp", "start_rate": 1, "end_rate": 0, "over": 5}, "greater than or equal to 0.000000001"),
        ({"process": "on-off", "rate": 1, "on": 0, "off": 5}, "greater than or equal to"),
        ({"process": "closed-loop", "users": 0}, "greater than or equal to 1"),
        ({"process": "closed-loop", "users": 1, "think": {"dist": "zipf"}}, "must be a number, or a table whose dist"),
        ({"process": "bursts"}, "must be a table whose process is 'burst', 'constant'"),
        ({"rate": 3}, "must be a table whose process is 'burst', 'constant'"),
        ("poisson", "must be a table whose process is"),
    ],
)
def test_a_process_that_is_refused(said, message):
    with pytest.raises(ValidationError, match=message):
        ARRIVALS.validate_python(said)


def test_an_arrival_too_far_away_is_refused():
    process = ARRIVALS.validate_python({"process": "constant", "rate": 1e-6})
    assert next(islice(arrival_times(process, 1001, "", "virtual"), 1000, None)) == 10**18
    with pytest.raises(ScenarioError, match="an arrival at 1001000000, later than 1000000000"):
        list(arrival_times(process, 1002, "", "virtual"))


def test_every_process_has_a_name_that_messages_leave_out():
    assert {f"process {model.model_fields['process'].annotation.__args__[0]}" for model in PROCESSES} == TAGS
    assert {said["process"] for said in SAID.values()} | {"closed-loop"} == {tag.split()[1] for tag in TAGS}
    assert ClosedLoop not in DRAWN
