"""Pools in blocks, bytes and shares of the demand, and points of a sweep that change more than the pool."""

from __future__ import annotations

import pytest

from batchbench.adapters import engine_factory
from batchbench.demand import resolve_points, roomy_pool
from batchbench.driver import run_workload
from batchbench.errors import RequestRefused, ScenarioError, UsageError
from batchbench.protocol import Point, RequestSpec
from batchbench.scenario import EngineSettings, load_scenario
from batchbench.sweep import check_sweep, sweep_pool_sizes
from batchbench.timing import reference_timing

LENGTHS = [(5, 24), (9, 30), (17, 12), (3, 40), (8, 8), (21, 10), (6, 28), (12, 12)]
REQUESTS = [RequestSpec(f"r{n}", (n + 1,) * prompt, output) for n, (prompt, output) in enumerate(LENGTHS)]
SETTINGS = EngineSettings(slots=6, block_size=4)
HEAD = (
    'name = "x"\n[engine]\nslots = 6\nblock_size = 4\n[workload]\nrequests = 2\nprompt_tokens = 5\noutput_tokens = 8\n'
)


@pytest.fixture
def declared(tmp_path):
    def read(sweep):
        path = tmp_path / "x.toml"
        path.write_text(f"{HEAD}[sweep]\n{sweep}\n")
        return load_scenario(path).sweep

    return read


def schedule(settings=SETTINGS):
    return engine_factory("schedule", settings)


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"watermark_blocks": 3},
        {"victim": "oldest"},
        {"token_budget": 8},
        {"prefix_cache": True},
        {"batching": "static"},
        {"rules": "vllm-v1", "token_budget": 16},
        {"rules": "vllm-v1", "token_budget": 6, "admission_gate": "first-chunk"},
    ],
    ids=str,
)
def test_the_demand_is_the_smallest_pool_from_which_up_nothing_is_evicted(choices):
    make = schedule()
    found = roomy_pool(REQUESTS, make, tuple(choices.items()))
    assert run_workload(make(found - 1, **choices), REQUESTS).preemptions  # just below it
    for pool in range(found, found + 40):
        assert not run_workload(make(pool, **choices), REQUESTS).preemptions


@pytest.mark.parametrize(
    ("choices", "smallest"),
    [
        ({"admission": "reserve-output"}, 11),
        ({"admission": "reserve-max", "max_tokens": 50}, 13),
        ({"rules": "sglang"}, 11),  # not a reservation, but as careful with so few requests
    ],
    ids=str,
)
def test_where_no_pool_evicts_the_demand_is_the_smallest_that_takes_everybody(choices, smallest):
    assert roomy_pool(REQUESTS, schedule(), tuple(choices.items())) == smallest
    with pytest.raises(RequestRefused, match=f"the smallest pool that holds it is {smallest} blocks"):
        check_sweep(REQUESTS, [Point(smallest - 1, tuple(choices.items()))], schedule())


def test_pools_in_blocks_bytes_and_shares(declared):
    sweep = declared('pools = [18, "0.5x", "1x", "1.25x", "60KiB", "61000B", "0.06MB"]')
    points = resolve_points(sweep, REQUESTS, engine_factory("own", SETTINGS), schedule())
    # the embedded model keeps 768 bytes per position, so 3,072 per block; 1x is 32 blocks
    assert [point.pool_blocks for point in points] == [18, 16, 32, 40, 20, 19]


def test_bytes_need_an_engine_that_says_what_a_position_takes(declared):
    with pytest.raises(UsageError, match="'schedule' does not say what a position takes; give blocks"):
        resolve_points(declared('pools = ["1MiB"]'), REQUESTS, schedule(), schedule())
    with pytest.raises(UsageError, match="a pool of 10B has no block: one takes 3072 bytes"):
        resolve_points(declared('pools = ["10B"]'), REQUESTS, engine_factory("own", SETTINGS), schedule())


def test_lists_of_values_are_a_product_and_pools_vary_fastest(declared):
    sweep = declared('pools = [8, 9]\nvictim = ["youngest", "oldest"]\nprefix_cache = [false, true]')
    labels = [f"{Point(pool, choices).name}" for pool, choices in sweep.declared]
    assert labels == [
        "pool 8, victim youngest, prefix_cache off", "pool 9, victim youngest, prefix_cache off",
        "pool 8, victim youngest, prefix_cache on", "pool 9, victim youngest, prefix_cache on",
        "pool 8, victim oldest, prefix_cache off", "pool 9, victim oldest, prefix_cache off",
        "pool 8, victim oldest, prefix_cache on", "pool 9, victim oldest, prefix_cache on",
    ]  # fmt: skip


