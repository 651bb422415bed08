"""The arithmetic of every metric, from scripted iterations and a fake clock."""

from __future__ import annotations

import math

import numpy as np
import pytest

from batchbench import Admission, Eviction, IterationOutcome, Text
from batchbench.errors import OutcomeRefused
from batchbench.timing import DEGENERATE_REPETITION, reference_timing, repetition
from tests.batchbench.scripted import it, play, request

# a runs straight through; b is evicted in iteration 1 and resumes, with 3 positions, in iteration 2.
REQUESTS = [request("a", output=3, prompt=2), request("b", output=3, prompt=2)]
SCRIPT = [
    it(2, forward_tokens=4, recomputed_tokens=0, rebuilt_tokens=0),
    it(1, forward_tokens=1, preempted=("b",), recomputed_tokens=0, rebuilt_tokens=0),
    it(2, forward_tokens=4, recomputed_tokens=3, rebuilt_tokens=2, finished=("a",)),
    it(1, forward_tokens=1, recomputed_tokens=0, rebuilt_tokens=0, finished=("b",)),
]


@pytest.fixture
def timing():
    return play(REQUESTS, SCRIPT, slots=2, step_s=[0.5, 0.25, 1.0, 0.25])


def test_counts(timing):
    assert (timing.issued_tokens, timing.collected_tokens, timing.waste_fraction) == (6, 6, 0.0)
    assert (timing.forward_tokens, timing.recomputed_tokens, timing.rebuilt_tokens) == (10, 3, 2)
    assert timing.recompute_fraction == 3 / 10
    assert timing.recompute_tax == 2 / 10
    assert timing.occupancy == 6 / (2 * 4)
    assert timing.preempted_at == {"b": (1,)}
    assert (timing.preemptions, timing.preemptions_per_request) == (1, 0.5)
    assert timing.recomputed_tokens_per_preemption == 3.0


def test_latencies(timing):
    assert timing.latencies == {"a": 3, "b": 4}
    assert timing.latencies_s == {"a": 1.75, "b": 2.0}
    assert (timing.preempted_latencies, timing.straight_through_latencies) == ((4,), (3,))
    assert (timing.preempted_latencies_s, timing.straight_through_latencies_s) == ((2.0,), (1.75,))
    assert timing.preemption_latency_penalty == 4 / 3
    assert timing.preemption_latency_penalty_s == 2.0 / 1.75
    assert timing.engine_s == timing.wall_s == 2.0


def test_latency_runs_from_arrival_not_from_the_start():
    late = play([request("a", 2), request("b", 1, arrival=1)], [it(1), it(2, finished=("a", "b"))], step_s=[4.0, 1.0])
    assert late.latencies == {"a": 2, "b": 1}
    assert late.latencies_s == {"a": 5.0, "b": 1.0}


def test_the_same_request_is_compared_across_pools(timing):
    roomy = play(REQUESTS, [it(2), it(2), it(2, finished=("a", "b"))], pool_blocks=20)
    assert timing.paired_latency_ratios(roomy) == {"a": 1.0, "b": 4 / 3}
    assert timing.paired_latency_penalty(roomy) == 4 / 3
    assert roomy.paired_latency_penalty(roomy) == 1.0
    assert reference_timing([timing, roomy], timing) is roomy
    assert reference_timing([timing], timing) is None
    larger = play(REQUESTS, [it(2), it(2), it(2, finished=("a", "b"))], pool_blocks=30)
    assert reference_timing([roomy, larger, timing], timing) is larger


def test_nobody_preempted_is_a_penalty_of_exactly_one():
    calm = play([request("a")], [it(1, finished=("a",))])
    assert calm.preemption_latency_penalty == calm.preemption_latency_penalty_s == 1.0
    assert calm.recompute_fraction == 0.0
    assert calm.thrashes == 0
    assert math.isnan(calm.recomputed_tokens_per_preemption)


def test_everybody_preempted_has_no_control_group_and_is_not_a_number():
    crowded = play([request("a", 2)], [it(1), it(0, preempted=("a",)), it(1, finished=("a",))])
    assert math.isnan(crowded.preemption_latency_penalty)
    assert math.isnan(crowded.preemption_latency_penalty_s)


def test_an_unreported_forward_is_one_position_per_row():
    timing = play([request("a", 2), request("b", 2)], [it(2), it(2, finished=("a", "b"))])
    assert timing.forward_tokens == timing.issued_tokens == 4


