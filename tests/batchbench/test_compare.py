"""Comparisons: aligned by point, request and eviction; values against what is counted by hand; any engine."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import pytest

from batchbench.comparing import compare
from batchbench.errors import Incomparable, UsageError
from batchbench.figures.compare import comparison
from batchbench.figures.style import STYLE
from batchbench.results import load_result
from tests.batchbench.test_cli import DAY34, invoke
from tests.batchbench.test_gate import measured_result, results  # noqa: F401  # a fixture


@pytest.fixture
def pair(results):  # noqa: F811
    return load_result(results / "a"), load_result(results / "b")


def changes(point):
    return {change.metric: change for change in point.changes}


def test_values_differences_and_verdicts(pair):
    """Both columns are in docs/preemption.md's units; the watermark saves evictions and costs iterations."""
    found = compare(*pair)
    assert [point.name for point in found.points] == [f"pool {n}" for n in (48, 32, 24, 16, 12, 8)]
    at12 = changes(found.points[4])
    assert (at12["preemptions"].first, at12["preemptions"].other, at12["preemptions"].difference) == (7, 5, -2)
    assert at12["preemptions"].verdict == "better" and at12["iterations"].verdict == "worse"
    assert at12["iterations"].difference == 8
    assert at12["peak_used_blocks"].verdict == "equal"
    assert at12["goodput_fraction"].verdict == "unknown" and "[slo]" in at12["goodput_fraction"].detail
    assert {change.verdict for change in found.points[0].changes} <= {"equal", "unknown", "not shown"}


def test_every_request_is_compared_with_itself(pair):
    one, other = pair
    for place, point in enumerate(compare(one, other).points):
        before, after = (r.point("requests", place).set_index("request_id")["latency_iterations"] for r in pair)
        ratios = (after / before).to_dict()
        (latency,) = point.latencies  # a schedule takes no seconds
        assert (latency.unit, latency.worst_ratio) == ("iterations", max(ratios.values()))
        assert latency.slower == sum(ratio > 1 for ratio in ratios.values())
        assert latency.faster == sum(ratio < 1 for ratio in ratios.values())
        assert latency.equal == sum(ratio == 1 for ratio in ratios.values())
        assert ratios[latency.worst_request] == latency.worst_ratio


def test_evictions_are_aligned_by_request_and_order(pair):
    one, other = pair
    for place, point in enumerate(compare(one, other).points):
        events = [r.point("evictions", place) for r in pair]
        found = point.evictions
        assert found.kept + found.moved + found.only_first == len(events[0])
        assert found.kept + found.moved + found.only_other == len(events[1])
        victims = [set(frame["request_id"]) for frame in events]
        assert set(found.requests_only_first) == victims[0] - victims[1]
        assert set(found.requests_only_other) == victims[1] - victims[0]
    at8 = compare(one, other).points[5].evictions
    assert (at8.kept, at8.moved, at8.only_first, at8.only_other) == (2, 3, 3, 0)


def test_a_result_against_itself_is_equal(pair):
    one, _ = pair
    for point in compare(one, one).points:
        assert {change.verdict for change in point.changes if change.first is not None} <= {"equal", "not shown"}
        assert point.evictions.moved == point.evictions.only_first == point.evictions.only_other == 0


def test_any_engine_may_have_made_them(pair):
    """The committed result is the real engine's, the other the schedule's: counters agree, the text cannot."""
    one, _ = pair
    found = compare(load_result("results/day34"), one)
    assert all(point.text == "not computed" for point in found.points)
    for point in found.points:
        assert changes(point)["recompute_fraction"].verdict == "equal"
        assert point.evictions.moved == point.evictions.only_first == point.evictions.only_other == 0


def test_another_workload_is_incomparable(pair, tmp_path):
    with pytest.raises(Incomparable, match="workload"):
        compare(pair[0], load_result("results/watermark"))


def test_measured_values_need_repetitions(tmp_path):
    one = measured_result(tmp_path / "a", [1.0, 1.1, 1.2, 1.3])
    slow = measured_result(tmp_path / "b", [2.0, 2.1, 2.2, 2.3])
    once = measured_result(tmp_path / "c", [2.0])
    (point,) = compare(one, slow, ["engine_s"]).points
    assert (point.changes[0].verdict, point.changes[0].detail) == ("worse", "n=4 and 4, p=0.029")
    (point,) = compare(slow, one, ["engine_s"]).points
    assert point.changes[0].verdict == "better"
    (point,) = compare(one, once, ["engine_s"]).points
    assert point.changes[0].verdict == "not shown"
    there = measured_result(tmp_path / "d", [2.0, 2.1, 2.2], run={"machine": {"processor": "q"}})
    (point,) = compare(one, there, ["engine_s"]).points
    assert point.changes[0].verdict == "not shown" and "other machine" in point.changes[0].detail


