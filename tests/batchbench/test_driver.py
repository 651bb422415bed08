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


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({"free_blocks": 9}, "9 blocks are free in a pool of 8"),
        ({"running": 3}, "3 requests run in 2 slots"),
        ({"running": 2, "waiting": 2}, "4 requests run or wait, but 3 have arrived and not finished"),
        ({"waiting": 4}, "4 requests run or wait, but 3 have arrived and not finished"),
    ],
)
def test_a_state_that_cannot_be_is_refused(state, why):
    requests = [request("a", 2), request("b", 2), request("c", 2), request("later", arrival=9)]
    with pytest.raises(OutcomeRefused, match=f"^iteration 0: {why}$"):
        play(requests, [it(2, **state)])


def test_who_has_finished_neither_runs_nor_waits():
    with pytest.raises(OutcomeRefused, match="iteration 0: 1 requests run or wait, but 0 have arrived and not"):
        play([request("a")], [it(1, finished=("a",), running=1)])


def books(positions, rebuilt, shared=None, evicted=("a",)):
    """A prompt of 3 and an output of 2: 4 positions. It resumes in the last iteration."""
    return [
        it(1, forward_tokens=3, recomputed_tokens=0, rebuilt_tokens=0, shared_tokens=shared),
        it(1, forward_tokens=positions, recomputed_tokens=rebuilt, rebuilt_tokens=rebuilt, preempted=evicted,
           shared_tokens=None if shared is None else 0, finished=("a",)),
    ]  # fmt: skip


def test_every_position_is_computed_for_the_first_time_once():
    a = [request("a", 2, prompt=3)]
    assert play(a, books(1, 0)).forward_tokens == 4
    assert play(a, books(4, 3)).forward_tokens == 7
    with pytest.raises(OutcomeRefused, match="have 4 positions.* forwarded 7, of these 0 again.*: 3 are too many"):
        play(a, books(4, 0))
    with pytest.raises(OutcomeRefused, match="forwarded 6, of these 3 again.*: 1 are missing"):
        play(a, books(3, 3))
    with pytest.raises(OutcomeRefused, match="found 2 that others had computed: 2 are too many"):
        play(a, books(1, 0, shared=2))


def test_nobody_recomputes_who_was_not_evicted():
    with pytest.raises(OutcomeRefused, match="nobody was evicted, but 3 positions are recomputed"):
        play([request("a", 2, prompt=3)], books(4, 3, evicted=()))


def test_books_that_are_not_told_are_not_held():
    """No forward_tokens: one a row, whatever the prompt."""
    assert play([request("a", 2, prompt=3)], [it(1), it(1, finished=("a",))]).forward_tokens == 2


@pytest.mark.parametrize("member", ["submit", "step", "take"])
def test_what_an_engine_raises_is_named_with_its_place(monkeypatch, member):
    def broken(self, *arguments):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(ScriptedEngine, member, broken)
    with pytest.raises(EngineFailed, match=rf"^pool 8, iteration \d: {member} raised ZeroDivisionError: by zero$") as e:
        play([request("a")], [it(1, finished=("a",))])
    assert isinstance(e.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(("member", "what"), [("step", "IterationOutcome"), ("take", "Text for 'a'")])
def test_what_an_engine_returns_has_its_type(monkeypatch, member, what):
    monkeypatch.setattr(ScriptedEngine, member, lambda self, *arguments: (1,))
    with pytest.raises(EngineFailed, match=f"{member} returned no {what}"):
        play([request("a")], [it(1, finished=("a",))])


@pytest.mark.parametrize("token", [-1, 0.5, 0.0, None, True, "a"])
def test_token_ids_are_whole_numbers(token):
    with pytest.raises(EngineFailed, match="'a' has a token id .*, which is no whole number from 0"):
        play([request("a")], [it(1, finished=("a",))], texts={"a": Text((token,))})
