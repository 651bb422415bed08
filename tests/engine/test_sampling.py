"""Sampling: the distribution it draws from, and tokens that do not depend on company."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.sampler import sample
from engine.sampling import Sampling
from tests.helpers import DTYPES, KERNELS, drain, prompt, real_engine

LOGITS = np.array([0.0, 3.0, 1.0, 3.0, 2.0, -1.0], dtype=np.float32)


def kept(how, logits=LOGITS):
    """Every token that some number in [0, 1) draws, with the measure of the numbers that draw it."""
    draws = [sample(logits, how, n / 4000) for n in range(4000)]
    return {token: draws.count(token) / 4000 for token in sorted(set(draws))}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_softmax(temperature):
    want = np.exp(LOGITS.astype(float) / temperature)
    want /= want.sum()
    for token, share in kept(Sampling(temperature)).items():
        assert abs(share - want[token]) <= 1.5 / 4000  # a share of 4000 evenly spaced numbers ends within one of them


def test_top_k_keeps_the_best_and_among_equals_the_lowest_id():
    assert set(kept(Sampling(1.0, top_k=1))) == {1}
    assert set(kept(Sampling(1.0, top_k=2))) == {1, 3}
    assert set(kept(Sampling(1.0, top_k=3))) == {1, 3, 4}
    assert set(kept(Sampling(9.0, top_k=100))) == set(range(6))


def test_top_p_keeps_the_fewest_that_reach_it():
    assert set(kept(Sampling(1.0, top_p=0.30))) == {1}
    assert set(kept(Sampling(1.0, top_p=0.60))) == {1, 3}
    assert set(kept(Sampling(1.0, top_p=0.83))) == {1, 3, 4}
    assert set(kept(Sampling(1.0, top_p=1e-9))) == {1}


def test_top_p_is_of_what_top_k_left():
    # of tokens 1, 3 and 4 alone, 1 and 3 have 84 %
    assert set(kept(Sampling(1.0, top_k=3, top_p=0.83))) == {1, 3}
    # top_k of the whole vocabulary leaves everything: two equal ones, with a little beside them, are both needed
    assert set(kept(Sampling(0.25, top_k=3, top_p=0.5), np.array([0, 1, 1], dtype=np.float32))) == {1, 2}


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.integers(-8, 8), min_size=2, max_size=60),
    temperature=st.sampled_from([0.25, 1.0, 3.0]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_the_short_cut_draws_what_a_plain_sort_draws(logits, temperature, top_k, top_p, uniform):
    """Whole vocabulary sorted, cut by k, cut by p, summed: written out without any candidate filter."""
    values = np.array(logits, dtype=np.float32)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: top_k or None]
    weights = [np.exp((float(values[i]) - max(logits)) / temperature) for i in order]
    sums = np.cumsum(weights)
    total = sums[-1] if top_k else np.exp((values.astype(float) - max(logits)) / temperature).sum()
    if top_p < 1:
        sums = sums[: next(n for n, s in enumerate(sums) if s >= top_p * total or n == len(sums) - 1) + 1]
    want = order[next(n for n, s in enumerate(sums) if s > uniform * sums[-1] or n == len(sums) - 1)]
    assert sample(values, Sampling(temperature, top_k, top_p), uniform) == want


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sampled_texts_do_not_depend_on_batch_slot_or_eviction(kernels, dtype):
    how = Sampling(temperature=1.5, top_k=50, top_p=0.95, seed=7)

    def run(names, slots, pool_blocks):
        engine = real_engine(slots, pool_blocks, dtype=dtype, kernels=kernels)
        for n in names:
            engine.submit(f"r{n}", prompt(n, 5), 24, how)
        drain(engine)
        return {n: engine.take(f"r{n}").token_ids for n in names}, engine.recomputed_tokens

    roomy, none = run(range(6), 6, 48)
    tight, some = run([5, 4, 3, 2, 1, 0], 6, 12)
    assert none == 0 < some
    assert tight == roomy
    for n in range(6):
        assert run([n], 1, 8)[0] == {n: roomy[n]}
    greedy = real_engine(1, 8, dtype=dtype, kernels=kernels)
    greedy.submit("r0", prompt(0, 5), 24)
    drain(greedy)
    assert greedy.take("r0").token_ids != roomy[0]


def test_randomness_follows_seed_request_and_position():
    how = Sampling(1.0, seed=3)
    draws = {how.uniform(name, position) for name in ("a", "b") for position in range(50)}
    assert len(draws) == 100 and all(0 <= draw < 1 for draw in draws)
    assert how.uniform("a", 1) != Sampling(1.0, seed=4).uniform("a", 1)
    assert how.uniform("a", 1) == 0.1003628541988113  # the same on every machine and in every release
    assert abs(sum(how.uniform("mean", n) for n in range(10_000)) / 10_000 - 0.5) < 0.01  # 3.5 standard errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0, must be a number of at least 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0, must be above 0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Sampling(**options)


def test_next_to_no_temperature_is_greedy_and_says_nothing(recwarn):
    logits = np.array([0.5, 3.0, 2.999], dtype=np.float32)
    assert {sample(logits, Sampling(temperature=1e-320), uniform) for uniform in (0.0, 0.5, 0.999)} == {1}
    assert not recwarn.list