@pytest.mark.parametrize(
    ("one", "other", "verdict", "detail"),
    [
        ([0.0] * 5, [0.0] * 5, "equal", "n=5 and 5"),
        ([0.0] * 5, [0.0, 0.0, 0.0, 0.0, 1.0], "not shown",
         "n=5 and 5, p=1; would settle it: about 131 repetitions of both"),
        ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], "not shown",
         "n=3 and 3, p=0.1; would settle it: at least 4 repetitions of both; there are 3 and 3"),
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], "not shown",
         "n=3 and 3, p=1; would settle it: at least 4 repetitions of both; there are 3 and 3"),
    ],
)  # fmt: skip
def test_no_difference_is_claimed_where_none_is_shown(tmp_path, one, other, verdict, detail):
    sides = [measured_result(tmp_path / name, values) for name, values in (("a", one), ("b", other))]
    for pair in (sides, reversed(sides)):
        ((change,),) = (point.changes for point in compare(*pair, ["engine_s"]).points)
        assert (change.verdict, change.detail) == (verdict, detail)


def test_points_that_only_one_has_are_named(pair, tmp_path):
    (tmp_path / "z.toml").write_text(DAY34.read_text().replace("[48, 32, 24, 16, 12, 8]", "[48, 9]"))
    assert invoke("sweep", str(tmp_path / "z.toml"), "--engine", "schedule", "--out", str(tmp_path / "z"),
                  "--no-plots", "--no-progress").exit_code == 0  # fmt: skip
    found = compare(pair[0], load_result(tmp_path / "z"))
    assert [p.name for p in found.points] == ["pool 48"]
    assert found.only_first == ("pool 32", "pool 24", "pool 16", "pool 12", "pool 8")
    assert found.only_other == ("pool 9",)
    (tmp_path / "y.toml").write_text(DAY34.read_text().replace("[48, 32, 24, 16, 12, 8]", "[9]"))
    assert invoke("sweep", str(tmp_path / "y.toml"), "--engine", "schedule", "--out", str(tmp_path / "y"),
                  "--no-plots", "--no-progress").exit_code == 0  # fmt: skip
    done = invoke("compare", "results/day34", str(tmp_path / "y"))
    assert done.stdout.startswith("\nday34 and y have no point in common\nonly in day34: pool 48;")
    drawn = invoke("compare", "results/day34", str(tmp_path / "y"), "--figure", str(tmp_path / "f.png"))
    nothing = f"figure: {tmp_path / 'f.png'} is not drawn, since no point is in common\n"
    assert (drawn.exit_code, drawn.stdout) == (0, done.stdout + nothing) and not (tmp_path / "f.png").exists()


def test_the_command(results, tmp_path):  # noqa: F811
    a, b, c = (str(results / name) for name in "abc")
    done = invoke("compare", a, b, c, "--figure", str(tmp_path / "f.png"))
    assert done.exit_code == 0, done.output
    assert "b against a" in done.stdout and "c against a" not in done.stdout, "nothing differs"
    assert "every request's latency in c over its own in a" in done.stdout
    assert "not all texts were computed" in done.stdout
    assert ["pool", "12", "iterations", "64", "72", "8", "worse"] in [line.split() for line in done.stdout.splitlines()]
    assert (tmp_path / "f.png").stat().st_size > 20_000
    assert not any("equal" in line.split() and "iterations" in line.split()[2:3] for line in done.stdout.splitlines())
    document = json.loads(invoke("compare", a, b, "--format", "json").stdout)
    assert document["others"][0]["points"][4]["evictions"]["kept"] == 4
    assert document["others"][0]["points"][4]["changes"][0]["difference"] == 8
    markdown = invoke("compare", a, b, "--format", "markdown").stdout
    assert markdown.count("| pool 12 |") >= 3 and markdown.startswith("- b: not all texts were computed")
    assert "equal" in invoke("compare", a, b, "--all").stdout


def test_what_was_measured_once_is_counted_and_only_shown_when_asked_for():
    shown, all_of_it = (invoke("compare", "results/day34", "results/day34", *more).stdout for more in ((), ("--all",)))
    assert "day34 (2): 24 figures were measured once, so no difference can be shown of them" in shown
    assert "measured once)" not in shown and all_of_it.count("no difference shown (measured once)") == 24


def drawn(folders, names):
    """The figure of results against the first, laid out."""
    loaded = [load_result(folder) for folder in folders]
    with mpl.rc_context(STYLE):
        figure = comparison(loaded, names, [compare(loaded[0], other) for other in loaded[1:]])
        figure.draw_without_rendering()
    return figure


def test_the_legend_names_every_result():
    """One that begins with an underscore, too."""
    figure = drawn(["results/day34"] * 3, ["_a", "b", "_c"])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["_a", "b", "_c"]
    assert len({line.get_marker() for line in figure.legends[0].get_lines()}) == 3


