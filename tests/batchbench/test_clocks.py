"""The three clocks: what moves them, what they call a second, and who arrives when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batchbench import engine_factory
from batchbench.adapters.fake import FakeClock, ScriptedEngine
from batchbench.clocks import (
    FOREVER,
    NS,
    IterationClock,
    IterationCost,
    VirtualClock,
    WallClock,
    run_clock,
)
from batchbench.driver import Pacing, run_workload
from batchbench.errors import UsageError
from batchbench.protocol import RequestSpec, Text, Until
from batchbench.scenario import EngineSettings
from batchbench.service import Service
from tests.batchbench.scripted import decoding, it, request

TEXTLESS = engine_factory("schedule", EngineSettings(slots=2, block_size=4))(8).describe()
COMPUTES = replace(TEXTLESS, computes_text=True)


def takes(clock, seconds, outcome):
    """A step that takes that long on a clock."""

    def step():
        clock.now_s += seconds
        return outcome

    return step


# ---- iterations -----------------------------------------------------------------------------------


def test_the_clock_of_iterations_jumps_where_nobody_has_work_and_never_goes_back():
    clock = IterationClock(FakeClock(), TEXTLESS)
    clock.wait(50)
    assert (clock.now, clock.iteration) == (50, 50)
    clock.wait(7)
    assert clock.now == 50
    clock.run(lambda: it(1))
    assert clock.now == 51
    assert clock.advanced(decoding(9, 2)) == ()
    assert clock.now == 60


def test_its_seconds_are_those_inside_the_engine_alone():
    read = FakeClock()
    clock = IterationClock(read, COMPUTES)
    clock.run(takes(read, 0.5, it(1)))
    read.now_s += 100  # the harness at work
    clock.wait(50)
    clock.run(takes(read, 0.25, it(1)))
    assert (clock.start_ns, clock.end_ns, clock.iteration) == (NS // 2, 3 * NS // 4, 51)


def test_its_seconds_mean_something_only_where_something_is_computed():
    assert IterationClock(FakeClock(), COMPUTES).timed
    assert not IterationClock(FakeClock(), TEXTLESS).timed


def test_every_iteration_takes_one_of_what_is_left_until_the_next_arrival():
    clock = IterationClock(FakeClock(), TEXTLESS)
    clock.wait(10)
    left, cost = clock.until(13)
    assert (left, cost(5, 70), cost(0, 0)) == (3, 1, 1)
    assert clock.until(None)[0] == FOREVER


# ---- modelled seconds -----------------------------------------------------------------------------

COST = IterationCost(base_ns=100, row_ns=10, position_ns=3)


def test_an_iteration_costs_its_base_its_rows_and_its_further_positions():
    assert COST.of(rows=4, positions=4) == 100 + 40
    assert COST.of(rows=4, positions=20) == 100 + 40 + 16 * 3
    assert COST.of(rows=0, positions=0) == 0
    assert IterationCost.of_seconds(0.02, 1e-4, 1.5e-6) == IterationCost(20_000_000, 100_000, 1_500)


@pytest.mark.parametrize("parts", [(0, 0, 5), (-1, 5, 0), (5, -1, 0), (5, 0, -1)])
def test_an_iteration_must_take_time(parts):
    with pytest.raises(UsageError, match="an iteration must take time"):
        IterationCost(*parts)


def test_modelled_time_is_an_exact_sum_of_integers():
    """A million of a double's 0.3 would not be."""
    clock = VirtualClock(IterationCost.of_seconds(0.1, 0.2))
    for _ in range(1000):
        clock.run(lambda: it(1))
    for _ in range(100):
        clock.advanced(decoding(10_000, 1))
    assert clock.now == clock.end_ns == (1000 + 10**6) * 300_000_000
    assert clock.iteration == 1000 + 10**6


def test_a_stretch_takes_what_its_iterations_take_one_by_one():
    one, all_at_once = VirtualClock(COST), VirtualClock(COST)
    for _ in range(7):
        one.run(lambda: it(3))
    assert all_at_once.advanced(decoding(7, 3)) == [130 * n for n in range(8)]
    assert (one.now, one.iteration) == (all_at_once.now, all_at_once.iteration) == (7 * 130, 7)


