"""The benchmarks measure what they say: the same forwards by three decoders, and time where it is spent."""

from __future__ import annotations

import re
import time

import pytest
import torch

from batchbench import build_requests, engine_factory, load_scenario
from batchbench.driver import run_workload
from benchmarks import promise
from benchmarks.overhead import TimedDecoder
from engine.kv_store import KVStore
from engine.weights import tiny_model
from tests.helpers import CPU, needs_compiler


def load(dtype):
    return tiny_model(0, dtype, CPU)


@needs_compiler
@pytest.mark.parametrize("forward", promise.FORWARDS)
def test_the_three_decoders_compute_the_same_forward(forward):
    rows, positions = promise.FORWARDS[forward]
    batch = promise.batch_of(rows, positions)
    assert len(batch.token_ids) == rows * positions and len(set(batch.cells)) == rows * positions
    found = promise.decoders(load, torch.float32, 1)
    assert [decoder.numerics.split()[0] for decoder in found.values()] == ["exact", "exact", "fast"]
    assert list(found) == [promise.NATIVE, promise.TORCH, promise.FAST]
    logits = []
    for decoder in found.values():
        store = KVStore(decoder.config, batch.tables.size, promise.BLOCK_SIZE, decoder.dtype, CPU)
        logits.append(decoder.forward(batch, store).clone())
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], rtol=0, atol=2e-5)  # other orders of summation


@needs_compiler
def test_a_line_per_dtype_and_forward_with_both_costs(monkeypatch, capsys):
    monkeypatch.setattr(promise, "rates", lambda found, rows, positions: dict(zip(found, (40, 10, 20), strict=True)))
    promise.report("tiny", load, 1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * len(promise.FORWARDS)
    assert all(re.search(r" 40 +10 +20 +-50% +\+100%$", line) for line in lines)


def test_a_rate_is_positions_over_the_median_time(monkeypatch):
    monkeypatch.setattr(promise, "TURNS", 3)
    monkeypatch.setattr(promise, "LEAST_TURNS", 3)
    found = {promise.FAST: promise.decoders(load, torch.float32, 1)[promise.FAST]}
    ticks = iter([0.0, *(t for spent in (9.0, 1.0, 2.0, 4.0) for t in (0.0, spent))])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    assert promise.rates(found, 8, 1) == {promise.FAST: 8 / 2.0}  # the first turn, 9 s, warms up


def test_time_in_the_decoder_is_told_from_time_around_it():
    scenario = load_scenario("scenarios/day34.toml")
    adapter = engine_factory("own", scenario.engine)(48)
    runner = adapter.engine.runner
    runner.model = timed = TimedDecoder(runner.model)
    honest = runner._batch

    def slow(plan):
        time.sleep(0.01)
        return honest(plan)

    runner._batch = slow
    timing = run_workload(adapter, build_requests(scenario.workload))
    assert 0 < timed.seconds < timing.engine_s - 24 * 0.01  # one per iteration
