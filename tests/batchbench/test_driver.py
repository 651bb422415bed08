"""When requests are submitted, what counts as time, and what is refused at the end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batchbench import Text, engine_factory, load_scenario
from batchbench.adapters.fake import FakeClock, ScriptedEngine
from batchbench.driver import RunObserver, run_workload
from batchbench.errors import EngineFailed, OutcomeRefused
from batchbench.recorder import Recorder
from tests.batchbench.scripted import it, play, request


def test_requests_arrive_by_iteration_then_as_listed():
    requests = [request("late", arrival=2), request("b"), request("a")]
    clock = FakeClock()
    script = [it(1, finished=("b",)), it(1, finished=("a",)), it(1, finished=("late",))]
    engine = ScriptedEngine(script, {r.request_id: Text((1,)) for r in requests}, slots=1, pool_blocks=4, clock=clock)
    run_workload(engine, requests, clock=clock)
    assert engine.submitted == [(0, "b"), (0, "a"), (2, "late")]


def test_what_the_harness_does_between_iterations_is_nobodys_latency():
    clock = FakeClock()
    script = [it(1), it(1, finished=("a",))]
    engine = ScriptedEngine(script, {"a": Text((1, 2))}, slots=1, pool_blocks=4, clock=clock)

    class DrawsProgress(RunObserver):
        def on_iteration(self, iteration, outcome):
            clock.now_s += 100

    timing = run_workload(engine, [request("a", 2)], clock=clock, observer=DrawsProgress())
    assert timing.latencies_s == {"a": 2.0}
    assert (timing.engine_s, timing.wall_s) == (2.0, 202.0)


def test_submission_is_nobodys_latency_either(monkeypatch):
    clock, honest = FakeClock(), ScriptedEngine.submit

    def slow(self, request):
        clock.now_s += 50
        honest(self, request)

    monkeypatch.setattr(ScriptedEngine, "submit", slow)
    engine = ScriptedEngine([it(1, finished=("a",))], {"a": Text((1,))}, slots=1, pool_blocks=4, clock=clock)
    timing = run_workload(engine, [request("a")], clock=clock)
    assert (timing.latencies_s, timing.wall_s) == ({"a": 1.0}, 51.0)


def test_the_iteration_clock_jumps_over_a_gap_without_work():
    factory = engine_factory("own", load_scenario("scenarios/day34.toml").engine)
    requests = [request("a", 3, 2, arrival=0), request("b", 3, 2, arrival=50)]
    timing = run_workload(factory(8), requests)
    assert list(timing.record.iterations) == [0, 1, 2, 50, 51, 52]
    assert timing.latencies == {"a": 3, "b": 3}
    assert timing.occupancy == 6 / (6 * 6)


def test_an_engine_that_does_nothing_forever_is_stopped():
    with pytest.raises(EngineFailed, match="1000 iterations in a row forwarded nothing"):
        play([request("a")], [it(1, collected=0), *[it(0)] * 5000])
    with pytest.raises(EngineFailed, match="1000 iterations in a row forwarded nothing"):
        play([request("a")], [it(1, collected=0), *[it(0, preempted=("a",))] * 5000])


def test_a_text_whose_gaps_do_not_match_its_tokens_is_an_error():
    with pytest.raises(EngineFailed, match="'a' has 1 logit gaps for 2 tokens"):
        play([request("a", 2)], [it(1), it(1, finished=("a",))], texts={"a": Text((1, 2), (0.5,))})


def test_a_counter_that_was_promised_must_come(monkeypatch):
    honest = ScriptedEngine.describe
    monkeypatch.setattr(ScriptedEngine, "describe", lambda self: replace(honest(self), reports=("rebuilt_tokens",)))
    with pytest.raises(OutcomeRefused, match="iteration 0: the engine says that it reports rebuilt_tokens"):
        play([request("a")], [it(1, finished=("a",))])


def test_a_counter_that_is_none_cannot_be_promised(monkeypatch):
    honest = ScriptedEngine.describe
    monkeypatch.setattr(ScriptedEngine, "describe", lambda self: replace(honest(self), reports=("nonsense",)))
    with pytest.raises(EngineFailed, match="reports 'nonsense', which is no counter"):
        play([request("a")], [it(1, finished=("a",))])


def test_the_iteration_of_a_refusal_is_the_clocks():
    with pytest.raises(OutcomeRefused, match="iteration 50: 'x' was never submitted"):
        Recorder([request("a")], 4).add(50, it(1, finished=("x",)))


def test_an_engine_that_stops_early_is_an_error():
    with pytest.raises(EngineFailed, match="no work left, but 'b' never finished"):
        play([request("a"), request("b")], [it(1, finished=("a",))])


def test_a_text_of_the_wrong_length_is_an_error():
    with pytest.raises(EngineFailed, match="'a' finished with 2 tokens of 1"):
        play([request("a")], [it(1, finished=("a",))], texts={"a": Text((1, 2))})


def test_tokens_collected_and_then_lost_are_an_error():
    with pytest.raises(EngineFailed, match="reported 2 tokens collected, its texts hold 1"):
        play([request("a")], [it(1), it(1, finished=("a",))])
