"""The vLLM v1 rules: the published figures, and an independent port at every chunk budget."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import SchedulerConfig
from engine.core import Engine
from engine.plan import NoRunner
from tests.helpers import assert_whole, bare_engine

GOLDEN = Path(__file__).parents[1] / "golden"
PUBLISHED = json.loads((GOLDEN / "vllm_v1_lognormal.json").read_text())


@pytest.mark.parametrize("case", PUBLISHED["cases"], ids=lambda c: f"{c['pool_blocks']}-{c['admission_gate']}")
def test_published_figures_of_a_thousand_lognormal_requests(case):
    """Without the audit: 14,000 iterations of up to 128 rows."""
    chosen = PUBLISHED["settings"]
    engine = Engine(
        SchedulerConfig(
            chosen["max_num_seqs"],
            case["pool_blocks"],
            chosen["block_size"],
            rules="vllm-v1",
            token_budget=chosen["max_num_batched_tokens"],
            admission_gate=case["admission_gate"],
        ),
        NoRunner(),
    )
    with (GOLDEN / "lognormal_1000_t0.csv").open() as file:
        for number, row in enumerate(csv.DictReader(file)):
            engine.submit(str(number), [1] * int(row["num_prefill_tokens"]), int(row["num_decode_tokens"]))
    evicted: Counter[str] = Counter()
    iterations = 0
    while engine.has_work:
        evicted.update(event.request_id for event in engine.step().evicted)
        iterations += 1
    assert evicted == case["preempted_requests"]
    assert evicted.total() == case["preemptions"]
    assert len(evicted) == case["requests_preempted"]
    assert max(evicted.values()) == case["most_for_one_request"]
    assert engine.rebuilt_tokens == case["rebuilt_tokens"]
    assert iterations == case["iterations"]
    assert engine.forward_tokens - engine.rebuilt_tokens == PUBLISHED["minimal_tokens"]
    assert_whole(engine.scheduler)


def port(requests, slots, pool, size, budget, gate):
    """Written from the rules' description alone: counts per request, no blocks. Returns one line per iteration."""
    need = lambda tokens: -(-tokens // size)  # noqa: E731
    tokens = [prompt for prompt, _ in requests]
    limit = [prompt + output for prompt, output in requests]
    done, held = [0] * len(requests), [0] * len(requests)
    waiting, running, lines = list(range(len(requests))), [], []
    while waiting or running:
        left, rows, out = budget, {}, []
        for r in list(running):
            if r not in running or not left:
                continue
            take = min(tokens[r] - done[r], left)
            want = need(done[r] + take)
            while want - held[r] > pool - sum(held):
                victim = running.pop()
                held[victim] = done[victim] = 0
                waiting.insert(0, victim)
                out.append(victim)
                if victim == r:
                    break
            if r not in running:
                break
            held[r] = max(held[r], want)
            rows[r] = take
            left -= take
        while waiting and left and len(running) < slots and not out:
            r = waiting[0]
            take = min(tokens[r], left)
            if need(tokens[r] if gate == "full-prompt" else take) > pool - sum(held):
                break
            running.append(waiting.pop(0))
            held[r], rows[r] = need(take), take
            left -= take
        lines.append((rows, out))
        for r, take in rows.items():
            done[r] += take
            if done[r] == tokens[r]:
                tokens[r] += 1
                if tokens[r] == limit[r]:
                    running.remove(r)
                    held[r] = 0
    return lines


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=8),
    slots=st.integers(1, 5),
    size=st.integers(1, 6),
    budget=st.integers(1, 24),  # from one position to more than the longest prompt
    gate=st.sampled_from(["full-prompt", "first-chunk"]),
    squeeze=st.floats(0, 1),
)
def test_every_iteration_equals_an_independent_port(requests, slots, size, budget, gate, squeeze):
    needed = [-(-(p + o - 1) // size) for p, o in requests]
    pool = round(max(needed) + squeeze**2 * (sum(needed) - max(needed)))
    engine = bare_engine(slots, pool, size, rows=True, rules="vllm-v1", token_budget=budget, admission_gate=gate)
    for number, (prompt, output) in enumerate(requests):
        engine.submit(str(number), [1] * prompt, output)
    for rows, out in port(requests, slots, pool, size, budget, gate):
        plans = []
        honest = engine.scheduler.schedule
        engine.scheduler.schedule = lambda honest=honest, plans=plans: plans.append(honest()) or plans[-1]
        engine.step()
        engine.scheduler.schedule = honest
        (plan,) = plans
        lengths = {
            int(n): stop - start for n, start, stop in zip(plan.request_ids, plan.starts, plan.stops, strict=True)
        }
        assert lengths == rows
        assert [int(event.request_id) for event in plan.evicted] == out
    assert not engine.has_work
    assert_whole(engine.scheduler)
