"""Gates: what is counted compares exactly, what is measured is tested, and nothing passes by accident."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbench import Admission, Eviction, Prefill
from batchbench.comparing import changed_settings, compare
from batchbench.counted_rows import first_difference
from batchbench.errors import UsageError
from batchbench.gate_formats import as_annotations, as_document, as_junit, as_markdown, figures_of, in_markdown
from batchbench.gate_rules import Demands, Limit, Rule, load_demands, parse_rule
from batchbench.gating import EXIT_CODES, Finding, judge, verdict_of
from batchbench.measures import Measures, counted_columns, kind_of
from batchbench.repetitions import measured
from batchbench.results import load_result
from batchbench.schema import TABLES
from batchbench.significance import Shown, against_baseline, against_limit, difference, rank_tests
from tests.batchbench.scripted import Saves, it, play, request, result_of
from tests.batchbench.test_cli import DAY34, invoke, scenario

RUN = {
    "scenario": {"name": "x", "clock": "iterations"},
    "workload_hash": "w",
    "engine": {"engine": "scripted", "model": "m", "device": "cpu"},
    "machine": {"system": "s", "processor": "p", "cores": 2},
}
SCRIPT = [it(2), it(1, preempted=("b",), evictions=(Eviction("b", generated_tokens=1),)), it(2, finished=("a", "b"))]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """day34 by the schedule alone: as it is, and with a watermark."""
    folder = tmp_path_factory.mktemp("gate")
    (folder / "x.toml").write_text(DAY34.read_text())
    (folder / "y.toml").write_text(DAY34.read_text().replace("watermark_blocks = 0", "watermark_blocks = 2"))
    for name, out in (("x", "a"), ("y", "b"), ("x", "c")):
        done = invoke("sweep", str(folder / f"{name}.toml"), "--engine", "schedule", "--out", str(folder / out),
                      "--no-plots", "--no-progress")  # fmt: skip
        assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(scope="module")
def day34(results):
    return load_result(results / "a")


def measured_result(folder, engine_s=None, clock="iterations", run=None, **columns):
    """A point of which every repetition is told by hand."""
    saves = Saves(folder)
    timing = play([request("a", 3), request("b", 2)], SCRIPT, tables=saves, step_s=[1.0] * 3)
    rows = [measured(timing) | {"engine_s": value, **columns} for value in engine_s or ()]
    timing = replace(timing, repetitions=tuple(rows), clock=clock)
    saves.on_timing(timing)
    saves.writer.join([timing], {**RUN, "scenario": {"name": "x", "clock": clock}, **(run or {})})
    return load_result(folder)


def hold(result, bound, text, baseline=None, **options):
    return judge(result, Demands((parse_rule(bound, text),)), baseline, **options)


def verdicts(*arguments, **options):
    return [finding.verdict for finding in hold(*arguments, **options)]


# ---- rules -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bound", "text", "rule"),
    [
        ("max", "recompute_fraction=0.30", Rule("max", "recompute_fraction", Limit(Fraction(3, 10)))),
        ("min", "occupancy@12=1e-1", Rule("min", "occupancy", Limit(Fraction(1, 10)), 12)),
        ("max", "preemptions=3@12:victim oldest", Rule("max", "preemptions", Limit(Fraction(3)), 12, "victim oldest")),
        ("max_increase", "wall_s=5%", Rule("max_increase", "wall_s", Limit(Fraction(1, 20), True))),
        ("max_decrease", "occupancy = 0", Rule("max_decrease", "occupancy", Limit(Fraction(0)))),
        ("equal", "preemptions@8", Rule("equal", "preemptions", None, 8)),
        ("equal", "preemptions@:rules sglang", Rule("equal", "preemptions", None, None, "rules sglang")),
    ],
)
def test_a_rule_is_metric_limit_and_points(bound, text, rule):
    assert parse_rule(bound, text) == rule


@pytest.mark.parametrize(
    ("bound", "text", "message"),
    [
        ("max", "recompute_fraction", "must be METRIC=LIMIT"),
        ("max", "=3", "must be METRIC=LIMIT"),
        ("max", "", "must be METRIC=LIMIT"),
        ("max", "preemptions=", "must be METRIC=LIMIT"),
        ("max", "preemptions=many", "could not convert"),
        ("max", "preemptions=nan", "not finite"),
        ("max", "preemptions=inf", "not finite"),
        ("max", "preemptions=5%", "no baseline that it is of"),
        ("max_increase", "preemptions=-1", "negative"),
        ("max", "preemptions@x=3", "no pool size"),
        ("max", "preemptions@=3", "no pool size"),
        ("equal", "preemptions=3", "takes METRIC"),
    ],
)
def test_what_is_no_rule_is_refused(bound, text, message):
    with pytest.raises(UsageError, match=message):
        parse_rule(bound, text)


def test_rules_from_a_file(tmp_path):
    path = tmp_path / "gate.toml"
    path.write_text(
        'baseline = "b"\nexact = true\n[[rules]]\nmetric = "preemptions"\nmax = 3\nmax_increase = "5%"\n'
        'pool = 12\nchoices = "victim oldest"\n[[rules]]\nmetric = "occupancy"\nequal = true\n'
    )
    assert load_demands(path) == Demands(
        (
            Rule("max", "preemptions", Limit(Fraction(3)), 12, "victim oldest"),
            Rule("max_increase", "preemptions", Limit(Fraction(1, 20), True), 12, "victim oldest"),
            Rule("equal", "occupancy"),
        ),
        tmp_path / "b",
        exact=True,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "demands nothing"),
        ("rules = []", "demands nothing"),
        ("[[rules]]\nmetric = 'x'", "has none of max, min"),
        ("[[rules]]\nmetric = 'x'\nmaximum = 3", "rules.0.maximum: Extra inputs"),
        ("[[rules]]\nmetric = 'x'\nmax = nan", "rules.0.max"),
        ("[[rules]]\nmetric = 'x'\nmax_increase = '-5%'", "negative"),
        ("[[rules]]\nmetric = 'x'\nequal = false", "rules.0.equal"),
        ("[[rules]]\nmetric = 'x'\nmax = true", "rules.0.max"),
        ("[[rules]]\nmetric = 'x'\nmax = '0.4'", "rules.0.max"),
        ("[[rules]]\nmetric = 'x'\nmax = 1\npool = 12.0", "rules.0.pool"),
        ("exact = 1", "exact"),
        ("rules = [", "gate file"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, text, message):
    (tmp_path / "g.toml").write_text(text)
    with pytest.raises(UsageError, match=message):
        load_demands(tmp_path / "g.toml")
    with pytest.raises(UsageError, match="No such file"):
        load_demands(tmp_path / "none.toml")


# ---- counted -----------------------------------------------------------------------------------


def test_a_limit_is_exact_to_the_last_digit(day34):
    """12 blocks: 107 of 268 positions."""
    share = 107 / 268
    assert verdicts(day34, "max", f"recompute_fraction@12={share!r}") == ["passed"]
    assert verdicts(day34, "max", f"recompute_fraction@12={math.nextafter(share, 0)!r}") == ["failed"]
    assert verdicts(day34, "min", f"recompute_fraction@12={share!r}") == ["passed"]
    assert verdicts(day34, "min", f"recompute_fraction@12={math.nextafter(share, 1)!r}") == ["failed"]
    assert verdicts(day34, "max", "preemptions@12=7") == ["passed"]
    assert verdicts(day34, "max", "preemptions@12=6") == ["failed"]


def test_without_a_pool_every_point_is_held(day34):
    assert verdicts(day34, "max", "preemptions=5") == ["passed"] * 4 + ["failed"] * 2
    assert [f.value for f in hold(day34, "max", "preemptions=5")] == [0, 2, 3, 5, 7, 8]


def test_decimals_are_taken_at_their_word(results, tmp_path):
    """0.1 + 0.2 is 0.3, whatever binary fractions say: occupancy 0.24 may fall by 0.24 - 0.24 and not by less."""
    one = load_result(results / "a")
    assert verdicts(one, "max_decrease", "occupancy@12=0", one) == ["passed"]
    rule, before = parse_rule("max_increase", "x=0.2"), 0.1
    from batchbench.gating import _allowed

    assert _allowed(rule, before) == Fraction(3, 10)
    assert _allowed(parse_rule("max_increase", "x=10%"), 0.7) == Fraction(77, 100)
    assert _allowed(parse_rule("max_decrease", "x=50%"), -4.0) == -6


def test_against_a_baseline(results, day34):
    other = load_result(results / "b")
    assert verdicts(other, "max_increase", "recompute_fraction=0", day34) == ["passed"] * 6
    found = hold(other, "max_increase", "mean_latency_iterations=0", day34)
    assert [f.verdict for f in found] == ["passed"] * 3 + ["failed"] * 3
    assert (found[4].value, found[4].limit, found[4].baseline) == (45 + 1 / 3, 42, 42)
    assert verdicts(other, "max_increase", "mean_latency_iterations@12=8%", day34) == ["passed"]
    assert verdicts(other, "max_increase", "mean_latency_iterations@12=7.9%", day34) == ["failed"]
    assert verdicts(other, "equal", "preemptions", day34) == ["passed"] * 3 + ["failed"] * 3


def test_percentiles_of_requests_and_of_service(day34):
    latencies = sorted(day34.point("requests", 4, ["latency_iterations"])["latency_iterations"])
    for share, want in (("p50", latencies[2]), ("p99", latencies[5]), ("max", latencies[5]), ("min", latencies[0]),
                        ("mean", sum(latencies) / 6), ("p17", latencies[1]), ("p16", latencies[0])):  # fmt: skip
        assert Measures(day34).at(f"latency_iterations.{share}", 4).value == want
    assert Measures(day34).at("ttft_p99_iterations", 4).value == max(
        day34.point("requests", 4, ["ttft_iterations"])["ttft_iterations"]
    )


def test_every_counter_of_every_table_is_in_exact(results, day34):
    same = judge(load_result(results / "c"), Demands(exact=True), day34)
    counted = set(TABLES) - {"statistics", "texts"}
    rows = sum(len(day34.point(name, 0)) for name in counted)
    assert [f.verdict for f in same] == ["passed"] * 6 and same[0].detail == f"{rows} rows of 9 tables are equal"
    other = judge(load_result(results / "b"), Demands(exact=True), day34)
    assert [f.verdict for f in other] == ["failed"] * 6
    assert other[0].detail == "pools: watermark_blocks is 2, was 0"
    assert "also in requests, iterations, admissions" in other[5].detail


def edited(source, folder, table, edit):
    """A copy of a result, and of one table what `edit` makes of it."""
    shutil.copytree(source, folder)
    file = folder / f"{table}.parquet"
    data = pq.read_table(file)
    pq.write_table(edit(data).cast(data.schema), file)
    return load_result(folder)


def with_column(data, column, values):
    field = data.schema.get_field_index(column)
    return data.set_column(field, data.schema.field(column), pa.array(values, data.schema.field(column).type))


@pytest.mark.parametrize(
    ("table", "column"),
    [("pools", "max_latency_iterations"), ("requests", "ttft_iterations"), ("iterations", "free_blocks"),
     ("admissions", "slot"), ("prefills", "positions"), ("evictions", "freed_blocks"),
     ("token_runs", "first_iteration"), ("service", "p99")],
)  # fmt: skip
def test_exact_sees_one_number_in_any_table(results, day34, tmp_path, table, column):
    def one_more(data):
        values = data[column].to_pylist()
        values[0] += 1
        return with_column(data, column, values)

    found = judge(edited(results / "a", tmp_path / "r", table, one_more), Demands(exact=True), day34)
    (failed,) = [f for f in found if f.verdict == "failed"]
    was = pq.read_table(results / "a" / f"{table}.parquet")[column][0].as_py()
    assert failed.detail.startswith(f"{table}: {column}") and f"is {was + 1}, was {was}" in failed.detail


@pytest.mark.parametrize(
    ("table", "column", "named"),
    [("service", "p99", "p99 of ttft in s"), ("repetitions", "engine_s", "engine_s is")],
)
def test_modelled_seconds_are_exact_too(tmp_path, table, column, named):
    """The virtual clock gives them."""
    modelled = "results/long_context"

    def times_nine(data):
        seconds = data["unit"].to_pylist() if table == "service" else ["s"] * len(data)
        values = [
            9 * value if unit == "s" else value for value, unit in zip(data[column].to_pylist(), seconds, strict=True)
        ]
        return with_column(data, column, values)

    found = judge(edited(modelled, tmp_path / "r", table, times_nine), Demands(exact=True), load_result(modelled))
    assert {f.verdict for f in found} == {"failed"} and named in found[0].detail
    assert {f.verdict for f in judge(load_result(modelled), Demands(exact=True), load_result(modelled))} == {"passed"}


def test_measured_seconds_are_not_exact(tmp_path):
    """Nor is how often it was run."""
    one, other = measured_result(tmp_path / "a", [1.0, 2.0]), measured_result(tmp_path / "b", [3.0])
    assert {f.verdict for f in judge(other, Demands(exact=True), one)} == {"passed"}


def test_not_a_number_is_the_null_that_it_means():
    nan, null, one = (pa.table({"x": pa.array([value, 1.0])}) for value in (math.nan, None, 2.0))
    assert first_difference(nan, nan) == first_difference(nan, null) == first_difference(null, nan) == ""
    assert first_difference(nan, one) == "x in row 0 is null, was 2.0"


def test_the_committed_result_has_the_same_texts_as_itself_and_a_changed_token_is_seen(tmp_path):
    committed = load_result("results/day34")
    assert [f.verdict for f in judge(committed, Demands(same_text=True), committed)] == ["passed"] * 6
    shutil.copytree("results/day34", tmp_path / "r")
    data = pq.read_table(tmp_path / "r" / "texts.parquet")
    tokens = data["token_ids"].to_pylist()
    tokens[7][3] += 1
    field = data.schema.get_field_index("token_ids")
    pq.write_table(data.set_column(field, data.schema.field("token_ids"), pa.array(tokens, pa.list_(pa.int64()))),
                   tmp_path / "r" / "texts.parquet")  # fmt: skip
    found = judge(load_result(tmp_path / "r"), Demands(same_text=True), committed)
    assert [f.verdict for f in found] == ["passed", "failed", *["passed"] * 4]
    assert "token_ids of r1" in found[1].detail


def test_a_schedule_has_no_text_to_be_the_same(day34):
    found = judge(day34, Demands(same_text=True), day34)
    assert [f.verdict for f in found] == ["error"] * 6 and "computed no text" in found[0].detail


# ---- never a pass by accident ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bound", "text", "detail"),
    [
        ("max", "preemptions@13=3", "no point is @13; there are: pool 48; pool 32"),
        ("max", "preemptions@12:victim oldest=3", "no point is @12:victim oldest"),
        ("max", "recompute_fractoin=3", "is no metric; did you mean 'recompute_fraction'?"),
        ("max", "latency.p99=3", "is no metric"),
        ("max", "point=3", "is no metric"),
        ("max", "pool_blocks=3", "is no metric"),
        ("max", "rules=3", "is no metric"),
        ("max", "request_id.max=3", "is no metric"),
        ("max", "goodput_fraction=3", "goodput_fraction is null: the scenario has no [slo]"),
        ("max", "engine_s=3", "engine_s is null: a schedule on the clock of iterations takes no time"),
        ("max", "ttft_p99_s=3", "ttft_p99_s is null: `service` has no ttft in s"),
        ("max", "copy_s=1", "copy_s is null"),
        ("max", "latency_s.p50=1", "latency_s.p50 is null"),
    ],
)
def test_what_cannot_be_judged_is_an_error(day34, bound, text, detail):
    found = hold(day34, bound, text)
    assert found and {f.verdict for f in found} == {"error"}
    assert detail in found[0].detail
    assert EXIT_CODES[verdict_of(found)] == 2


def test_no_rule_and_no_finding_and_no_baseline_are_errors(day34):
    assert verdict_of([]) == "error"
    with pytest.raises(UsageError, match="let everything pass"):
        judge(day34, Demands(), None)
    for demands in (Demands(exact=True), Demands(same_text=True), Demands((parse_rule("equal", "preemptions"),))):
        with pytest.raises(UsageError, match="there is none"):
            judge(day34, demands, None)
    with pytest.raises(UsageError, match="no rule compares with it"):
        hold(day34, "max", "preemptions=100", day34)


def test_a_point_that_only_one_result_has_is_an_error(results, day34, tmp_path):
    for name, pools in (("less", "[48, 32, 24, 16, 12]"), ("more", "[48, 32, 24, 16, 12, 8, 9]")):
        (tmp_path / f"{name}.toml").write_text(DAY34.read_text().replace("[48, 32, 24, 16, 12, 8]", pools))
        done = invoke("sweep", str(tmp_path / f"{name}.toml"), "--engine", "schedule", "--out", str(tmp_path / name),
                      "--no-plots", "--no-progress")  # fmt: skip
        assert done.exit_code == 0
    less, more = load_result(tmp_path / "less"), load_result(tmp_path / "more")
    gone = hold(less, "max_increase", "preemptions=0", day34)
    assert [f.verdict for f in gone] == ["passed"] * 5 + ["error"]
    assert gone[5].where == "pool 8" and gone[5].detail == "the baseline has this point, the result does not"
    new = hold(more, "max_increase", "preemptions=0", day34)
    assert [f.verdict for f in new] == ["passed"] * 6 + ["error"] and "no such point" in new[6].detail
    assert [f.verdict for f in judge(less, Demands(exact=True), day34)].count("error") == 1
    assert [f.verdict for f in judge(more, Demands(exact=True), day34)].count("error") == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"workload_hash": "v"}, "workload v against w"),
        ({"engine": {"engine": "vllm", "model": "m", "device": "cpu"}}, "engine.engine vllm against scripted"),
        ({"engine": {"engine": "scripted", "model": "n", "device": "cpu"}}, "engine.model n against m"),
        ({"scenario": {"name": "x", "clock": "wall"}}, "scenario.clock wall against iterations"),
        ({"scenario": {"name": "x", "clock": "iterations", "slo": {"ttft_s": 5.0}}}, "scenario.slo"),
        ({"engine": RUN["engine"] | {"numerics": "fast"}}, "engine.numerics fast against None"),
        ({"workload_hash": None}, "workload None against w"),
    ],
)
def test_other_workloads_engines_and_clocks_are_incomparable(tmp_path, change, named):
    one, other = measured_result(tmp_path / "a"), measured_result(tmp_path / "b", run=change)
    found = hold(other, "max_increase", "preemptions=100", one)
    assert [f.verdict for f in found] == ["incomparable"] and named in found[0].detail
    assert EXIT_CODES[verdict_of(found)] == 5
    assert verdicts(other, "max", "preemptions=100") == ["passed"], "a fixed limit needs no baseline"


def test_a_model_is_known_by_its_content_where_both_say_it(tmp_path):
    """The same weights in another folder are the same model; others in the same folder are not."""

    def differs(**engine):
        sides = [measured_result(tmp_path / str(n), run={"engine": RUN["engine"] | change})
                 for n, change in enumerate(({"model_hash": "h"}, engine))]  # fmt: skip
        found = hold(sides[1], "max_increase", "preemptions=100", sides[0])
        return [f.detail if f.verdict == "incomparable" else f.verdict for f in found]

    assert differs(model="n", model_hash="h") == ["passed"]
    assert "engine.model_hash i against h" in differs(model_hash="i")[0]
    assert "engine.model n against m" in differs(model="n")[0], "one does not say"
    assert differs(model="m") == ["passed"]


@pytest.mark.parametrize("name", ["slots", "block_size", "repetitions", "requests", "pool_bytes", "token_budget"])
def test_a_setting_is_no_metric(day34, name):
    found = hold(day34, "max", f"{name}=100")
    assert [f.verdict for f in found] == ["error"] * 6 and f"'{name}' is no metric" in found[0].detail


def test_the_worst_verdict_decides():
    def found(*names):
        return [Finding("r", "p", name, "") for name in names]

    order = ("incomparable", "error", "failed", "inconclusive", "passed")
    for place, worst in enumerate(order):
        assert verdict_of(found(*reversed(order[place:]))) == worst
    assert [EXIT_CODES[name] for name in order] == [5, 2, 3, 6, 0]


# ---- measured ----------------------------------------------------------------------------------


def test_which_columns_are_measured():
    for clock in ("iterations", "virtual", "wall"):
        assert kind_of("wall_s", clock) == kind_of("copy_s", clock) == "measured"
    assert kind_of("engine_s", "iterations") == kind_of("goodput_fraction", "iterations") == "measured"
    assert kind_of("engine_s", "virtual") == kind_of("goodput_fraction", "virtual") == "counted"
    assert kind_of("preemptions", "iterations") == "counted" and kind_of("preemptions", "wall") == "measured"
    for table in TABLES:
        assert not any(name.endswith("_s") for name in counted_columns(table, "iterations"))
        assert counted_columns(table, "wall") == counted_columns(table, "iterations") != []


@given(st.lists(st.floats(0, 10), min_size=1, max_size=12), st.floats(0, 10))
def test_against_a_limit_is_the_sign_test(values, limit):
    """Of all ways in which fair coins fall, those that are as extreme. What lies on the limit keeps it."""
    for upper in (True, False):
        shown = against_limit(values, limit, upper=upper)
        broken = sum(v > limit if upper else v < limit for v in values)
        heads = [bin(coins).count("1") for coins in range(2 ** len(values))]
        p_broken = sum(n >= broken for n in heads) / len(heads)
        p_kept = sum(n >= len(values) - broken for n in heads) / len(heads)
        assert shown.p == min(p_broken, p_kept)
        kept, not_kept = ("below", "above") if upper else ("above", "below")
        assert shown.side == ("unknown" if shown.p > 0.05 else kept if p_kept < p_broken else not_kept)
        assert bool(shown.settles) == (shown.side == "unknown")


@settings(deadline=None)  # looking at every rearrangement takes its time
@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_against_a_baseline_counts_every_rearrangement(values, baseline):
    """With ties too: the share of all ways to split the values in which the rank sum is as large."""
    from itertools import combinations

    shown = against_baseline(values, baseline, upper=True)
    pooled = values + baseline

    def wins(chosen):
        mine = [pooled[n] for n in chosen]
        rest = [pooled[n] for n in range(len(pooled)) if n not in chosen]
        return sum((a > b) + (a == b) / 2 for a in mine for b in rest)

    splits = [wins(set(chosen)) for chosen in combinations(range(len(pooled)), len(values))]
    seen = wins(set(range(len(values))))
    above, below = (sum(w >= seen for w in splits), sum(w <= seen for w in splits))
    enough, shows = len(splits) >= 20, 20 * min(above, below) <= len(splits)
    if enough and not shows and max(values) <= min(baseline):
        assert shown == Shown("below", None), "kept, and no test says so"
    else:
        assert math.isclose(shown.p, min(above, below) / len(splits))  # a quotient of other floats
        assert shown.side == ("unknown" if not shows else "above" if above < below else "below")
    two_sided = difference(values, baseline)
    assert math.isclose(two_sided.p, min(1, 2 * min(above, below) / len(splits)))
    shows = 40 * min(above, below) <= len(splits)
    assert two_sided.side == ("unknown" if not shows else "above" if above < below else "below")
    assert bool(two_sided.settles) == (not shows)


@pytest.mark.parametrize(
    ("values", "baseline", "p", "settles"),
    [
        ([0] * 5, [0] * 5, 1.0, "no reasonable number of repetitions (1000 would not do)"),
        ([0, 0, 0, 0, 1], [0] * 5, 1.0, "about 131 repetitions of both"),
        ([4, 5, 6], [1, 2, 3], 0.1, "at least 4 repetitions of both; there are 3 and 3"),
        ([5, 6, 7, 8], [1, 2, 3, 4], 2 / 70, ""),
    ],
)
def test_a_difference_is_tested_on_both_sides(values, baseline, p, settles):
    """Its direction is seen from the values, so either could have been found."""
    assert difference(values, baseline) == Shown("above" if p < 0.05 else "unknown", p, settles)
    assert difference(baseline, values) == Shown("below" if p < 0.05 else "unknown", p, settles)


def test_of_all_orders_of_what_does_not_differ_at_most_one_in_twenty_shows_a_difference():
    """Exactly: every way in which n and n values without a tie can lie among each other is as likely."""
    from itertools import combinations

    for n in (3, 4, 5, 6):
        splits = [set(chosen) for chosen in combinations(range(2 * n), n)]
        claims = [difference(list(one), sorted({*range(2 * n)} - one)).side != "unknown" for one in splits]
        assert 20 * sum(claims) <= len(splits) and any(claims) == (n > 3)


def test_a_limit_that_is_kept_without_a_test_has_no_p(tmp_path):
    wall = measured_result(tmp_path / "a", [1.0] * 5, clock="wall", preemptions=1)
    (found,) = hold(wall, "max_increase", "preemptions=0", wall, allow_varying=True)
    assert (found.verdict, found.p) == ("passed", None)
    assert found.detail == "measured, n=5 and 5, no value breaks the limit"


@pytest.mark.parametrize(
    ("values", "baseline", "p"),
    [
        ([7] * 7 + [8] * 3, [7] * 10, math.comb(17, 7) / math.comb(20, 10)),  # as many ways to pick all three eights
        ([7] * 16 + [8] * 4, [7] * 20, math.comb(36, 16) / math.comb(40, 20)),
        ([3, 1, 4, 1, 5], [9, 2, 6, 5, 3], None),
    ],
)
def test_ties_are_counted_not_approximated(values, baseline, p):
    above, below = rank_tests(values, baseline)
    assert p is None or math.isclose(above, p)  # sums of floats
    mirrored = rank_tests(baseline, values)
    assert math.isclose(above, mirrored[1]) and math.isclose(below, mirrored[0])


def test_many_repetitions_are_approximated_closely(monkeypatch):
    """At the border the count of all arrangements and the normal approximation agree to a hundredth."""
    import random

    draw = random.Random(1)
    for _ in range(20):
        values, baseline = ([round(draw.gauss(shift, 1), 1) for _ in range(40)] for shift in (0.2, 0))
        exact = rank_tests(values, baseline)
        with monkeypatch.context() as patch:
            patch.setattr("batchbench.significance._EXACT", 10)
            near = rank_tests(values, baseline)
        assert all(abs(a - b) < 0.01 for a, b in zip(exact, near, strict=True))


def test_repetitions_that_show_it_and_that_do_not(tmp_path):
    five = measured_result(tmp_path / "five", [1.0, 1.1, 1.2, 0.9, 1.05])
    assert verdicts(five, "max", "engine_s=2") == ["passed"]
    assert verdicts(five, "max", "engine_s=0.5") == ["failed"]
    assert verdicts(five, "min", "engine_s=0.5") == ["passed"]
    assert verdicts(five, "min", "engine_s=2") == ["failed"]
    (between,) = hold(five, "max", "engine_s=1.05")
    assert (between.verdict == "inconclusive" and between.value == 1.05 and between.p == 0.8125) or between.p == 0.5
    assert "would settle it: " in between.detail
    four = measured_result(tmp_path / "four", [1.0, 1.1, 1.2, 0.9])
    (few,) = hold(four, "max", "engine_s=2")
    assert few.verdict == "inconclusive" and few.p == 1 / 16
    assert few.detail.endswith("would settle it: at least 5 repetitions; there are 4")
    assert EXIT_CODES[verdict_of([few])] == 6
    assert verdicts(four, "max", "engine_s=2", alpha=0.1) == ["passed"]


def test_measured_against_a_baseline(tmp_path):
    before = measured_result(tmp_path / "a", [1.0, 1.1, 1.2])
    slow = measured_result(tmp_path / "b", [2.0, 2.1, 2.2])
    (found,) = hold(slow, "max_increase", "engine_s=50%", before)
    assert (found.verdict, found.p, found.value, found.limit, found.baseline) == ("failed", 1 / 20, 2.1, 1.65, 1.1)
    assert verdicts(slow, "max_increase", "engine_s=150%", before) == ["passed"]
    assert verdicts(slow, "max_increase", "engine_s=100%", before) == ["inconclusive"]
    assert verdicts(before, "max_decrease", "engine_s=0.5", slow) == ["failed"]
    two = measured_result(tmp_path / "c", [2.0, 2.1])
    (few,) = hold(two, "max_increase", "engine_s=0", before)
    assert few.verdict == "inconclusive" and "at least 3 repetitions of both; there are 2 and 3" in few.detail


def test_one_measurement_shows_nothing(tmp_path):
    one = measured_result(tmp_path / "a", [1.0])
    assert verdicts(one, "max", "engine_s=100") == ["inconclusive"]
    (found,) = hold(one, "max", "latency_s.p95=100")
    assert found.verdict == "error" and "known of one run only" in found.detail
    (found,) = hold(one, "equal", "engine_s", one)
    assert found.verdict == "error" and "no two runs are equal" in found.detail


def test_seconds_of_another_machine_are_incomparable(tmp_path):
    here = measured_result(tmp_path / "a", [1.0] * 5)
    there = measured_result(tmp_path / "b", [1.0] * 5, run={"machine": {"system": "s", "processor": "q", "cores": 2}})
    (found,) = hold(here, "max_increase", "engine_s=10", there)
    assert found.verdict == "incomparable" and "machine.processor p against q" in found.detail
    assert verdicts(here, "max_increase", "preemptions=0", there) == ["passed"], "counts are of no machine"


def test_counters_of_real_time_are_refused_unless_told_otherwise(tmp_path):
    wall = measured_result(tmp_path / "a", [1.0] * 5, clock="wall", preemptions=1)
    (found,) = hold(wall, "max", "preemptions=3")
    assert found.verdict == "error" and "`allow_varying_counters`" in found.detail
    (found,) = hold(wall, "max", "preemptions=3", allow_varying=True)
    assert found.verdict == "passed" and found.detail.startswith("measured, n=5")
    assert verdicts(wall, "max", "preemptions=1", allow_varying=True) == ["passed"], "on the limit is within it"
    assert verdicts(wall, "max_increase", "preemptions=0", wall, allow_varying=True) == ["passed"]
    assert verdicts(wall, "max_decrease", "preemptions=0", wall, allow_varying=True) == ["passed"]
    (found,) = hold(wall, "max", "requests_preempted=3", allow_varying=True)
    assert (found.verdict, found.detail) == ("passed", "counted in the first repetition")
    assert verdicts(wall, "max", "engine_s=3") == ["passed"], "times are tested as under any clock"
    assert [f.verdict for f in judge(wall, Demands(exact=True), wall)] == ["error"]
    again = measured_result(tmp_path / "b", [2.0] * 3, clock="wall", preemptions=1)
    assert [f.verdict for f in judge(again, Demands(exact=True), wall, allow_varying=True)] == ["passed"]


# ---- outputs -----------------------------------------------------------------------------------

HOSTILE = "<b>|x`*_[l](u)\x1b[31m\n::error::% ]]>&\"'\x00\ud800"


def test_junit_is_xml_whatever_the_names(day34):
    findings = [*hold(day34, "max", "preemptions=5"), *hold(day34, "max", "nothing=1"),
                Finding(HOSTILE, HOSTILE, "inconclusive", HOSTILE)]  # fmt: skip
    text = as_junit(HOSTILE, findings)
    suite = ElementTree.fromstring(text.encode("utf-8", "strict"))
    assert suite.get("tests") == str(len(findings)) == str(len(suite.findall("testcase")))
    assert suite.get("failures") == str(len(suite.findall("testcase/failure"))) == "2"
    assert suite.get("errors") == str(len(suite.findall("testcase/error"))) == "7"
    assert suite.find("testcase[5]/failure").get("message") == "pool 12: is 7, limit 5 (counted)"


def test_annotations_are_one_line_each_and_cannot_command():
    (line,) = as_annotations([Finding(HOSTILE, HOSTILE, "failed", HOSTILE), Finding("a", "b", "passed", "")])
    assert line.startswith("::error title=batchbench gate%3A failed::") and "%0A" in line and line.isprintable()


def test_markdown_cells_stay_cells():
    text = as_markdown(HOSTILE, [Finding(HOSTILE, HOSTILE, "failed", HOSTILE)])
    _, _, head, rule, row = text.splitlines()
    assert len(row.replace("\\|", "").split("|")) == len(head.split("|")) == len(rule.split("|"))
    assert "\x1b" not in text and "<b>" not in text.replace("\\<", "") and "`" not in text.replace("\\`", "")
    assert in_markdown("a|b\n") == "a\\|b "


def test_numbers_that_differ_look_different():
    assert str(parse_rule("max", "forward_tokens=1234567")) == "forward_tokens <= 1234567"
    assert str(parse_rule("max", "recompute_fraction=0.3992537")) == "recompute_fraction <= 0.3992537"
    share = 107 / 268
    assert figures_of(Finding("r", "", "failed", "", share, 0.399254)) == ("0.3992537", "0.399254", "")
    assert figures_of(Finding("r", "", "failed", "", 7.0, 6.0, 6.0)) == ("7", "6", "6")
    value, limit, _ = figures_of(Finding("r", "", "failed", "", share, math.nextafter(share, 0)))
    assert value != limit


def test_the_command_says_the_same_in_every_form(results, tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    files = [str(tmp_path / name) for name in ("j.xml", "j.json", "m.md")]
    done = invoke("gate", str(results / "a"), "--max", "preemptions=5", "--min", "occupancy=0.1", "--junit", files[0],
                  "--json", files[1], "--markdown", files[2])  # fmt: skip
    assert done.exit_code == 3
    assert done.stdout.count("FAILED") == 2 and done.stderr.count("::error ") == 2
    document = json.loads(Path(files[1]).read_text())
    assert (document["verdict"], document["exit_code"], len(document["findings"])) == ("failed", 3, 12)
    assert Path(files[2]).read_text().count("**failed**") == 2
    assert ElementTree.parse(files[0]).getroot().get("failures") == "2"
    assert document == as_document("day34", [Finding(**finding) for finding in document["findings"]])
    monkeypatch.delenv("GITHUB_ACTIONS")
    done = invoke("gate", str(results / "a"), "--max", "preemptions=8", "--format", "json")
    assert done.exit_code == 0 and json.loads(done.stdout)["verdict"] == "passed"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the gate has no rule"),
        (("--exact",), "give `baseline`"),
        (("--update",), "which baseline?"),
        (("--max", "preemptions"), "must be METRIC=LIMIT"),
        (("--max", "preemptions=1", "--alpha", "0"), "alpha 0:"),
        (("--max", "preemptions=1", "--alpha", "0.5"), "alpha 0.5:"),
        (("--max", "preemptions=1", "--rules", "none.toml"), "gate file none.toml"),
        (("--exact", "--baseline", "nowhere"), "is not a result folder"),
    ],
)
def test_a_wrong_question_is_one_line_and_exit_2(results, arguments, message):
    done = invoke("gate", str(results / "a"), *arguments)
    assert done.exit_code == 2 and len(done.stderr.strip().splitlines()) == 1 and message in done.stderr


def test_an_output_that_cannot_be_written_is_no_pass(results, tmp_path):
    done = invoke("gate", str(results / "a"), "--max", "preemptions=99", "--junit", str(tmp_path / "no" / "j.xml"))
    assert done.exit_code == 2 and "there is no folder" in done.stderr and done.stdout == ""
    done = invoke("gate", str(results / "a"), "--max", "preemptions=99", "--junit", str(tmp_path))
    assert done.exit_code == 1 and "Is a directory" in done.stderr


def told(tmp_path):
    """What the three files of `gate_told` say: verdict, exit code and the message, which is the same in all."""
    document = json.loads((tmp_path / "j.json").read_text())
    (case,) = ElementTree.parse(tmp_path / "j.xml").getroot()
    (finding,) = document["findings"]
    assert case.find("error").text == finding["detail"]
    assert in_markdown(finding["detail"]) in (tmp_path / "m.md").read_text()
    return document["verdict"], document["exit_code"], finding["detail"]


def gate_told(tmp_path, *arguments):
    """Runs a gate whose outputs an earlier one has passed."""
    files = {"--junit": "j.xml", "--json": "j.json", "--markdown": "m.md"}
    for name in files.values():
        (tmp_path / name).write_text("an earlier pass")
    return invoke("gate", *arguments, *(word for option, name in files.items()
                                        for word in (option, str(tmp_path / name))))  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere", "--max", "preemptions=1"), "nowhere is not a result folder"),
        (("results/day34", "--exact", "--baseline", "nowhere"), "nowhere is not a result folder"),
        (("results/day34", "--exact"), "give `baseline`"),
        (("results/day34", "--rules", "none.toml"), "gate file none.toml: No such file"),
        (("results/day34", "--rules", "pyproject.toml"), "gate file pyproject.toml: build-system"),
        (("results/day34", "--max", "preemptions"), "must be METRIC=LIMIT"),
        (("results/day34", "--max", "preemptions=1", "--alpha", "0.5"), "alpha 0.5:"),
        (("results/day34",), "the gate has no rule"),
        (("results/day34", "--update", "--baseline", "results/swap"), "judges nothing"),
    ],
)
@pytest.mark.parametrize("form", ["table", "json", "markdown"])
def test_machines_are_told_of_whatever_ends_a_gate(tmp_path, monkeypatch, arguments, message, form):
    """Or they would read what an earlier run wrote. The annotation has a line of its own."""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    done = gate_told(tmp_path, *arguments, "--format", form)
    assert done.exit_code == 2
    verdict, code, detail = told(tmp_path)
    assert (verdict, code) == ("error", 2) and message in detail
    annotation, line = done.stderr.splitlines()
    assert annotation.startswith("::error title=batchbench gate%3A error::gate: ") and line == f"error: {detail}"
    written = {"table": "", "json": (tmp_path / "j.json").read_text(), "markdown": (tmp_path / "m.md").read_text()}
    assert done.stdout == written[form]


@pytest.mark.parametrize(
    ("error", "code", "detail"),
    [(RuntimeError("odd"), 1, "RuntimeError: odd"), (KeyboardInterrupt(), 130, "KeyboardInterrupt: ")],
)
def test_machines_are_told_of_what_nobody_expected(tmp_path, monkeypatch, error, code, detail):
    def judge(*_, **__):
        raise error

    monkeypatch.setattr("batchbench.commands.gate.judge", judge)
    assert gate_told(tmp_path, "results/day34", "--max", "preemptions=1").exit_code == code
    assert told(tmp_path) == ("error", code, detail)


def test_an_output_that_cannot_be_written_is_a_pass_in_no_other(tmp_path):
    (tmp_path / "x").mkdir()
    arguments = ("results/day34", "--max", "preemptions=99", "--json", str(tmp_path / "j.json"))
    done = invoke("gate", *arguments, "--junit", str(tmp_path / "x"), "--format", "json")
    assert done.exit_code == 1 and json.loads(done.stdout) == json.loads((tmp_path / "j.json").read_text())
    document = json.loads(done.stdout)
    assert (document["verdict"], document["exit_code"]) == ("error", 1)
    done = invoke("gate", *arguments, "--junit", str(tmp_path / "x" / ".." / "j.json"))
    assert done.exit_code == 2 and "each needs a file of its own" in done.stderr


@pytest.mark.parametrize("command", [("gate", "日本", "--max", "preemptions=99"), ("compare", "results/day34", "日本")])
@pytest.mark.parametrize("form", ["table", "markdown"])
def test_a_terminal_that_lacks_the_characters_gets_escapes(tmp_path, command, form):
    shutil.copytree("results/day34", tmp_path / "日本")
    run = (tmp_path / "日本" / "run.json").read_text().replace('"name": "day34"', '"name": "日本"', 1)
    (tmp_path / "日本" / "run.json").write_text(run)
    words = [str(tmp_path / word) if word == "日本" else word for word in command]
    done = subprocess.run([sys.executable, "-m", "batchbench", *words, "--format", form], capture_output=True,
                          text=True, check=False, env=os.environ | {"PYTHONIOENCODING": "latin1"})  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "") and "\\u65e5\\u672c" in done.stdout


def test_annotations_end_with_their_line(tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    done = invoke("gate", "results/day34", "--max", "preemptions=5")
    assert [line[:8] for line in done.stderr.splitlines()] == ["::error "] * 2 and done.stderr.endswith("\n")


@pytest.mark.parametrize("form", ["table", "json", "markdown"])
def test_annotations_come_with_every_form(results, monkeypatch, form):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    done = invoke("gate", str(results / "a"), "--max", "preemptions=7", "--format", form)
    assert done.exit_code == 3 and done.stderr.count("::error ") == 1 and "::error" not in done.stdout


ONE_LESS = {
    "iterations": "iterations has 99 rows that forwarded, which cannot be: `pools` counts 100",
    "admissions": "admissions has 13 rows, which cannot be: requests and evictions are 14",
    "prefills": "prefills has no row of r5, which cannot be: every request has one",
    "evictions": "evictions has 7 rows, which cannot be: `pools` counts 8",
    "token_runs": "token_runs has 8 tokens of r5, which cannot be: `requests` has 24",
    "service": "service has 0 values of itl in s, which cannot be: `requests` has 138",
}


@pytest.mark.parametrize("table", ONE_LESS)
@pytest.mark.parametrize("lost", ["one", "all"])
def test_a_table_that_lost_rows_is_no_pass(tmp_path, table, lost):
    """On both sides, too: nothing is equal to nothing. Of prefills, the rows of one request."""
    committed = load_result("results/day34")

    def less(data):
        if lost == "all":
            return data.slice(0, 0)
        if table == "prefills":
            return data.filter(pc.not_equal(data["request_id"], "r5"))
        return data.slice(0, len(data) - 1)

    hollow = edited("results/day34", tmp_path / "r", table, less)
    for pair in ((hollow, hollow), (hollow, committed), (committed, hollow)):
        found = judge(pair[0], Demands(exact=True), pair[1])
        assert found[5].verdict == "error" and f"the table {table} has " in found[5].detail
        assert lost == "all" or ONE_LESS[table] in found[5].detail
        assert found[5].detail.startswith("the baseline: ") == (pair[0] is committed)


@pytest.mark.parametrize("lost", ["null", "empty", "rows", "token"])
def test_texts_that_are_not_there_are_not_the_same(tmp_path, lost):
    def less(data):
        if lost == "rows":
            return data.slice(0, len(data) - 1)
        tokens = data["token_ids"].to_pylist()
        tokens[-1] = {"null": None, "empty": [], "token": tokens[-1][:-1]}[lost]
        return with_column(data, "token_ids", tokens)

    shutil.copytree("results/day34", tmp_path / "r")
    file = tmp_path / "r" / "texts.parquet"
    pq.write_table(less(pq.read_table(file)), file)
    hollow = load_result(tmp_path / "r")
    found = judge(hollow, Demands(same_text=True), hollow)
    assert [f.verdict for f in found] == ["passed"] * 5 + ["error"]
    held = {"rows": "no", "token": "23"}.get(lost, "0")
    assert found[5].detail == f"the table texts has {held} tokens of r5, which cannot be: `requests` has 24"


@pytest.mark.parametrize(
    "unreported", [{"preempted": None}, {"admissions": None}, {"prefills": None}, {"began": None}, {}]
)
def test_what_an_engine_does_not_report_is_asked_of_no_table(tmp_path, unreported):
    first = {"admissions": (Admission("a"), Admission("b")), "began": ("a", "b"), "paused": (),
             "prefills": (Prefill("a", 1, 0, False), Prefill("b", 1, 0, False))}  # fmt: skip
    last = {"admissions": (), "began": (), "paused": (), "prefills": (), "finished": ("a", "b")}
    script = [it(2, **{**first, **unreported}), it(2, **{**last, **unreported})]
    result = result_of(tmp_path, RUN, [request("a", 2), request("b", 2)], script)
    (found,) = judge(result, Demands(exact=True), result)
    assert (found.verdict, found.detail[-22:]) == ("passed", " of 9 tables are equal")


def test_choices_are_named_before_or_after_the_limit():
    for rule in ("recovered_tokens@:prefix_cache off=0", "recovered_tokens=0@:prefix_cache off"):
        done = invoke("gate", "results/prefix_cache", "--max", rule)
        assert done.exit_code == 0 and done.stdout.count("passed") == 4, done.output


def test_the_mean_of_yes_and_no_is_the_share_of_yes():
    result = load_result("results/code_completion")
    shares = [Measures(result).at("meets_slo.mean", place).value for place in range(len(result.tables["pools"]))]
    assert shares == result.tables["pools"]["goodput_fraction"].tolist() and 0 < shares[-1] < 1


def without(column, rows, outputs=None):
    """An edit of `requests` that empties some of a column, and gives these requests so many tokens."""

    def edit(data):
        values = [None if row in rows else value for row, value in enumerate(data[column].to_pylist())]
        tokens = data["output_tokens"].to_pylist()
        kept = [outputs if outputs and row in rows else tokens for row, tokens in enumerate(tokens)]
        return with_column(with_column(data, column, values), "output_tokens", kept)

    return edit


@pytest.mark.parametrize("column", ["ttft_iterations", "tpot_iterations", "paired_latency_ratio", "queued_iterations"])
def test_a_statistic_is_of_every_request_or_an_error(results, tmp_path, column):
    """Not of those that have a value: at 32 blocks two of six lack it."""
    found = hold(edited(results / "a", tmp_path / "r", "requests", without(column, (7, 9))), "max", f"{column}.p99=1e9")
    assert [f.verdict for f in found] == ["passed", "error", *["passed"] * 4]
    assert found[1].detail == f"{column}.p99 is null: 2 of 6 requests lack it"
    assert found[0].detail == "counted"


def test_a_request_of_one_token_has_no_time_between_tokens(results, tmp_path):
    """That is normal, and said."""
    one = edited(results / "a", tmp_path / "r", "requests", without("tpot_iterations", (7, 9), outputs=1))
    values = [v for v in one.point("requests", 1)["tpot_iterations"] if not math.isnan(v)]
    found = hold(one, "max", "tpot_iterations.max=1e9")[1]
    assert (found.verdict, found.value, len(values)) == ("passed", max(values), 4)
    assert found.detail == "counted, over 4 of 6 requests: the others have one token"
    (_, change, *_) = (point.changes[0] for point in compare(one, one, ["tpot_iterations.max"]).points)
    assert (change.verdict, change.detail) == ("equal", "over 4 of 6 requests: the others have one token")
    assert verdicts(one, "max", "output_tokens.max=24") == ["passed"] * 6


# ---- baselines that change on purpose ----------------------------------------------------------


def test_update_replaces_the_baseline_and_says_what_changed(results, tmp_path):
    shutil.copytree(results / "a", tmp_path / "base")
    new, base = str(results / "b"), str(tmp_path / "base")
    assert invoke("gate", new, "--exact", "--baseline", base).exit_code == 3
    for more in (("--max", "preemptions=1"), ("--exact",), ("--junit", str(tmp_path / "j.xml"))):
        assert "judges nothing" in invoke("gate", new, "--baseline", base, "--update", *more).stderr
    done = invoke("gate", new, "--baseline", base, "--update")
    assert done.exit_code == 0, done.output
    assert ["pool", "12", "preemptions", "7", "5"] in [line.split() for line in done.stdout.splitlines()]
    assert f"{base} is now {new}" in done.stdout
    assert invoke("gate", new, "--exact", "--baseline", base).exit_code == 0
    again = invoke("gate", new, "--baseline", base, "--update")
    assert again.exit_code == 0 and "nothing that is counted changed" in again.stdout
    assert invoke("gate", new, "--baseline", str(tmp_path / "fresh"), "--update").exit_code == 0
    assert invoke("gate", new, "--exact", "--baseline", str(tmp_path / "fresh")).exit_code == 0


def test_update_names_points_engines_and_texts_that_go(results, tmp_path):
    (tmp_path / "z.toml").write_text(DAY34.read_text().replace("[48, 32, 24, 16, 12, 8]", "[48, 9]"))
    assert invoke("sweep", str(tmp_path / "z.toml"), "--engine", "schedule", "--out", str(tmp_path / "z"),
                  "--no-plots", "--no-progress").exit_code == 0  # fmt: skip
    shutil.copytree("results/day34", tmp_path / "base")
    said = [line.split() for line in invoke("gate", str(tmp_path / "z"), "--baseline", str(tmp_path / "base"),
                                            "--update").stdout.splitlines()]  # fmt: skip
    assert ["pool", "12", "point", "there", "gone"] in said and ["pool", "9", "point", "not", "there", "new"] in said
    assert any(line[:3] == ["every", "engine.engine", "engine.engine"] for line in said)
    assert any(line[:3] == ["pool", "48", "text"] and line[-1] == "null" for line in said)


def test_update_names_settings(results, tmp_path):
    """Once where every point changed alike."""
    shutil.copytree(results / "a", tmp_path / "base")
    done = invoke("gate", str(results / "b"), "--baseline", str(tmp_path / "base"), "--update")
    said = [line.split() for line in done.stdout.splitlines()]
    assert said.count(["every", "watermark_blocks", "0", "2"]) == 1
    assert sum("watermark_blocks" in line for line in said) == 1
    other = edited(results / "a", tmp_path / "r", "pools", lambda data: with_column(data, "slots", [4] * 5 + [6]))
    assert changed_settings(load_result(results / "a"), other) == [
        (f"pool {pool}", "slots", 6, 4) for pool in (48, 32, 24, 16, 12)
    ]


def test_update_touches_nothing_but_a_result_of_the_same_workload(results, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    done = invoke("gate", str(results / "a"), "--baseline", str(tmp_path / "mine"), "--update")
    assert done.exit_code == 2 and [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    done = invoke("gate", str(results / "a"), "--baseline", str(results / "a"), "--update")
    assert done.exit_code == 2 and "the result itself" in done.stderr
    (tmp_path / "other.toml").write_text(DAY34.read_text().replace("output_tokens = 24", "output_tokens = 20"))
    assert invoke("sweep", str(tmp_path / "other.toml"), "--engine", "schedule", "--out", str(tmp_path / "other"),
                  "--no-plots", "--no-progress").exit_code == 0  # fmt: skip
    done = invoke("gate", str(tmp_path / "other"), "--baseline", str(results / "c"), "--update")
    assert done.exit_code == 5 and "workload" in done.stderr
    assert load_result(results / "c").run["workload_hash"] == load_result(results / "a").run["workload_hash"]


def test_the_gate_beside_day34_fails_when_its_watermark_is_raised(results, tmp_path, monkeypatch):
    """What docs/ci.md promises; by the real engine, since the committed baseline is its result."""
    rules = str(Path("scenarios/day34.gate.toml").resolve())
    assert invoke("gate", "results/day34", "--rules", rules).exit_code == 0
    monkeypatch.chdir(tmp_path)
    edited = scenario(tmp_path, ("watermark_blocks = 0", "watermark_blocks = 2"))
    assert invoke("sweep", edited, "--out", "out", "--no-plots", "--no-progress").exit_code == 0
    done = invoke("gate", "out", "--rules", rules)
    assert done.exit_code == 3 and "FAILED" in done.stdout and "mean_latency_iterations" in done.stdout
