"""The schedule's rules, one by one, without a model."""

from __future__ import annotations

import pytest

from engine.config import SchedulerConfig
from engine.errors import ConfigError, EngineError, RequestRefused
from engine.plan import TableUpdate
from engine.scheduler import Scheduler
from tests.helpers import assert_whole, bare_engine, drain, take_all


def submit(engine, *lengths):
    for number, (prompt, output) in enumerate(lengths):
        engine.submit(f"r{number}", [1] * prompt, output)


def test_one_request_prefills_once_then_decodes():
    engine = bare_engine(slots=1, pool_blocks=4)
    submit(engine, (5, 3))
    steps = drain(engine)
    assert [s.forward_tokens for s in steps] == [5, 1, 1]
    assert [s.prefill_rows for s in steps] == [1, 0, 0]
    assert [list(s.finished) for s in steps] == [[], [], ["r0"]]
    assert len(engine.take("r0").token_ids) == 3
    assert_whole(engine.scheduler)


def test_a_prompt_that_exactly_fills_its_blocks_grows_on_the_next_iteration():
    engine = bare_engine(slots=1, pool_blocks=3)
    submit(engine, (8, 3))
    assert engine.step().free_blocks == 1
    assert engine.step().free_blocks == 0


def test_the_last_token_is_sampled_but_needs_no_block():
    engine = bare_engine(slots=1, pool_blocks=2)
    submit(engine, (5, 4))  # 8 positions of K/V for 9 tokens
    assert len(drain(engine)) == 4


@pytest.mark.parametrize(
    ("prompt", "output", "needed"),
    [(5, 5, 3), (9, 1, 3), (100, 1, 25)],
)
def test_a_request_that_cannot_fit_an_empty_pool_is_refused_with_the_pool_that_would_do(prompt, output, needed):
    engine = bare_engine(slots=1, pool_blocks=2)
    with pytest.raises(RequestRefused, match=f"'big'.*smallest pool that holds it is {needed} blocks"):
        engine.submit("big", [1] * prompt, output)
    assert not engine.has_work
    fits = bare_engine(slots=1, pool_blocks=needed)
    fits.submit("big", [1] * prompt, output)
    assert len(drain(fits)) == output


@pytest.mark.parametrize(("prompt", "output"), [(0, 4), (4, 0), (4, -1)])
def test_an_empty_prompt_or_output_is_refused(prompt, output):
    with pytest.raises(RequestRefused, match="at least one prompt token and one output token"):
        bare_engine(1, 4).submit("r", [1] * prompt, output)


def test_an_id_in_use_is_refused_and_free_again_once_taken():
    engine = bare_engine(1, 4)
    engine.submit("r", [1], 1)
    with pytest.raises(RequestRefused, match="'r': the id is in use"):
        engine.submit("r", [1], 1)
    drain(engine)
    engine.take("r")
    engine.submit("r", [1], 1)


def test_the_youngest_running_request_is_evicted_and_resumes_at_the_head():
    engine = bare_engine(slots=2, pool_blocks=3, block_size=2)
    submit(engine, (2, 3), (2, 3), (1, 1))
    first = engine.step()
    assert (first.running, first.waiting) == (2, 1)
    second = engine.step()  # r0 takes the last block, r1 gives way; r2 does not overtake it
    assert [e.request_id for e in second.evicted] == ["r1"]
    assert [r.request_id for r in engine.scheduler.waiting] == ["r1", "r2"]
    assert second.issued_tokens == 1


def test_a_grower_that_is_itself_the_youngest_gives_way():
    engine = bare_engine(slots=2, pool_blocks=4, block_size=2)
    submit(engine, (3, 4), (4, 2))
    engine.step()  # r0 has 2 blocks for 4 tokens, r1 2 blocks for 5: only r1 must grow, and nothing is free
    step = engine.step()
    assert [(e.request_id, e.cached_tokens, e.freed_blocks) for e in step.evicted] == [("r1", 4, 2)]
    assert [a.request_id for a in step.admitted] == []  # three blocks are needed, two are free
    drain(engine)


def test_the_oldest_is_never_evicted():
    engine = bare_engine(slots=6, pool_blocks=8)
    submit(engine, *[(5, 24)] * 6)
    assert "r0" not in {e.request_id for step in drain(engine) for e in step.evicted}


def test_admission_stops_at_the_first_that_does_not_fit_even_if_a_later_one_would():
    engine = bare_engine(slots=3, pool_blocks=4, block_size=1)
    submit(engine, (2, 2), (3, 1), (1, 1))
    step = engine.step()
    assert [a.request_id for a in step.admitted] == ["r0"]
    assert step.free_blocks == 2