def test_waiting_sets_the_clock_to_the_arrival_and_never_back():
    clock = VirtualClock(COST)
    clock.wait(5_000)
    assert (clock.now, clock.iteration) == (5_000, 0)
    clock.wait(3)
    assert clock.now == 5_000
    clock.run(lambda: it(1))
    assert (clock.start_ns, clock.end_ns) == (5_000, 5_110)


@pytest.mark.parametrize(("until", "iterations"), [(1, 1), (119, 1), (120, 1), (121, 2), (240, 2), (241, 3)])
def test_a_batch_ends_with_the_last_iteration_that_begins_before_the_arrival(until, iterations):
    """Of 120 ns each: one that arrives in the middle of an iteration waits for its end."""
    engine = engine_factory("schedule", EngineSettings(slots=2, block_size=4))(64)
    for name in "ab":
        engine.submit(RequestSpec(name, (1,), 40))
    left, cost = VirtualClock(COST).until(until)
    assert len(engine.advance(Until(left, cost, 99))) == iterations
    assert VirtualClock(COST).until(None)[0] == FOREVER


def scheduled(requests, pacing, slots=2):
    """A schedule of those requests in a pool that holds them all."""
    engine = engine_factory("schedule", EngineSettings(slots=slots, block_size=4))(64)
    return run_workload(engine, requests, pacing=pacing)


@pytest.mark.parametrize(("arrival", "iteration"), [(0, 0), (1, 1), (113, 1), (114, 2), (223, 2), (224, 3), (333, 3)])
def test_who_arrives_during_an_iteration_joins_the_next(arrival, iteration):
    """The first request's prompt of two takes 113 ns, each further token 110; at an end is not during."""
    requests = [request("a", 5, 2), request("b", 1, 1, arrival=arrival)]
    timing = scheduled(requests, Pacing("virtual", COST))
    assert timing.record.arrived[1] == iteration
    assert timing.record.arrival_ns[1] == arrival


def test_idle_time_passes_and_nobody_pays_for_it():
    requests = [request("a", 2), request("b", 2, arrival=10**9)]
    timing = scheduled(requests, Pacing("virtual", COST))
    service = Service(timing)
    assert list(timing.record.start_ns) == [0, 110, 10**9, 10**9 + 110]
    assert (service.latency_s * NS).round().tolist() == [220, 220]
    assert list(timing.record.iterations) == [0, 1, 2, 3]  # no iteration passes
    assert timing.engine_s == 440 / NS


def test_a_follower_arrives_its_delay_after_the_end_of_the_last_token():
    requests = [request("a", 2), RequestSpec("b", (1,), 1, 1_000, after="a")]
    timing = scheduled(requests, Pacing("virtual", COST))
    assert list(timing.record.arrival_ns) == [0, 220 + 1_000]
    in_iterations = scheduled([requests[0], replace(requests[1], arrival=3)], None)
    assert list(in_iterations.record.arrived) == [0, 2 + 3]


def test_virtual_time_is_the_same_on_every_machine():
    """However fast this one is: the real clock is read for wall_s alone."""
    requests = [request("a", 50), request("b", 50, arrival=777)]
    slow = iter(range(0, 10**9, 1000))
    engine = engine_factory("schedule", EngineSettings(slots=2, block_size=4))(64)
    one = run_workload(engine, requests, pacing=Pacing("virtual", COST), clock=lambda: float(next(slow)))
    two = scheduled(requests, Pacing("virtual", COST))
    assert list(one.record.end_ns) == list(two.record.end_ns)
    assert one.latencies_s == two.latencies_s


# ---- real seconds ---------------------------------------------------------------------------------


class Sleeper:
    """A fake sleep that moves the fake clock, and oversleeps when told."""

    def __init__(self, clock, share=1.0):
        self._clock, self._share, self.slept = clock, share, []

    def __call__(self, seconds):
        self.slept.append(seconds)
        self._clock.now_s += seconds * self._share


