"""Service figures of random schedules against a walk, iteration by iteration, over the tables of what happened."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest

from batchbench import engine_factory
from batchbench.clocks import NS
from batchbench.driver import run_workload
from batchbench.protocol import Point
from batchbench.service import Service, Slo
from batchbench.tables import point_tables
from tests.batchbench.scripted import Outcomes, Tables
from tests.batchbench.test_stretch import CHOICES, VIRTUAL, workload

PARTS = ("queued", "returning", "rebuilding", "decoding")


def run(number, pacing, pool=None, batches=True, observer=None):
    """(timing, tables as lists of rows) of a seeded workload; in another pool if one is given."""
    settings, requests, own_pool = workload(number)
    engine, tables = engine_factory("schedule", settings)(pool or own_pool), Tables()
    sink = tables.ledger(Point(pool or own_pool), engine.describe())
    timing = run_workload(engine, requests, pacing=pacing, sink=sink, batches=batches, observer=observer)
    tables.close()
    return timing, {name: table.to_pylist() for name, table in tables.items()}


class Walk:
    """What happened to each request, read from the ledger's tables alone."""

    def __init__(self, tables):
        self.iterations = [row["iteration"] for row in tables["iterations"]]
        self.tokens, self.evicted, self.admitted = defaultdict(list), defaultdict(set), defaultdict(set)
        for row in tables["token_runs"]:
            self.tokens[row["request_id"]] += range(row["first_iteration"], row["first_iteration"] + row["tokens"])
        for row in tables["evictions"]:
            self.evicted[row["request_id"]].add(row["iteration"])
        for row in tables["admissions"]:
            self.admitted[row["request_id"]].add(row["iteration"])

    def states(self, request_id, arrived):
        """(iteration, what the request did in it, whether it got a token), from its arrival to its last token."""
        tokens, state = set(self.tokens[request_id]), "queued"
        for iteration in range(arrived, max(tokens) + 1):
            if iteration in self.evicted[request_id]:
                state = "returning"
            if iteration in self.admitted[request_id]:
                state = "decoding" if state == "queued" else "rebuilding"
            got = iteration in tokens
            yield iteration, state, got
            if got:
                state = "decoding"


def walked(walk, timing, request_id, place):
    """(parts in iterations, parts in nanoseconds) of one request."""
    in_iterations, in_ns = Counter(), Counter()
    record = timing.record
    at = {iteration: n for n, iteration in enumerate(record.iterations)}
    now = record.arrival_ns[place]
    for iteration, state, got in walk.states(request_id, record.arrived[place]):
        # In iterations, the one that brings a new token is decoding; in seconds it belongs to what it was in.
        in_iterations["decoding" if got else state] += 1
        if timing.timed:
            start, end = record.start_ns[at[iteration]], record.end_ns[at[iteration]]
            in_ns["queued"] += start - now  # it came during an iteration; later ones follow each other
            in_ns[state] += end - start
            now = end
    return [in_iterations[part] for part in PARTS], [in_ns[part] for part in PARTS]


def parts_per_request(parts):
    return np.array([getattr(parts, part) for part in PARTS]).T.tolist()


@pytest.mark.parametrize("pacing", [None, VIRTUAL], ids=["iterations", "virtual"])
@pytest.mark.parametrize("first", range(len(CHOICES)))
def test_parts_are_those_of_a_walk_and_sum_to_the_latency(first, pacing):
    evicted = 0
    for number in range(first, 100, len(CHOICES)):
        timing, tables = run(number, pacing)
        service, walk = Service(timing), Walk(tables)
        want = [walked(walk, timing, r.request_id, place) for place, r in enumerate(timing.requests)]
        assert parts_per_request(service.parts) == [found for found, _ in want], number
        assert sum(getattr(service.parts, part) for part in PARTS).tolist() == service.latency.tolist()
        if pacing is not None:
            assert parts_per_request(service.parts_ns) == [found for _, found in want], number
            whole = service.end_ns(service.finished) - service.arrival_ns
            assert sum(getattr(service.parts_ns, part) for part in PARTS).tolist() == whole.tolist()
        else:
            assert service.parts_ns is None
        evicted += timing.preemptions
    assert evicted or "reserve-output" in CHOICES[first].values()


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_tokens_and_gaps_are_those_of_a_walk(first):
    for number in range(first, first + 25):
        timing, tables = run(number, VIRTUAL)
        service, walk, record = Service(timing), Walk(tables), timing.record
        ends = dict(zip(record.iterations, record.end_ns, strict=True))
        gaps, gaps_ns = Counter(), Counter()
        for place, one in enumerate(timing.requests):
            tokens = sorted(walk.tokens[one.request_id])
            assert len(tokens) == len(set(tokens)) == one.output_tokens
            assert tokens[0] == service.first_token[place] and tokens[-1] == record.finished[place]
            gaps.update(after - before for before, after in pairwise(tokens))
            gaps_ns.update(ends[after] - ends[before] for before, after in pairwise(tokens))
        values, counts = service.gaps
        assert Counter(np.repeat(values, counts).tolist()) == gaps
        values, counts = service.gaps_s
        assert Counter((np.repeat(values, counts) * NS).round().astype(int).tolist()) == gaps_ns
        assert gaps.total() == gaps_ns.total() == timing.collected_tokens - len(timing.requests)
        got = Counter(iteration for tokens in walk.tokens.values() for iteration in tokens)
        for row in tables["iterations"]:
            assert got[row["iteration"]] == row["collected_tokens"], (number, row["iteration"])