def test_resumed_positions_are_counted_whole_and_rebuilt_below_the_frontier():
    engine = bare_engine(slots=2, pool_blocks=3, block_size=2)
    submit(engine, (2, 3), (2, 3))
    drain(engine)
    assert engine.prefill_rows == 3
    assert engine.recomputed_tokens == 3  # two prompt tokens and the one generated
    assert engine.rebuilt_tokens == 2
    assert engine.forward_tokens == 2 * (2 + 3 - 1) + 2
    assert engine.recompute_fraction == 3 / 10


def test_a_resume_is_a_resume_even_if_only_one_position_was_lost():
    engine = bare_engine(slots=2, pool_blocks=3, block_size=1)
    submit(engine, (2, 2), (1, 2))
    drain(engine)
    assert (engine.recomputed_tokens, engine.rebuilt_tokens) == (2, 1)


def test_the_watermark_holds_admission_back_while_others_run_but_growth_ignores_it():
    engine = bare_engine(slots=2, pool_blocks=4, block_size=2, watermark_blocks=2)
    submit(engine, (2, 5), (3, 1))
    steps = drain(engine)
    assert [a.request_id for a in steps[0].admitted] == ["r0"]  # r1 fits the pool, not the watermark
    assert steps[1].free_blocks == 2 and steps[3].free_blocks == 1  # r0 grew into it
    assert [a.request_id for a in steps[5].admitted] == ["r1"]
    assert not engine.recomputed_tokens


def test_growth_takes_watermark_blocks_while_others_run():
    engine = bare_engine(slots=2, pool_blocks=6, block_size=2, watermark_blocks=2)
    submit(engine, (2, 5), (2, 5))
    steps = drain(engine)
    assert [s.free_blocks for s in steps] == [4, 2, 2, 0, 6]
    assert not any(s.evicted for s in steps)


def test_a_watermark_larger_than_the_pool_delays_but_excludes_nobody():
    engine = bare_engine(slots=4, pool_blocks=3, watermark_blocks=100)
    submit(engine, (5, 4), (5, 4), (12, 1))
    steps = drain(engine)
    assert max(s.issued_tokens for s in steps) == 1
    assert len(take_all(engine, ["r0", "r1", "r2"])) == 3


def test_a_request_that_outgrew_what_the_watermark_leaves_returns_once_the_pool_drains():
    engine = bare_engine(slots=2, pool_blocks=6, block_size=4, watermark_blocks=3)
    submit(engine, (1, 20), (8, 12))
    steps = drain(engine, limit=200)
    (evicted_at,) = [i for i, s in enumerate(steps) if s.evicted]
    (resumed_at,) = [i for i, s in enumerate(steps) for a in s.admitted if a.resumed]
    # r1 has 16 tokens by then, 4 blocks, more than the 6 - 3 that admission may take while r0 runs.
    assert [(e.request_id, e.generated_tokens) for e in steps[evicted_at].evicted] == [("r1", 8)]
    assert "r0" in steps[resumed_at - 1].finished
    assert_whole(engine.scheduler)


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"token_budget": 4},
        {"reclaim": "swap", "swap_blocks": 9},
        {"reclaim": "swap", "swap_blocks": 2},  # too small for the victim
        {"prefix_cache": True},
        {"prefix_cache": True, "token_budget": 4, "reclaim": "swap", "swap_blocks": 9},
        {"rules": "vllm-v1"},
        {"rules": "vllm-v1", "token_budget": 4, "admission_gate": "first-chunk"},
    ],
    ids=str,
)
def test_the_watermark_deadlocks_nobody_under_any_mechanism(choices):
    """The victim's context is more than admission may take beside r0: it waits for r0 to end, and comes back then."""
    engine = bare_engine(slots=2, pool_blocks=6, block_size=4, watermark_blocks=3, **choices)
    engine.submit("r0", [1], 20)
    engine.submit("r1", [2] * 8, 12)
    steps = []
    while engine.has_work:
        steps.append(engine.step())
        if steps[-1].evicted:
            (victim,) = engine.scheduler.waiting
            assert victim.request_id == "r1" and engine.config.blocks_for(victim.num_tokens) > 6 - 3
        assert len(steps) < 200
    assert sum(len(step.evicted) for step in steps) == 1
    (resumed_at,) = [i for i, step in enumerate(steps) for a in step.admitted if a.resumed]
    assert "r0" in steps[resumed_at - 1].finished
    assert {name: len(output.token_ids) for name, output in take_all(engine, ["r0", "r1"]).items()} == {
        "r0": 20, "r1": 12,
    }  # fmt: skip
    assert_whole(engine.scheduler)