def test_unreported_recompute_is_zero_before_the_first_eviction_and_unknown_after():
    calm = play([request("a", 2)], [it(1), it(1, finished=("a",))])
    assert (calm.recomputed_tokens, calm.recompute_fraction) == (0, 0.0)
    evicting = play([request("a", 2)], [it(1), it(1, preempted=("a",), finished=("a",))])
    assert evicting.recomputed_tokens is evicting.rebuilt_tokens is evicting.thrashes is None
    assert math.isnan(evicting.recompute_fraction)
    assert math.isnan(evicting.recompute_tax)
    assert evicting.padded_tokens is None


def test_an_engine_that_cannot_report_evictions_gets_no_figure_about_them():
    timing = play([request("a", 2)], [it(1, preempted=None), it(1, preempted=None, finished=("a",))])
    assert timing.preemptions is timing.thrashes is timing.requests_preempted is timing.recomputed_tokens is None
    for figure in (
        timing.preemptions_per_request,
        timing.preemption_latency_penalty,
        timing.preemption_latency_penalty_s,
        timing.paired_latency_penalty(timing),
        timing.recompute_fraction,
    ):
        assert math.isnan(figure)
    assert reference_timing([timing], timing) is None


def test_thrashes_are_counted_where_they_are_reported():
    ledger = (Eviction("b", thrash=True),)
    script = [it(2), it(1, preempted=("b",), evictions=ledger), it(2, finished=("a", "b"))]
    assert play([request("a", 3), request("b", 2)], script).thrashes == 1


def test_rows_that_nobody_kept_are_waste():
    wasteful = play([request("a", 2)], [it(2, collected=1), it(2, collected=1, finished=("a",))])
    assert wasteful.waste_fraction == 0.5


def test_occupancy_leaves_out_iterations_that_forwarded_nothing():
    timing = play([request("a", 2)], [it(1), it(0), it(1, finished=("a",))], slots=1)
    assert timing.occupancy == 1.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"issued_tokens": 1, "collected_tokens": 2}, "2 tokens collected from 1 rows"),
        ({"forward_tokens": 5, "recomputed_tokens": 6}, "6 positions recomputed of 5 forwarded"),
        ({"forward_tokens": 5, "rebuilt_tokens": 6}, "6 positions rebuilt of 5 forwarded$"),
        ({"recomputed_tokens": 3}, r"3 positions recomputed of 2 forwarded \(one a row, for forward_tokens is not"),
        ({"forward_tokens": 5, "recomputed_tokens": 3, "rebuilt_tokens": 4}, "4 positions rebuilt, of 3 recomputed"),
        ({"waiting": 1.5}, "waiting is 1.5, which is no whole number"),
        ({"issued_tokens": 2.0}, "issued_tokens is 2.0, which is no whole number"),
        ({"running": True}, "running is True, which is no whole number"),
        ({"free_blocks": "3"}, "free_blocks is '3', which is no whole number"),
        ({"forward_tokens": 1}, "2 rows forwarded, but only 1 positions"),
        ({"collected_tokens": -1}, "collected_tokens is -1"),
        ({"recomputed_tokens": -1}, "recomputed_tokens is -1"),
        ({"free_blocks": -3}, "free_blocks is -3"),
        ({"rebuilt_tokens": -3}, "rebuilt_tokens is -3"),
        ({"prefill_rows": 3}, "3 rows prefilled of 2 forwarded"),
        ({"collected_tokens": 1, "finished": ("a", "b")}, "2 requests finished on 1 tokens collected"),
        ({"preempted": ("a", "a")}, "a request is evicted twice in one iteration"),
        (
            {"preempted": ("a", "b"), "evictions": (Eviction("b"), Eviction("a"))},
            r"the ledger evicts \('b', 'a'\), not \('a', 'b'\)",
        ),
        ({"preempted": ("a",), "evictions": ()}, r"the ledger evicts \(\), not \('a',\)"),
    ],
)
def test_an_impossible_iteration_is_refused(fields, message):
    with pytest.raises(OutcomeRefused, match=message):
        IterationOutcome(**({"issued_tokens": 2, "collected_tokens": 2} | fields))


def test_whole_numbers_of_other_libraries_are_whole_numbers():
    assert IterationOutcome(np.int64(2), np.int32(2), running=np.uint8(1)).positions == 2


