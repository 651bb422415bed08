"""Iterations that are run at once are those that would have been run one by one: every row of every table."""

from __future__ import annotations

import random

import pytest

from batchbench import engine_factory
from batchbench.clocks import IterationCost
from batchbench.driver import Pacing, RunObserver, run_workload
from batchbench.lazy_prompts import RandomPrompt
from batchbench.ledger import LEDGER
from batchbench.protocol import Point, RequestSpec
from batchbench.scenario import EngineSettings
from batchbench.service import Slo
from batchbench.tables import point_tables
from engine import core, stretch
from engine.policies import VICTIM_RULES
from tests.batchbench.scripted import Tables

CHOICES = (
    {},
    {"token_budget": 24},
    {"token_budget": 3},  # fewer positions than slots: some decoders lose their turn
    {"reclaim": "swap", "swap_blocks": 12},
    {"admission": "reserve-output"},
    {"batching": "static"},
    {"rules": "vllm-v1"},
    {"rules": "vllm-v1", "token_budget": 5, "admission_gate": "first-chunk"},
    {"rules": "sglang"},
    {"prefix_cache": True},
)
VIRTUAL = Pacing("virtual", IterationCost(1_000, 37, 11))


def workload(number):
    """Seeded: (settings, requests, pool). Outputs are long, arrivals far apart now and then, and some follow others."""
    draw = random.Random(f"skipping {number}")
    block_size, choices = draw.randint(1, 8), dict(CHOICES[number % len(CHOICES)])
    lengths = [(draw.randint(1, 40), draw.randint(1, 90)) for _ in range(draw.randint(1, 12))]
    requests = []
    for n, (prompt, output) in enumerate(lengths):
        after = f"r{draw.randrange(n)}" if n and draw.random() < 0.2 else None
        history = 0
        if after and draw.random() < 0.5:
            parent = requests[int(after[1:])]
            history = parent.prompt_tokens + parent.output_tokens
        arrival = draw.choice([0, 0, draw.randint(0, 300), draw.randint(0, 60_000)])
        own = RandomPrompt(f"{number} {n}", prompt)
        requests.append(RequestSpec(f"r{n}", own, output, arrival, None, draw.randint(0, 2), after, history))
    needed = [-(-(r.prompt_tokens + r.output_tokens + 1) // block_size) for r in requests]
    pool = draw.randint(max(needed), max(max(needed), sum(needed) // 2))
    if choices.get("rules") == "sglang":
        choices["token_budget"] = 4 * block_size
    watermark = 0 if choices.get("rules") == "vllm-v1" else draw.randint(0, 3)
    settings = EngineSettings(
        slots=draw.randint(1, 6),
        block_size=block_size,
        watermark_blocks=watermark,
        victim=draw.choice([None, *VICTIM_RULES]),
        **choices,
    )
    return settings, requests, pool


class Batches(RunObserver):
    def __init__(self):
        self.iterations = 0

    def on_batch(self, first, batch):
        self.iterations += len(batch)


def everything(settings, requests, pool, pacing, skips):
    """Every table of a run, and how many of its iterations were run at once."""
    engine = engine_factory("schedule", settings, audit=True)(pool)
    tables, seen = Tables(), Batches()
    sink = tables.ledger(Point(pool), engine.describe())
    timing = run_workload(engine, requests, pacing=pacing, observer=seen, sink=sink, batches=skips)
    tables.close()
    found = {**tables, **point_tables(0, timing, None, Slo(ttft_s=1e-5))}
    return {name: found[name].to_pylist() for name in found}, seen.iterations


@pytest.mark.parametrize("pacing", [None, VIRTUAL], ids=["iterations", "virtual"])
@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(60, 300, 60))])
def test_no_table_differs(first, pacing):
    for number in range(first, first + 60):
        asked = workload(number)
        want, none = everything(*asked, pacing, skips=False)
        got, _ = everything(*asked, pacing, skips=True)
        assert none == 0
        for rows in (want, got):
            rows["pools"][0].pop("wall_s")
        for name in (*LEDGER, "requests", "pools", "service"):
            assert got[name] == want[name], (number, name)


@pytest.mark.parametrize("choices", CHOICES[:9], ids=str)
def test_most_iterations_are_glided_over(choices, monkeypatch):
    """A burst of long outputs through a small pool: in nearly all iterations there is nothing to decide."""
    decided = []
    monkeypatch.setattr(core, "decide_one", lambda *args: decided.append(1) or stretch.decide_one(*args))
    requests = [RequestSpec(f"r{n}", RandomPrompt(f"{n}", 20), 400) for n in range(12)]
    tables, at_once = everything(EngineSettings(slots=6, block_size=8, **choices), requests, 160, None, skips=True)
    assert at_once == len(tables["iterations"])
    tight = choices.get("token_budget", 6) < 6 or choices.get("rules") == "sglang"
    assert len(decided) < (1.01 if tight else 0.1) * at_once


def test_with_a_prefix_cache_iterations_are_taken_one_by_one():
    """It compares texts, which come token by token."""
    requests = [RequestSpec(f"r{n}", RandomPrompt(f"{n}", 8), 40) for n in range(3)]
    settings = EngineSettings(slots=6, block_size=8, prefix_cache=True)
    assert everything(settings, requests, 60, None, skips=True)[1] == 0