def test_slots_bound_the_rows_and_return():
    engine = bare_engine(slots=2, pool_blocks=100)
    submit(engine, *[(3, 2)] * 5)
    steps = drain(engine)
    assert [s.issued_tokens for s in steps] == [2, 2, 2, 2, 1, 1]
    assert_whole(engine.scheduler)


def test_an_eviction_before_the_bought_block_is_full_is_thrash():
    engine = bare_engine(slots=2, pool_blocks=5, block_size=4)
    submit(engine, (12, 5), (5, 3))
    engine.step()
    step = engine.step()  # r0 needs a fourth block; r1 has 5 positions in blocks for 8
    (eviction,) = step.evicted
    assert (eviction.request_id, eviction.thrash, eviction.freed_blocks) == ("r1", True, 2)


def test_an_eviction_after_the_bought_block_is_full_is_not():
    engine = bare_engine(slots=2, pool_blocks=4, block_size=2)
    submit(engine, (4, 4), (4, 4))
    engine.step()
    (eviction,) = engine.step().evicted
    assert not eviction.thrash


def test_thrash_is_counted_for_each_stay_by_what_its_admission_bought():
    """r2 gives way to r0 with 5 positions in blocks for 8, and to r1 with 6; r1 had 11 where 8 were bought."""
    engine = bare_engine(slots=3, pool_blocks=5, block_size=4)
    submit(engine, (4, 6), (7, 8), (5, 4))
    evicted = {at: step.evicted for at, step in enumerate(drain(engine), start=1) if step.evicted}
    found = {at: [(e.request_id, e.cached_tokens, e.thrash) for e in events] for at, events in evicted.items()}
    assert found == {2: [("r2", 5, True)], 6: [("r1", 11, False)], 8: [("r2", 6, True)]}


@pytest.mark.parametrize("moment", ["waiting", "running", "preempted"])
def test_abort_returns_everything_at_any_moment(moment):
    engine = bare_engine(slots=2, pool_blocks=3, block_size=2)
    submit(engine, (2, 3), (2, 3), (1, 1))
    victim = {"waiting": "r2", "running": "r0", "preempted": "r1"}[moment]
    engine.step()
    if moment == "preempted":
        assert [e.request_id for e in engine.step().evicted] == ["r1"]
    engine.abort(victim)
    rest = {"r0", "r1", "r2"} - {victim}
    finished = {r for step in drain(engine) for r in step.finished}
    assert finished == rest
    assert_whole(engine.scheduler)
    with pytest.raises(EngineError, match=f"unknown request '{victim}'"):
        engine.take(victim)
    take_all(engine, sorted(rest))
    assert not engine.scheduler.requests and not engine._gaps  # nothing that grows with time


def test_aborting_the_last_request_leaves_no_work():
    engine = bare_engine(1, 4)
    submit(engine, (3, 3))
    engine.step()
    engine.abort("r0")
    assert not engine.has_work
    assert_whole(engine.scheduler)


def test_a_request_is_taken_once_and_only_when_finished():
    engine = bare_engine(1, 4)
    submit(engine, (3, 2))
    with pytest.raises(EngineError, match="'r0' is waiting, not finished"):
        engine.take("r0")
    drain(engine)
    engine.take("r0")
    with pytest.raises(EngineError, match="unknown request 'r0'"):
        engine.take("r0")


def test_table_updates_name_what_each_slot_gains():
    scheduler = Scheduler(SchedulerConfig(slots=2, pool_blocks=4, block_size=2))
    scheduler.submit("r0", [1, 2], 3)
    plan = scheduler.schedule()
    assert list(plan.table_updates) == [TableUpdate(0, 0, [0])]
    assert list(plan.token_ids) == [1, 2]
    scheduler.apply(plan, [7])
    plan = scheduler.schedule()
    assert list(plan.table_updates) == [TableUpdate(0, 1, [1])]
    assert (list(plan.starts), list(plan.stops), list(plan.token_ids)) == ([2], [3], [7])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slots": 0}, "slots is 0, must be at least 1"),
        ({"pool_blocks": -1}, "pool_blocks is -1"),
        ({"block_size": 0}, "block_size is 0"),
        ({"watermark_blocks": -1}, "watermark_blocks is -1, must not be negative"),
    ],
)
def test_bad_settings_are_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(**({"slots": 1, "pool_blocks": 1, "block_size": 1} | settings))


def test_an_unknown_victim_rule_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="unknown victim rule 'eldest'; known: youngest"):
        Scheduler(SchedulerConfig(1, 1, 1, victim="eldest"))
