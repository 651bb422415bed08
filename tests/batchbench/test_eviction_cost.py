"""Predicted against measured: the arithmetic on tables made by hand, and the command on a result."""

from __future__ import annotations

import json
import math

import pyarrow as pa
import pytest

from batchbench.calibration import save_calibration
from batchbench.errors import ResultError, UsageError
from batchbench.eviction_cost import at_rows, decode_step_s, eviction_costs, point_costs, require_same_engine
from batchbench.results import Result
from batchbench.schema import TABLES, arrow_schema
from tests.batchbench.test_calibration import calibration
from tests.batchbench.test_cli import assert_refused, here, invoke, scenario  # noqa: F401  # a fixture

ENGINE = {"slots": 4, "model": "tiny", "dtype": "float32", "block_size": 4, "device": "cpu", "threads": 1}


def iteration(number, rows, step_s, **counts):
    zero = dict.fromkeys(("prefill_rows", "preemptions", "swapped_out_tokens", "swapped_in_tokens"), 0)
    return {"iteration": number, "issued_tokens": rows, "step_s": step_s, **zero, **counts}


def prefill(number, name, positions, resumed=True):
    return {"iteration": number, "request_id": name, "positions": positions, "resumed": resumed}


def eviction(number, name, cached, reclaim="recompute", rebuilt=None, recovered=0):
    rebuilt = cached if rebuilt is None else rebuilt
    return {"iteration": number, "request_id": name, "cached_tokens": cached, "reclaim": reclaim,
            "rebuilt_tokens": rebuilt, "recovered_tokens": recovered}  # fmt: skip


def result(iterations, prefills, evictions, copy_s=0.0):
    rows = {"iterations": iterations, "prefills": prefills, "evictions": evictions, "pools": [{"copy_s": copy_s}]}
    arrow = {}
    for name in TABLES:
        schema = pa.schema([field.with_nullable(True) for field in arrow_schema(name)])
        found = [{"point": 0, "pool_blocks": 8, "choices": "", **row} for row in rows.get(name, [])]
        arrow[name] = pa.Table.from_pylist(found, schema=schema)
    return Result({"engine": ENGINE, "scenario": {"name": "x"}}, arrow)


DECODES = [iteration(0, 3, 0.010), iteration(1, 3, 0.012), iteration(2, 3, 0.011), iteration(3, 1, 0.005)]
RESUME = iteration(4, 3, 0.0155, prefill_rows=1)


def test_a_resume_costs_what_its_iteration_took_beyond_a_decode_of_as_many_rows():
    found = result([*DECODES, RESUME], [prefill(4, "a", 11)], [eviction(3, "a", 10)])
    (one,) = eviction_costs(found, calibration())
    assert one.measured_ms == pytest.approx(4.5)
    assert (one.predicted_ms, one.tokens, one.extrapolated) == (4.0, 10, False)
    (total,) = point_costs(found, [one])
    assert (total.evictions, total.unmeasured) == (1, 0)
    assert total.ratio == pytest.approx(4.0 / 4.5)


def test_two_resumes_of_one_iteration_share_its_extra_time_by_positions():
    found = result(
        [*DECODES, iteration(4, 3, 0.021, prefill_rows=2)],
        [prefill(4, "a", 3), prefill(4, "b", 7)],
        [eviction(2, "a", 2), eviction(2, "b", 6)],
    )
    assert [one.measured_ms for one in eviction_costs(found, calibration())] == pytest.approx([3.0, 7.0])


def test_a_resume_in_chunks_is_summed_until_its_next_eviction():
    found = result(
        [*DECODES, *(iteration(n, 3, 0.011 + n / 1000, prefill_rows=1) for n in (4, 5, 7))],
        [prefill(4, "a", 4), prefill(5, "a", 4), prefill(7, "a", 9)],
        [eviction(3, "a", 7), eviction(6, "a", 8)],
    )
    assert [one.measured_ms for one in eviction_costs(found, calibration())] == pytest.approx([9.0, 7.0])


@pytest.mark.parametrize(
    ("beside", "rows"),
    [({}, [prefill(4, "new", 5, resumed=False)]), ({"swapped_in_tokens": 4}, []), ({"swapped_out_tokens": 4}, [])],
)
def test_what_cannot_be_told_apart_is_left_out_of_both_sums(beside, rows):
    mixed = iteration(4, 3, 0.020, prefill_rows=1 + len(rows), **beside)
    found = result([*DECODES, mixed], [prefill(4, "a", 11), *rows], [eviction(3, "a", 10)])
    costs = eviction_costs(found, calibration())
    assert costs[0].measured_ms is None
    (total,) = point_costs(found, costs)
    assert (total.unmeasured, total.predicted_ms, total.measured_ms, total.ratio) == (1, None, None, None)


