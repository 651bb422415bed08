"""Every figure that a caller sees of a run, against values worked out by hand from scripts."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from batchbench import Admission
from batchbench.adapters.fake import ScriptedEngine
from batchbench.clocks import NS, IterationCost
from batchbench.driver import Pacing
from batchbench.service import PERCENTILES, Service, Slo, percentiles
from tests.batchbench.scripted import it, play, request, tables_of

# What happens, iteration by iteration. `a` gets a token in 0, 1, 2, loses its turn in 3, and gets its last in 4.
# `b` computes half its prompt in 0, gets a token in 1, is evicted in 2, comes back in 4, is evicted again in 5 before
# it gets a token, comes back in 6, gets tokens in 7 and 8, loses its turn in 9, and gets its last in 10.
# `c` arrives in 2, is admitted in 3, and gets its only token there.
REQUESTS = [request("a", 4, 2), request("b", 4, 2), request("c", 1, 2, arrival=2)]
# They end at 0.5, 0.75, 1.75, 1.875, 3.875, 4.125, 4.625, 5.625, 5.875, 6.375 and 7.375.
STEP_S = [0.5, 0.25, 1.0, 0.125, 2.0, 0.25, 0.5, 1.0, 0.25, 0.5, 1.0]


def told(issued, collected, admitted=(), **fields):
    """An outcome of an engine that says whose tokens come."""
    said = {"began": (), "paused": (), "admissions": tuple(Admission(name) for name in admitted)}
    return it(issued, collected, **said | fields)


SCRIPT = [
    told(2, 1, "ab", began=("a",)),
    told(2, 2, began=("b",)),
    told(1, 1, preempted=("b",)),
    told(1, 1, "c", began=("c",), paused=("a",), finished=("c",)),
    told(2, 1, "b", began=("a",), finished=("a",)),
    told(0, 0, preempted=("b",)),
    told(1, 0, "b"),
    told(1, 1, began=("b",)),
    told(1, 1),
    told(0, 0, paused=("b",)),
    told(1, 1, began=("b",), finished=("b",)),
]
# The same requests with room for all: nobody waits, nobody is evicted, nobody loses a turn.
ROOMY = [
    told(2, 1, "ab", began=("a",)),
    told(2, 2, began=("b",)),
    told(3, 3, "c", began=("c",), finished=("c",)),
    told(2, 2, finished=("a",)),
    told(1, 1, finished=("b",)),
]
ARRIVED_S = [0.0, 0.0, 0.75]


@pytest.fixture
def service():
    return Service(play(REQUESTS, SCRIPT, step_s=STEP_S))


def seconds(parts_ns):
    return [value / NS for value in parts_ns.tolist()]


def row_of(rows, metric, unit):
    (row,) = [row for row in rows if (row["metric"], row["unit"]) == (metric, unit)]
    return [row[name] for name in ("count", "mean", "p50", "p90", "p95", "p99", "max")]


# ---- each figure ----------------------------------------------------------------------------------


def test_time_to_the_first_token_and_no_eviction_or_resume_restarts_it(service):
    assert service.ttft.tolist() == [1, 2, 2]
    assert service.ttft_s.tolist() == [0.5, 0.75, 1.125]


def test_a_victim_without_a_token_waits_for_its_first_through_eviction_and_resume():
    script = [
        told(1, 0, "a"),
        told(0, 0, preempted=("a",)),
        told(1, 0, "a"),
        told(1, 1, began=("a",)),
        told(1, 1, finished=("a",)),
    ]
    service = Service(play([request("a", 2, 9)], script, step_s=[1.0, 2.0, 4.0, 8.0, 16.0]))
    assert (service.ttft.tolist(), service.ttft_s.tolist()) == ([4], [15.0])
    assert [part.tolist() for part in parts_of(service.parts)] == [[0], [1], [1], [3]]
    assert [seconds(part) for part in parts_of(service.parts_ns)] == [[0.0], [2.0], [12.0], [17.0]]


def test_time_between_tokens_is_every_gap_within_runs_across_evictions_and_across_pauses(service):
    values, counts = service.gaps
    assert sorted(np.repeat(values, counts).tolist()) == [1, 1, 1, 2, 2, 6]  # a: 1 1 2; b: 6 1 2; c has no gap
    values, counts = service.gaps_s
    a, b = [0.25, 1.0, 3.875 - 1.75], [5.625 - 0.75, 0.25, 7.375 - 5.875]
    assert sorted(np.repeat(values, counts).tolist()) == sorted(a + b)


def test_time_per_token_after_the_first_is_null_for_an_output_of_one(service):
    assert service.tpot.tolist()[:2] == [4 / 3, 9 / 3]
    assert service.tpot_s.tolist()[:2] == [(3.875 - 0.5) / 3, (7.375 - 0.75) / 3]
    assert math.isnan(service.tpot[2]) and math.isnan(service.tpot_s[2])
    rows = tables_of(REQUESTS, SCRIPT, step_s=STEP_S)["requests"]
    assert (rows[2]["tpot_iterations"], rows[2]["tpot_s"]) == (None, None)


def test_latency_from_arrival_to_last_token_both_ends_included(service):
    assert service.latency.tolist() == [5, 11, 2]
    assert service.latency_s.tolist() == [3.875, 7.375, 1.875 - 0.75]


def test_queueing_ends_with_the_first_admission(service):
    assert service.queued.tolist() == [0, 0, 1]
    assert service.queued_s.tolist() == [0.0, 0.0, 1.0]


def parts_of(parts):
    return parts.queued, parts.returning, parts.rebuilding, parts.decoding


def test_a_latency_is_queued_returning_rebuilding_decoding(service):
    """Each counted from the script by itself. b: away in 2, 3 and 5; back without a token in 4 and 6; 0 1 7 8 9 10."""
    assert [part.tolist() for part in parts_of(service.parts)] == [[0, 0, 1], [0, 3, 0], [0, 2, 0], [5, 6, 1]]
    assert sum(parts_of(service.parts)).tolist() == service.latency.tolist()


def test_a_latency_in_seconds_is_the_same_four_and_rebuilding_has_the_iteration_of_the_new_token(service):
    """b: 1.0 + 0.125 and 0.25 away; 2.0 until the next eviction, and 0.5 + 1.0 to the token of 7; then it decodes."""
    queued, returning, rebuilding, decoding = (seconds(part) for part in parts_of(service.parts_ns))
    assert queued == [0.0, 0.0, 1.0]
    assert returning == [0.0, 1.0 + 0.125 + 0.25, 0.0]
    assert rebuilding == [0.0, 2.0 + 0.5 + 1.0, 0.0]
    assert decoding == [3.875, 0.5 + 0.25 + 0.25 + 0.5 + 1.0, 0.125]
    assert sum(parts_of(service.parts_ns)).tolist() == [3_875_000_000, 7_375_000_000, 1_125_000_000]


def test_a_resume_that_samples_at_once_rebuilds_for_no_iteration_but_for_that_ones_seconds():
    script = [
        told(1, 1, "a", began=("a",)),
        told(0, 0, preempted=("a",)),
        told(1, 1, "a", began=("a",), finished=("a",)),
    ]
    service = Service(play([request("a", 2)], script, step_s=[1.0, 2.0, 4.0]))
    assert [part.tolist() for part in parts_of(service.parts)] == [[0], [1], [0], [2]]
    assert [seconds(part) for part in parts_of(service.parts_ns)] == [[0.0], [2.0], [4.0], [1.0]]


def test_evicted_and_back_within_one_iteration_is_no_time_away_and_no_time_twice():
    """In 1 it is evicted; in 2 it is back without a token; in 3 it is evicted, back, and gets its last."""
    script = [
        told(1, 1, "a", began=("a",)),
        told(0, 0, preempted=("a",)),
        told(1, 0, "a"),
        told(1, 1, "a", preempted=("a",), began=("a",), finished=("a",)),
    ]
    service = Service(play([request("a", 2)], script, step_s=[1.0, 2.0, 4.0, 8.0]))
    assert [part.tolist() for part in parts_of(service.parts)] == [[0], [1], [1], [2]]
    assert [seconds(part) for part in parts_of(service.parts_ns)] == [[0.0], [2.0], [4.0 + 8.0], [1.0]]


def test_the_request_table_has_them_all():
    rows = tables_of(REQUESTS, SCRIPT, step_s=STEP_S)["requests"]
    assert [row["arrival_s"] for row in rows] == ARRIVED_S
    b = rows[1]
    assert [b[f"{part}_iterations"] for part in ("queued", "returning", "rebuilding", "decoding")] == [0, 3, 2, 6]
    assert [b[f"{part}_s"] for part in ("queued", "returning", "rebuilding", "decoding")] == [0.0, 1.375, 3.5, 2.5]
    assert (b["latency_iterations"], b["latency_s"], b["ttft_iterations"], b["ttft_s"]) == (11, 7.375, 2, 0.75)
    assert (b["tpot_iterations"], b["tpot_s"], b["preemptions"], b["meets_slo"]) == (3.0, 6.625 / 3, 2, None)


def test_the_service_table_has_a_row_per_metric_and_unit():
    rows = tables_of(REQUESTS, SCRIPT, step_s=STEP_S)["service"]
    assert len(rows) == 10
    assert row_of(rows, "ttft", "iterations") == [3, 5 / 3, 2, 2, 2, 2, 2]
    assert row_of(rows, "ttft", "s") == [3, 2.375 / 3, 0.75, 1.125, 1.125, 1.125, 1.125]
    assert row_of(rows, "itl", "iterations") == [6, 13 / 6, 1, 6, 6, 6, 6]
    assert row_of(rows, "itl", "s") == [6, 10 / 6, 1.0, 4.875, 4.875, 4.875, 4.875]
    assert row_of(rows, "tpot", "iterations") == [2, (4 / 3 + 3) / 2, 4 / 3, 3, 3, 3, 3]
    assert row_of(rows, "tpot", "s")[:3] == [2, (3.375 / 3 + 6.625 / 3) / 2, 1.125]
    assert row_of(rows, "e2e", "iterations") == [3, 6, 5, 11, 11, 11, 11]
    assert row_of(rows, "e2e", "s") == [3, 12.375 / 3, 3.875, 7.375, 7.375, 7.375, 7.375]
    assert row_of(rows, "queue", "iterations") == [3, 1 / 3, 0, 1, 1, 1, 1]
    assert row_of(rows, "queue", "s") == [3, 1 / 3, 0.0, 1.0, 1.0, 1.0, 1.0]


# ---- what is not reported is null -----------------------------------------------------------------


def test_an_engine_that_does_not_tell_whose_tokens_come_gets_no_first_token_and_no_parts():
    silent = [it(1, admissions=(Admission("a"),)), it(1, admissions=(), finished=("a",))]
    service = Service(play([request("a", 2)], silent))
    assert service.first_token is service.ttft is service.ttft_s is service.tpot is service.tpot_s is None
    assert service.gaps is service.gaps_s is service.parts is service.parts_ns is None
    assert (service.queued.tolist(), service.latency.tolist()) == ([0], [2])
    rows = tables_of([request("a", 2)], silent)
    assert {row["metric"] for row in rows["service"]} == {"e2e", "queue"}
    assert rows["token_runs"] == []


def test_an_engine_that_does_not_tell_admissions_gets_no_queueing_and_no_parts():
    script = [told(1, 1, began=("a",), admissions=None), told(1, 1, admissions=None, finished=("a",))]
    service = Service(play([request("a", 2)], script))
    assert service.queued is service.queued_s is service.parts is service.parts_ns is None
    assert service.ttft.tolist() == [1]


def test_a_schedule_on_the_clock_of_iterations_has_no_seconds(monkeypatch):
    silence_texts(monkeypatch)
    service = Service(play(REQUESTS, SCRIPT, step_s=STEP_S))
    assert service.ttft_s is service.tpot_s is service.latency_s is service.queued_s is None
    assert service.gaps_s is service.parts_ns is None
    assert service.parts.decoding.tolist() == [5, 6, 1]
    rows = tables_of(REQUESTS, SCRIPT, Slo(ttft_s=1.0), step_s=STEP_S)
    assert {row["unit"] for row in rows["service"]} == {"iterations"}
    assert {row["step_s"] for row in rows["iterations"]} == {None}
    (pool,) = rows["pools"]
    for name in ("engine_s", "duration_s", "collected_per_s", "forward_per_s", "goodput_requests", "goodput_fraction",
                 "goodput_per_s", "preemption_latency_penalty_s"):  # fmt: skip
        assert pool[name] is None, name
    assert [row["meets_slo"] for row in rows["requests"]] == [None] * 3


def silence_texts(monkeypatch):
    """The scripted engine as a schedule: it computes no text."""
    honest = ScriptedEngine.describe
    monkeypatch.setattr(ScriptedEngine, "describe", lambda self: replace(honest(self), computes_text=False))


# ---- percentiles ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ([7], [7, 7, 7, 7]),
        ([1, 2], [1, 2, 2, 2]),
        ([5, 1, 4, 2, 3], [3, 5, 5, 5]),
        (range(1, 11), [5, 9, 10, 10]),
        (range(1, 21), [10, 18, 19, 20]),
        (range(1, 101), [50, 90, 95, 99]),
        (range(1, 102), [51, 91, 96, 100]),  # ranks 50.5, 90.9, 95.95 and 99.99, rounded up
        ([], [math.nan] * 4),
        ([math.nan, 3.0, math.nan], [3, 3, 3, 3]),
    ],
)
def test_percentiles_are_of_the_nearest_rank(values, want):
    found = percentiles(np.array(list(values), dtype=float))
    assert PERCENTILES == (50, 90, 95, 99)
    assert found == want or all(map(math.isnan, found + want))


def test_percentiles_with_counts_are_those_of_the_values_written_out():
    values, counts = np.array([9, 1, 4, 2]), np.array([1, 50, 0, 49])
    assert percentiles(values, counts) == percentiles(np.repeat(values, counts)) == [1, 2, 2, 2]
    assert percentiles(values, np.array([2, 50, 0, 48])) == [1, 2, 2, 9]
    assert all(map(math.isnan, percentiles(values, np.zeros(4, dtype=np.int64))))


# ---- objectives -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slo", "kept"),
    [
        (Slo(ttft_s=0.75), [True, True, False]),  # exactly the limit is within it
        (Slo(ttft_s=0.74), [True, False, False]),
        (Slo(tpot_s=1.125), [True, False, True]),  # an output of one has no time per token to break
        (Slo(e2e_s=3.875), [True, False, True]),
        (Slo(ttft_s=1.0, tpot_s=2.0), [True, False, False]),
        (Slo(ttft_s=2.0, e2e_s=7.375), [True, True, True]),
        (Slo(ttft_s=0.6, tpot_s=2.0, e2e_s=4.0), [True, False, False]),
        (Slo(ttft_s=0.0), [False, False, False]),
    ],
)
def test_goodput_counts_requests_that_keep_every_objective(slo, kept):
    rows = tables_of(REQUESTS, SCRIPT, slo, step_s=STEP_S)
    assert [row["meets_slo"] for row in rows["requests"]] == kept
    (pool,) = rows["pools"]
    assert (pool["goodput_requests"], pool["goodput_fraction"]) == (sum(kept), sum(kept) / 3)
    assert pool["goodput_per_s"] == sum(kept) / 7.375


def test_without_objectives_there_is_no_goodput():
    rows = tables_of(REQUESTS, SCRIPT, step_s=STEP_S)
    (pool,) = rows["pools"]
    assert pool["goodput_requests"] is pool["goodput_fraction"] is pool["goodput_per_s"] is None


@pytest.mark.parametrize("slo", [Slo(ttft_s=9.0), Slo(tpot_s=9.0), Slo(ttft_s=9.0, e2e_s=9.0)])
def test_an_objective_that_cannot_be_checked_is_neither_kept_nor_broken(slo):
    silent = [it(1), it(1, finished=("a",))]
    rows = tables_of([request("a", 2)], silent, slo)
    assert rows["requests"][0]["meets_slo"] is rows["pools"][0]["goodput_requests"] is None
    assert tables_of([request("a", 2)], silent, Slo(e2e_s=9.0))["pools"][0]["goodput_requests"] == 1


# ---- throughput, fairness, the pool ---------------------------------------------------------------


def test_throughput_over_iterations_that_forwarded_and_over_the_whole_duration():
    (pool,) = tables_of(REQUESTS, SCRIPT, step_s=STEP_S)["pools"]
    assert pool["iterations"] == 9  # 5 and 9 forwarded nothing
    assert (pool["collected_per_iteration"], pool["forward_per_iteration"]) == (9 / 9, 12 / 9)
    assert (pool["duration_s"], pool["collected_per_s"], pool["forward_per_s"]) == (7.375, 9 / 7.375, 12 / 7.375)
    assert pool["engine_s"] == sum(STEP_S)


def test_what_victims_lost_is_told_by_parts_against_the_reference_pool():
    roomy = play(REQUESTS, ROOMY, slots=3, pool_blocks=20)
    assert Service(roomy).latency.tolist() == [4, 5, 1]
    (pool,) = tables_of(REQUESTS, SCRIPT, reference=roomy, step_s=STEP_S)["pools"]
    assert pool["victims_extra_iterations"] == 11 - 5
    parts = [pool[f"victims_{part}_iterations"] for part in ("queued", "returning", "rebuilding", "decoding")]
    assert parts == [0.0, 3.0, 2.0, 1.0]  # it decodes slower by the turn that it lost in 9
    assert pool["worst_paired_latency_ratio"] == pool["paired_latency_penalty"] == 11 / 5
    assert (pool["share_preempted"], pool["preemptions_per_victim"], pool["most_preemptions"]) == (1 / 3, 2.0, 2)


def test_the_request_that_lost_most_need_not_be_a_victim():
    requests = [request("a", 2), request("b", 2), request("c", 1)]
    script = [
        told(2, 2, "ab", began=("a", "b")),
        told(1, 1, preempted=("b",), finished=("a",)),
        told(1, 1, "b", began=("b",), finished=("b",)),
        told(1, 1, "c", began=("c",), finished=("c",)),
    ]
    roomy = play(
        requests,
        [told(3, 3, "abc", began=("a", "b", "c"), finished=("c",)), told(2, 2, finished=("a", "b"))],
        slots=3,
        pool_blocks=20,
    )
    (pool,) = tables_of(requests, script, reference=roomy)["pools"]
    assert (pool["worst_paired_latency_ratio"], pool["paired_latency_penalty"]) == (4.0, 1.5)


def test_without_victims_or_without_a_reference_there_is_nothing_to_compare():
    names = [f"victims_{part}_iterations" for part in ("extra", "queued", "returning", "rebuilding", "decoding")]
    (alone,) = tables_of(REQUESTS, SCRIPT, step_s=STEP_S)["pools"]
    assert [alone[name] for name in (*names, "worst_paired_latency_ratio")] == [None] * 6
    roomy = play(REQUESTS, ROOMY, slots=3)
    (calm,) = tables_of(REQUESTS, ROOMY, reference=roomy, slots=3)["pools"]
    assert [calm[name] for name in names] == [None] * 5
    assert (calm["worst_paired_latency_ratio"], calm["share_preempted"], calm["most_preemptions"]) == (1.0, 0.0, 0)
    assert calm["preemptions_per_victim"] is None


def test_an_engine_that_cannot_report_evictions_has_no_fairness():
    script = [it(1, preempted=None), it(1, preempted=None, finished=("a",))]
    (pool,) = tables_of([request("a", 2)], script)["pools"]
    assert pool["share_preempted"] is pool["preemptions_per_victim"] is pool["most_preemptions"] is None


def test_used_blocks_and_fragmentation():
    """Of a pool of 8 blocks of one position, 4, 8 and 0 are in use, of which 2, 1 and 0 hold nothing."""
    state = [{"free_blocks": 4, "unused_tokens": 2}, {"free_blocks": 0, "unused_tokens": 1}]
    script = [it(1, **state[0]), it(1, **state[1]), it(1, free_blocks=8, unused_tokens=0, finished=("a",))]
    (pool,) = tables_of([request("a", 3)], script)["pools"]
    assert (pool["mean_used_blocks"], pool["peak_used_blocks"], pool["fragmentation"]) == (4.0, 8, 3 / 12)


def test_a_pool_that_is_not_reported_once_is_not_reported():
    script = [it(1, free_blocks=3, unused_tokens=2), it(1, finished=("a",))]
    (pool,) = tables_of([request("a", 2)], script)["pools"]
    assert pool["mean_used_blocks"] is pool["peak_used_blocks"] is pool["fragmentation"] is None


def test_a_pool_that_nobody_used_has_no_fragmentation():
    (pool,) = tables_of([request("a")], [it(1, free_blocks=8, unused_tokens=0, finished=("a",))])["pools"]
    assert (pool["mean_used_blocks"], pool["peak_used_blocks"], pool["fragmentation"]) == (0.0, 0, None)


# ---- under the virtual clock ----------------------------------------------------------------------


def test_modelled_seconds_are_those_of_the_model_not_of_the_machine():
    """100 ns an iteration and 10 a row; none for an iteration without rows. c arrives in the middle of iteration 1."""
    requests = [*REQUESTS[:2], request("c", 1, 2, arrival=150)]
    service = Service(play(requests, SCRIPT, step_s=STEP_S, pacing=Pacing("virtual", IterationCost(100, 10))))
    ends = [120, 240, 350, 460, 580, 580, 690, 800, 910, 910, 1020]
    assert service.end_ns(np.arange(11)).tolist() == ends
    assert service.arrival_ns.tolist() == [0, 0, 150]
    assert service.arrived.tolist() == [0, 0, 2]
    assert (service.ttft_s * NS).round().tolist() == [120, 240, 460 - 150]
    assert (service.queued_s * NS).round().tolist() == [0, 0, 350 - 150]
    assert [part.tolist() for part in parts_of(service.parts_ns)] == [
        [0, 0, 200],
        [0, (460 - 240) + (580 - 580), 0],
        [0, (580 - 460) + (800 - 580), 0],
        [580, 240 + (1020 - 800), 110],
    ]
