"""The schedule alone: event by event that of the real engine, and honest about what it does not know."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from batchbench import engine_factory
from batchbench.driver import run_workload
from batchbench.protocol import RequestSpec, Sampling
from batchbench.scenario import EngineSettings
from engine.policies import VICTIM_RULES
from tests.batchbench.scripted import Outcomes
from tests.batchbench.test_cli import DAY34, invoke

CHOICES = (
    {},
    {"token_budget": 6},
    {"prefix_cache": True},
    {"reclaim": "swap", "swap_blocks": 9},
    {"admission": "reserve-output"},
    {"batching": "static"},
    {"rules": "vllm-v1", "token_budget": 9, "admission_gate": "first-chunk"},
    {"rules": "sglang"},
)


def workload(number):
    """Seeded: (settings, requests, pool)."""
    draw = random.Random(number)
    block_size = draw.randint(1, 6)
    lengths = [(draw.randint(1, 20), draw.randint(1, 10)) for _ in range(draw.randint(1, 8))]
    stem = draw.randbytes(9)
    requests = [
        RequestSpec(
            f"r{n}",
            tuple(((stem if draw.random() < 0.5 else b"") + draw.randbytes(prompt))[:prompt]),
            output,
            draw.randint(0, 6),
            priority=draw.randint(0, 2),
        )
        for n, (prompt, output) in enumerate(lengths)
    ]
    needed = [-(-(prompt + output + 1) // block_size) for prompt, output in lengths]
    pool = draw.randint(max(needed), max(max(needed), sum(needed) // 2))
    choices = dict(CHOICES[number % len(CHOICES)])
    if choices.get("rules") == "sglang":
        choices["token_budget"] = 2 * block_size
    settings = EngineSettings(
        slots=draw.randint(1, 5),
        block_size=block_size,
        watermark_blocks=0 if choices.get("rules") == "vllm-v1" else draw.randint(0, 3),
        victim=draw.choice([None, *VICTIM_RULES]),
        **choices,
    )
    return settings, requests, pool


def ledger(name, settings, requests, pool, loaded={}):  # noqa: B006  # the model, once
    if name == "own":
        factory = loaded.setdefault("own", engine_factory("own", settings))
        factory.settings = settings
    else:
        factory = engine_factory(name, settings)
    seen = Outcomes()
    run_workload(factory(pool), requests, observer=seen, batches=False)
    return [(at, dataclasses.replace(outcome, padded_tokens=None, copy_s=None)) for at, outcome in seen.outcomes]


@pytest.mark.parametrize("first", range(0, 200, 25))
def test_its_ledger_is_the_real_engines_event_by_event(first):
    for number in range(first, first + 25):
        asked = workload(number)
        assert ledger("schedule", *asked) == ledger("own", *asked), number


def test_a_sweep_without_a_model_says_that_no_text_was_computed(tmp_path):
    done = invoke(
        "sweep", str(DAY34), "--engine", "schedule", "--out", str(tmp_path / "out"), "--format", "json", "--no-plots"
    )
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    published = [0.0, 0.217, 0.263, 0.321, 0.399, 0.375]
    assert [round(pool["recompute_fraction"], 3) for pool in report["pools"]] == published
    assert {pool["text_digest"] for pool in report["pools"]} == {None}
    assert {pool["padded_tokens"] for pool in report["pools"]} == {None}
    assert report["text_repetition"] is None
    table = invoke("sweep", str(DAY34), "--engine", "schedule", "--out", str(tmp_path / "table"))
    assert "not computed" in table.stdout and "identical" not in table.stdout


def test_it_has_no_text_to_show(tmp_path):
    done = invoke("sweep", str(DAY34), "--engine", "schedule", "--show-text")
    assert (done.exit_code, done.stderr) == (2, "error: --show-text: a schedule computes no text\n")


def test_a_scenarios_own_victim_rule_runs_only_if_the_command_line_trusts_it(tmp_path):
    scenario = tmp_path / "own.toml"
    scenario.write_text(
        DAY34.read_text().replace("[engine]", '[engine]\nvictim = "tests.engine.test_mechanisms:last_of"')
    )
    done = invoke("sweep", str(scenario), "--engine", "schedule", "--out", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert "would import the module 'tests.engine.test_mechanisms'; if you trust it, add --trust" in done.stderr
    done = invoke(
        "sweep", str(scenario), "--engine", "schedule", "--out", str(tmp_path / "out"),
        "--trust", "tests.engine.test_mechanisms",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr


def test_drawn_texts_of_equal_prompts_are_taken_to_differ():
    """With a prefix cache the schedule compares tokens; a drawn token of one request is no token of another."""
    settings = EngineSettings(slots=4, block_size=4, prefix_cache=True)
    drawn = Sampling(temperature=1.5)
    requests = [RequestSpec(f"r{n}", tuple(range(9)), 12, 3 * n, drawn) for n in range(6)]
    assert ledger("schedule", settings, requests, 9) == ledger("own", settings, requests, 9)
    greedy = [RequestSpec(f"r{n}", tuple(range(9)), 12, 3 * n) for n in range(6)]
    assert ledger("schedule", settings, greedy, 9) == ledger("own", settings, greedy, 9)