def test_swaps_are_compared_by_their_pools_copy_time():
    events = [eviction(0, "a", 4, "swap", rebuilt=0), eviction(1, "b", 16, "swap", rebuilt=0)]
    found = result(DECODES, [], events, copy_s=0.018)
    costs = eviction_costs(found, calibration())
    assert [(one.predicted_ms, one.measured_ms) for one in costs] == [(3.0, None), (6.0, None)]
    (total,) = point_costs(found, costs)
    assert (total.predicted_ms, total.measured_ms, total.ratio) == (9.0, 18.0, 0.5)
    (unknown,) = point_costs(result(DECODES, [], events, copy_s=None), costs)
    assert (unknown.unmeasured, unknown.ratio) == (2, None)


def test_positions_found_in_the_prefix_cache_are_attended_to_but_not_computed():
    found = result([*DECODES, RESUME], [prefill(4, "a", 11)], [eviction(3, "a", 20, rebuilt=10, recovered=10)])
    (one,) = eviction_costs(found, calibration())
    assert (one.tokens, one.predicted_ms) == (10, 8.0)
    longer = result([*DECODES, RESUME], [prefill(4, "a", 11)], [eviction(3, "a", 21)])
    assert eviction_costs(longer, calibration(copies=((1, 3.0), (9, 6.0))))[0].extrapolated


def test_the_decode_between_two_measured_counts_of_rows():
    step_s = decode_step_s([*DECODES, RESUME, iteration(9, 0, 1.0), iteration(8, 3, 9.0, preemptions=1)])
    assert step_s == {1: 0.005, 3: 0.011}
    assert at_rows(step_s, 3) == 0.011
    assert at_rows(step_s, 2) == pytest.approx(0.008)
    assert (at_rows(step_s, 9), at_rows({2: 0.5}, 1), at_rows({}, 1)) == (0.011, 0.5, None)


def test_a_ledger_that_does_not_say_is_refused():
    unknown = {**eviction(3, "a", 10), "reclaim": None}
    with pytest.raises(ResultError, match="does not report what became of a victim's K/V"):
        eviction_costs(result(DECODES, [], [unknown]), calibration())
    unknown = {**eviction(3, "a", 10), "rebuilt_tokens": None}
    with pytest.raises(ResultError, match="does not report what its resumes computed again"):
        eviction_costs(result(DECODES, [], [unknown]), calibration())


def test_a_result_of_another_engine_is_refused():
    with pytest.raises(UsageError, match="measured with dtype bfloat16"):
        require_same_engine(result([], [], []), calibration(dtype="bfloat16"), "c.json")
    schedule = Result({"engine": {**ENGINE, "device": "none"}}, {})
    with pytest.raises(UsageError, match="nothing was measured"):
        require_same_engine(schedule, calibration(), "c.json")
    with pytest.raises(ResultError, match="has no one model of its engine"):
        require_same_engine(Result({"engine": {"slots": 1}}, {}), calibration(), "c.json")


def test_the_command_reports_every_pool_and_how_far_it_is_off(here):  # noqa: F811
    name = scenario(here, ("[engine]", '[engine]\ndevice = "cpu"'))
    assert invoke("sweep", name, "--out", "out", "--no-progress").exit_code == 0
    save_calibration(calibration(resumes=((10, 4e6), (20, 8e6))), here / "c.json")  # nothing is as slow as that
    asked = ("cost", "--result", "out", "--calibration", "c.json")
    done = invoke(*asked, "--plot", "c.png")
    assert done.exit_code == 0, done.output
    assert "pool 8, recompute: overpredicted" in done.stdout
    assert "measured, recompute: step_s of the iterations" in done.stdout
    assert (here / "c.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads(invoke(*asked, "--format", "json").stdout)
    assert [pool["pool_blocks"] for pool in document["points"]] == [32, 24, 16, 12, 8]
    assert sum(pool["evictions"] for pool in document["points"]) == len(document["evictions"]) == 25
    for pool in document["points"]:
        own = [e for e in document["evictions"] if e["pool_blocks"] == pool["pool_blocks"] and e["measured_ms"]]
        assert pool["measured_ms"] == pytest.approx(math.fsum(e["measured_ms"] for e in own))
    assert invoke(*asked, "--format", "markdown").stdout.startswith("| pool | reclaim | evictions |")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--result", "out"), "--result needs --calibration"),
        (("--result", "out", "--calibration", "c.json", "--tokens", "5"), "--result and --tokens do not go together"),
        (("--calibration", "gone.json"), "calibration gone.json: No such file"),
        (("--calibration", "c.json", "--layers", "3"), "--layers and --calibration do not go together"),
        (("--calibration", "c.json", "--bandwidth", "1"), "--bandwidth and --calibration do not go together"),
        (("--bandwidth", "0"), "--bandwidth is 0.0, must be a finite number above 0"),
        (("--ms-per-token", "nan"), "--ms-per-token is nan, must be a finite number above 0"),
        (("--layers", "3"), "--kv-heads, --head-size, --element-bytes missing"),
        (("--layers", "3", "--bytes-per-token", "3"), "--bytes-per-token and --layers both say it"),
        (("--plot", "no/c.png"), "figure no/c.png: No such file"),
    ],
)
def test_usage_errors_of_cost(here, arguments, said):  # noqa: F811
    assert_refused(invoke("cost", *arguments), here, said)