def test_points_have_their_own_pool_or_all_of_them(declared):
    sweep = declared('pools = [8, 9]\npoints = [{pool = 7}, {victim = "oldest"}, {pool = "1x", slots = 2}]')
    assert sweep.declared == [
        (7, ()),
        (8, (("victim", "oldest"),)),
        (9, (("victim", "oldest"),)),
        ("1x", (("slots", 2),)),
    ]


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ('victim = ["youngest"]', "sweep: pools is missing"),
        ('points = [{victim = "oldest"}]', "points.0 has no pool, and there are no pools"),
        ("pools = [8]\npoints = [{pool = 7}]", "every one of points has a pool of its own"),
        ('pools = [8]\nslots = [2]\npoints = [{victim = "oldest"}]', "not both: there is slots, too"),
        ('pools = [8]\nvictim = ["oldest", "oldest"]', "victim oldest is listed twice"),
        ("pools = [8]\nvictims = ['oldest']", "unknown key 'sweep.victims', did you mean 'sweep.victim'"),
        ("points = [{pools = 7}]", "unknown key 'sweep.points.0.pools', did you mean 'sweep.points.0.pool'"),
        ("pools = ['-1x']", r'sweep.pools.0: must be a number of blocks, bytes such as "512MiB", or .*, got .-1x'),
        ("pools = ['1 GiB']", "sweep.pools.0: must be a number of blocks"),
        ("pools = [1.5]", "sweep.pools.0: must be an integer, got 1.5"),
        ("pools = [8]\nprefix_cache = [1]", "sweep.prefix_cache.0: .*got 1"),
        ("pools = [8]\nslots = []", "sweep.slots: must not be empty"),
    ],
)
def test_a_sweep_that_makes_no_sense_is_refused(declared, sweep, message):
    with pytest.raises(ScenarioError, match=message):
        declared(sweep)


def test_a_contradiction_names_its_point():
    points = [Point(40), Point(40, (("reclaim", "swap"),))]
    with pytest.raises(UsageError, match="reclaim swap: reclaim = 'swap' with swap_blocks = 0"):
        check_sweep(REQUESTS, points, schedule())
    with pytest.raises(UsageError, match=r"pool of 40 blocks \(slots 2\) is listed twice"):
        check_sweep(REQUESTS, [Point(40, (("slots", 2),))] * 2, schedule())
    with pytest.raises(
        RequestRefused, match="block_size 2: request 'r1': .* the smallest pool that holds it is 19 blocks"
    ):
        check_sweep(REQUESTS, [Point(18), Point(18, (("block_size", 2),))], schedule())


def test_each_point_runs_its_own_engine_and_all_texts_agree():
    points = [
        Point(32),
        Point(18),
        Point(18, (("reclaim", "swap"), ("swap_blocks", 40))),
        Point(36, (("block_size", 2), ("slots", 3))),
        Point(18, (("prefix_cache", True), ("token_budget", 8))),
    ]
    timings = sweep_pool_sizes(REQUESTS, points, engine_factory("own", SETTINGS, audit=True))
    assert len({timing.text_digest for timing in timings}) == 1
    assert [timing.point for timing in timings] == points
    assert [timing.engine.slots for timing in timings] == [6, 6, 6, 3, 6]
    assert [timing.engine.reclaim for timing in timings] == ["recompute"] * 2 + ["swap"] + ["recompute"] * 2
    assert timings[2].preemptions and timings[2].recomputed_tokens == 0 and timings[2].swapped_tokens > 0
    # the reference of the swapping pool is the roomy one; others' choices matter without an eviction too
    assert [reference_timing(timings, timing) for timing in timings[:3]] == [timings[0]] * 3
    assert reference_timing(timings, timings[4]) is None


def test_the_demand_of_static_batches_counts_members_that_keep_their_blocks_when_they_have_ended():
    settings = EngineSettings(slots=2, block_size=2, batching="static")
    requests = [RequestSpec("a", (1,), 5, 2), RequestSpec("b", (2,), 1, 2)]
    assert roomy_pool(requests, schedule(settings)) == 4
    assert run_workload(schedule(settings)(3), requests).preemptions == 1


def test_shares_that_meet_are_run_once(declared):
    sweep = declared('pools = ["1x", "1.01x", "32.0x", 40]\nprefix_cache = [false, true]')
    points = resolve_points(sweep, REQUESTS, schedule(), schedule())
    assert [point.pool_blocks for point in points] == [32, 33, 1024, 40] * 2
    again = resolve_points(declared('pools = [32, "1x", "0.99x"]'), REQUESTS, schedule(), schedule())
    assert [point.pool_blocks for point in again] == [32]


@pytest.mark.parametrize(
    ("pool", "message"),
    [("0x", "a pool of 0x has no block$"), ("999999999x", "999999999x is 31999999968 blocks, more than 2147483647")],
)
def test_shares_of_nothing_or_of_everything_are_refused(declared, pool, message):
    with pytest.raises(UsageError, match=message):
        resolve_points(declared(f'pools = ["{pool}"]'), REQUESTS, schedule(), schedule())


def test_a_schedule_of_more_blocks_than_any_server_has_is_refused_at_once():
    with pytest.raises(UsageError, match="2147483647 are more than 20000000"):
        check_sweep(REQUESTS, [Point(2**31 - 1)], schedule())


def test_an_axis_of_reclaims_takes_the_swap_pool_of_the_scenario_where_it_swaps():
    settings = EngineSettings(slots=6, block_size=4, swap_blocks=40)
    points = [Point(18, (("reclaim", "recompute"),)), Point(18, (("reclaim", "swap"),))]
    timings = sweep_pool_sizes(REQUESTS, points, schedule(settings))
    assert [timing.engine.swap_blocks for timing in timings] == [0, 40]
    assert [timing.swapped_tokens > 0 for timing in timings] == [False, True]