@pytest.mark.parametrize("name", ["day34", "victims", "schedules"])
def test_axes_stay_as_large_whatever_the_points_are_called(name):
    """Their names stand below without touching each other, and the legend below them."""
    figure = drawn([f"results/{name}"] * 2, ["a", "b" * 60])
    for axes in figure.axes:
        box = axes.get_window_extent()
        assert box.width > 4 * figure.dpi and box.height > 2.2 * figure.dpi
    for axes in figure.axes[2:]:
        names = [label.get_window_extent() for label in axes.get_xticklabels()]
        assert all(one.x1 <= other.x0 for one, other in pairwise(names))
        assert axes.xaxis.label.get_window_extent().y0 >= figure.legends[0].get_window_extent().y1


@pytest.mark.parametrize(("pools", "said"), [("[48, 9]", "1 point"), ("[48, 9, 10]", "2 points")])
def test_points_that_are_not_drawn_are_counted(tmp_path, pools, said):
    (tmp_path / "z.toml").write_text(DAY34.read_text().replace("[48, 32, 24, 16, 12, 8]", pools))
    assert invoke("sweep", str(tmp_path / "z.toml"), "--engine", "schedule", "--out", str(tmp_path / "z"),
                  "--no-plots", "--no-progress").exit_code == 0  # fmt: skip
    title = drawn(["results/day34", tmp_path / "z"], ["a", "b"]).get_suptitle()
    assert title == f"day34: b against a\n{said} that a lacks: not drawn"


def test_seconds_of_one_run_each_are_said_to_be(tmp_path):
    """Ratios of latencies: no repetition tells how much they vary."""
    one, other = measured_result(tmp_path / "a", [1.0] * 5), measured_result(tmp_path / "b", [1.0] * 5)
    there = measured_result(tmp_path / "c", [1.0], run={"machine": {"processor": "q"}})
    details = {line.unit: line.detail for line in compare(one, other).points[0].latencies}
    assert details == {"iterations": "", "s": "measured, one run each"}
    details = {line.unit: line.detail for line in compare(one, there).points[0].latencies}
    assert details["s"].startswith("measured, one run each, on other machines: machine.system s against None")
    title = "every request's latency in b over its own in a; in s: measured, one run each\n"
    assert title in invoke("compare", str(tmp_path / "a"), str(tmp_path / "b")).stdout
    modelled = load_result("results/long_context")
    assert {line.detail for line in compare(modelled, modelled).points[0].latencies} == {""}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("a",), 2, "at least two"),
        (("a", "nowhere"), 2, "not a result folder"),
        (("a", "b", "--metric", "nothing"), 2, "is no metric"),
        (("a", "b", "--figure", "x.exe"), 2, "must end in"),
        (("a", "b", "--figure", "/dev/null/x.png"), 2, "no folder"),
        (("a",) * 10 + ("--figure", "x.png"), 2, "too many to tell apart"),
        (("a", "../../../../../results/watermark"), 5, "workload"),
    ],
)
def test_wrong_questions(results, tmp_path, monkeypatch, arguments, code, message):  # noqa: F811
    watermark = Path("results/watermark").resolve()
    monkeypatch.chdir(results)
    arguments = [str(watermark) if name.endswith("watermark") else name for name in arguments]
    done = invoke("compare", *arguments)
    assert done.exit_code == code and message in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_names_of_folders_make_no_markup(results, tmp_path):  # noqa: F811
    (tmp_path / "a|b<b>`x`").symlink_to(results / "b")
    done = invoke("compare", str(results / "a"), str(tmp_path / "a|b<b>`x`"), "--format", "markdown")
    (head, rule) = [line for line in done.stdout.splitlines() if line.startswith("| point | metric |")
                    or line.startswith("| --- | --- |")][:2]  # fmt: skip
    assert len(head.replace("\\|", "").split("|")) == len(rule.split("|")) and "<b>" not in done.stdout.replace(
        "\\<", ""
    )


def test_waiting_longer_is_worse(pair):
    for metric in ("ttft_p99_iterations", "latency_iterations.p99", "preemption_latency_penalty"):
        verdicts = {change.verdict for point in compare(*pair, [metric]).points for change in point.changes}
        assert "differs" not in verdicts and "worse" in verdicts


def test_goodput_under_other_objectives_is_not_compared(tmp_path):
    one = measured_result(tmp_path / "a", [1.0])
    other = measured_result(
        tmp_path / "b", [1.0], run={"scenario": {"name": "x", "clock": "iterations", "slo": {"e2e_s": 1}}}
    )
    (point,) = compare(one, other, ["goodput_fraction", "iterations"]).points
    assert [(c.verdict, c.detail) for c in point.changes] == [("unknown", "held to other objectives"), ("equal", "")]


def test_a_metric_by_name(pair):
    (point, *_) = compare(*pair, ["latency_iterations.p99"]).points
    assert [change.metric for change in point.changes] == ["latency_iterations.p99"]
    with pytest.raises(UsageError, match="no metric"):
        compare(*pair, ["latency"])