@pytest.mark.parametrize("first", range(len(CHOICES)))
def test_those_who_began_and_did_not_pause_are_as_many_as_the_tokens_collected(first):
    for number in range(first, 60, len(CHOICES)):
        seen, getting = Outcomes(), set()
        run(number, None, batches=False, observer=seen)
        for iteration, outcome in seen.outcomes:
            stopped = {*outcome.paused, *outcome.preempted}
            assert set(outcome.paused) <= getting and not set(outcome.paused) & set(outcome.preempted)
            getting -= stopped
            assert not set(outcome.began) & getting
            getting |= set(outcome.began)
            assert len(getting) == outcome.collected_tokens, (number, iteration)
            assert set(outcome.finished) <= getting
            getting -= set(outcome.finished)
        assert not getting


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_the_pools_figures_are_those_of_a_recount(first):
    for number in range(first, first + 25):
        timing, tables = run(number, None)
        used = [timing.pool_blocks - row["free_blocks"] for row in tables["iterations"]]
        unused = sum(row["unused_tokens"] for row in tables["iterations"])
        assert timing.mean_used_blocks == pytest.approx(sum(used) / len(used), rel=1e-12)
        assert timing.peak_used_blocks == max(used)
        positions = sum(used) * timing.engine.block_size
        if positions:
            assert timing.fragmentation == unused / positions
            assert 0 <= timing.fragmentation < 1
        evictions = Counter(row["request_id"] for row in tables["evictions"])
        pool = point_tables(0, timing, None, Slo())["pools"].to_pylist()[0]
        assert pool["share_preempted"] == len(evictions) / len(timing.requests)
        assert pool["most_preemptions"] == max(evictions.values(), default=0)
        if evictions:
            assert pool["preemptions_per_victim"] == evictions.total() / len(evictions)


@pytest.mark.parametrize("first", range(len(CHOICES)))
def test_paired_parts_sum_to_the_paired_difference(first):
    compared = 0
    for number in range(first, 60, len(CHOICES)):
        timing, _ = run(number, VIRTUAL)
        size = timing.engine.block_size
        whole = sum(-(-(r.prompt_tokens + r.output_tokens + 1) // size) for r in timing.requests)
        roomy, _ = run(number, VIRTUAL, pool=whole + 8 * len(timing.requests))
        assert roomy.preemptions == 0
        pool = point_tables(0, timing, roomy, Slo())["pools"].to_pylist()[0]
        added = [pool[f"victims_{part}_iterations"] for part in PARTS]
        if not timing.preemptions:
            assert pool["victims_extra_iterations"] is None and added == [None] * 4
            continue
        victims = len(timing.preempted_at)
        exact = [round(value * victims) for value in added]  # sums of integers over their number
        assert [value / victims for value in exact] == added
        extra = sum(timing.latencies[name] - roomy.latencies[name] for name in timing.preempted_at)
        assert sum(exact) == extra and pool["victims_extra_iterations"] == extra / victims
        ratios = [timing.latencies[r.request_id] / roomy.latencies[r.request_id] for r in timing.requests]
        assert pool["worst_paired_latency_ratio"] == max(ratios)
        compared += 1
    assert compared or "reserve-output" in CHOICES[first].values()