@pytest.mark.parametrize("fields", [{"preempted": ("b",)}, {"finished": ("b",)}, {"admissions": (Admission("b"),)}])
def test_nothing_happens_to_a_request_before_it_arrives(fields):
    with pytest.raises(OutcomeRefused, match="iteration 0: 'b' is ahead of its arrival"):
        play([request("a", 2), request("b", arrival=3)], [it(1, **fields)])


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([it(1, finished=("a",)), it(0, preempted=("a",))], "iteration 1: 'a' is evicted after it finished"),
        ([it(1, finished=("a",)), it(1, finished=("a",))], "iteration 1: 'a' finishes twice"),
        ([it(2, finished=("a", "a"))], "iteration 0: 'a' finishes twice"),
        ([it(1, finished=("x",))], "iteration 0: 'x' was never submitted"),
        ([it(1, admissions=(Admission("x"),))], "iteration 0: 'x' was never submitted"),
        (
            [it(1, admissions=(Admission("a"),)), it(1, admissions=(Admission("a"),))],
            "'a' is admitted, but was running",
        ),
        ([it(1, admissions=(), preempted=("a",))], "iteration 0: 'a' is evicted, but was not running"),
        (
            [it(1, admissions=()), it(1, admissions=(), finished=("a",))],
            "iteration 1: 'a' finishes, but was not running",
        ),
        ([it(1, preempted=("x",)), it(1, finished=("a",))], "iteration 0: 'x' was never submitted"),
    ],
)
def test_an_impossible_sequence_is_refused(script, message):
    with pytest.raises(OutcomeRefused, match=message):
        play([request("a")], script)


# ---- texts that run in circles ---------------------------------------------------------------


def with_distinct(distinct, length=64):
    """A text of that many different tokens that ends in a loop of its last four."""
    return (tuple(range(distinct)) + tuple(range(distinct - 4, distinct)) * length)[:length]


def test_repetition_is_one_minus_distinct_over_length_up_to_64_tokens():
    assert repetition((7,)) == 0.0
    assert repetition((7, 7, 8, 7)) == 0.5
    assert repetition(tuple(range(64))) == 0.0
    for distinct in (4, 19, 51, 64):
        assert repetition(with_distinct(distinct)) == 1 - distinct / 64


def test_repetition_looks_back_64_tokens_and_no_further():
    assert repetition((*range(64), 0)) == 1 / 65
    assert repetition((*range(65), 0)) == 0.0
    assert repetition(tuple(range(65)) * 10) == 0.0
    assert repetition(tuple(range(64)) * 10) == 0.9


def texts_of(*token_ids):
    """The repetition of a run with these texts."""
    requests = [request(f"r{n}", len(ids)) for n, ids in enumerate(token_ids)]
    texts = {r.request_id: Text(ids) for r, ids in zip(requests, token_ids, strict=True)}
    steps = max(len(ids) for ids in token_ids)
    script = [
        it(
            sum(len(ids) > step for ids in token_ids),
            finished=tuple(f"r{n}" for n, ids in enumerate(token_ids) if len(ids) == step + 1),
        )
        for step in range(steps)
    ]
    return play(requests, script, texts=texts).text_repetition


@pytest.mark.parametrize("loop", [1, 4, 5])
@pytest.mark.parametrize("length", [32, 64, 500])
def test_loops_are_degenerate_at_every_length(loop, length):
    assert texts_of(tuple(range(loop)) * length) > DEGENERATE_REPETITION
    assert texts_of((tuple(range(loop)) * length)[:length]) > DEGENERATE_REPETITION


@pytest.mark.parametrize("distinct", [19, 35, 51])
def test_natural_texts_are_not_degenerate(distinct):
    assert texts_of(with_distinct(distinct)) < DEGENERATE_REPETITION


def test_the_median_text_decides_and_short_texts_have_no_say():
    loop, fine = (1, 2, 3, 4) * 16, tuple(range(64))
    assert texts_of(loop, loop, fine) == 1 - 4 / 64
    assert texts_of(loop, fine, fine) == 0.0
    assert texts_of(loop, fine) == (1 - 4 / 64) / 2
    assert texts_of((1,) * 31) is None
    assert texts_of((1,) * 31, (2,) * 31, fine) == 0.0