def test_real_time_runs_from_the_start_of_the_run():
    read = FakeClock()
    read.now_s = 1000.0
    clock = WallClock(read, Sleeper(read))
    assert clock.now == 0
    read.now_s += 0.25
    assert clock.now == NS // 4
    clock.run(takes(read, 0.5, it(1)))
    assert (clock.start_ns, clock.end_ns, clock.iteration) == (NS // 4, 3 * NS // 4, 1)
    read.now_s += 1.0  # the harness at work, which is somebody's latency here
    clock.run(takes(read, 0.5, it(1)))
    assert (clock.start_ns, clock.end_ns) == (7 * NS // 4, 9 * NS // 4)


def test_it_sleeps_until_an_arrival_and_again_if_it_woke_early():
    read = FakeClock()
    sleep = Sleeper(read, share=0.5)
    clock = WallClock(read, sleep)
    clock.wait(NS)
    assert clock.now >= NS
    assert sleep.slept[:3] == [1.0, 0.5, 0.25]
    before = len(sleep.slept)
    clock.wait(NS // 2)  # over already
    assert len(sleep.slept) == before


def test_real_time_is_not_advanced():
    clock = WallClock(FakeClock(), Sleeper(FakeClock()))
    assert clock.until(None) is clock.until(10**12) is None
    with pytest.raises(AssertionError, match="real time is not advanced"):
        clock.advanced(decoding(1, 1))


class WorksOnDemand(ScriptedEngine):
    """A scripted engine that has work only while a request that was submitted has not finished."""

    def submit(self, request):
        super().submit(request)
        self.open = getattr(self, "open", 0) + 1

    def step(self):
        outcome = super().step()
        self.open -= len(outcome.finished)
        return outcome

    @property
    def has_work(self):
        return getattr(self, "open", 0) > 0


def real(monkeypatch, requests, script, step_s):
    """A run in fake real time: (timing, engine, sleeps)."""
    read = FakeClock()
    sleep = Sleeper(read)
    texts = {r.request_id: Text(tuple(range(r.output_tokens))) for r in requests}
    engine = WorksOnDemand(script, texts, slots=2, pool_blocks=8, clock=read, step_s=step_s)
    monkeypatch.setattr("batchbench.driver.run_clock", lambda name, cost, read, engine: WallClock(read, sleep))
    return run_workload(engine, requests, clock=read, pacing=Pacing("wall")), engine, sleep.slept


def test_under_wall_latency_runs_from_the_true_arrival(monkeypatch):
    """b arrives at 1.5 s, in the middle of a's second iteration, and is seen at its end; c after an idle while."""
    requests = [
        request("a", 2),
        request("b", 1, arrival=3 * NS // 2),
        request("c", 1, arrival=10 * NS),
    ]
    script = [
        it(1, began=("a",), paused=()),
        it(1, began=(), paused=(), finished=("a",)),
        it(1, began=("b",), paused=(), finished=("b",)),
        it(1, began=("c",), paused=(), finished=("c",)),
    ]
    timing, engine, slept = real(monkeypatch, requests, script, [1.0, 1.0, 0.5, 0.25])
    assert engine.submitted == [(0, "a"), (2, "b"), (3, "c")]
    assert slept == [7.5]  # from 2.5 s on; b was there by the time a had finished
    service = Service(timing)
    assert (service.arrival_ns / NS).tolist() == [0.0, 1.5, 10.0]
    assert service.latency_s.tolist() == [2.0, 2.5 - 1.5, 0.25]
    assert service.ttft_s.tolist() == [1.0, 1.0, 0.25]
    assert service.arrived.tolist() == [0, 2, 3]
    assert (timing.engine_s, timing.clock) == (2.75, "wall")


# ---- which clock ----------------------------------------------------------------------------------


def test_a_scenario_gets_the_clock_that_it_names():
    assert isinstance(run_clock("iterations", None, FakeClock(), TEXTLESS), IterationClock)
    assert isinstance(run_clock("virtual", COST, FakeClock(), TEXTLESS), VirtualClock)
    assert isinstance(run_clock("wall", None, FakeClock(), COMPUTES), WallClock)


def test_a_schedule_takes_no_real_time():
    with pytest.raises(UsageError, match="clock = 'wall': a schedule computes nothing, so it takes no real time"):
        scheduled([request("a")], Pacing("wall"))


def test_modelled_time_needs_a_model():
    with pytest.raises(UsageError, match="clock = 'virtual' needs what an iteration takes"):
        scheduled([request("a")], Pacing("virtual"))
