"""Figures: every one is drawn from tables alone, shows what it must, survives odd results."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from batchbench import build_requests, engine_factory, load_scenario, sweep_pool_sizes
from batchbench.clocks import IterationCost
from batchbench.driver import Pacing
from batchbench.figures.bands import bands, medians
from batchbench.figures.drawing import closer_look, draw_all
from batchbench.figures.inline_svg import inline_svg
from batchbench.figures.marks import marks_of, say
from batchbench.figures.pool_use import begin_s, pool_use
from batchbench.figures.rows import rows_against_positions
from batchbench.figures.service import service, victims
from batchbench.figures.slots import DRAWN_STAYS, slot_timeline
from batchbench.figures.staircase import DRAWN_REQUESTS, staircase
from batchbench.figures.style import ALERT, DARK, LIGHT, LINES, MID, STYLE, bars, draw_state
from batchbench.figures.sweep import pool_sweep
from batchbench.results import Result, load_result
from batchbench.stays import RESUME, stays_of
from tests.batchbench.scripted import Saves, it, request, result_of
from tests.batchbench.test_cli import invoke
from tests.batchbench.test_tables import day34  # noqa: F401  # the fixture


@pytest.fixture
def result(day34):  # noqa: F811
    return load_result(day34)


@pytest.fixture(autouse=True)
def style():
    with mpl.rc_context(STYLE):
        yield


def texts(figure):
    return " | ".join(t.get_text() for t in figure.findobj(mpl.text.Text) if t.get_text())


def test_every_figure_is_a_picture_and_stays_legible_in_grey(result, tmp_path):
    paths = draw_all(result, tmp_path / "p")
    assert [p.name for p in paths] == [
        "pool_sweep.png", "staircase.png", "slot_timeline.png", "pool_use.png", "service.png", "victims.png",
        "rows_against_positions.png",
    ]  # fmt: skip
    for path in paths:
        grey = imread(path)[..., :3] @ [0.299, 0.587, 0.114]
        assert grey.shape[1] >= 900
        assert grey.min() < 0.2 and grey.max() > 0.99  # real blacks on real white
        assert 0.02 < (grey < 0.9).mean() < 0.7


def test_the_phases_differ_in_grey_as_well_as_in_colour():
    shades = sorted(np.dot(mpl.colors.to_rgb(c), [0.299, 0.587, 0.114]) for c in (DARK, MID, LIGHT))
    assert all(b - a > 0.1 for a, b in pairwise(shades))


def test_pool_sweep_names_the_pool_that_evicts_more_and_recomputes_less(result):
    shown = texts(pool_sweep(result))
    assert "(8 blocks evict more than 12, yet recompute less:\n12.0 against 15.3 positions per eviction)" in shown
    for label in ("pool [blocks]", "evictions per request", "share of forward positions [%]", "latency ratio"):
        assert label in shown


@pytest.mark.parametrize(("numerics", "marked"), [("fast", True), ("exact", False)])
def test_figures_say_when_numerics_is_fast(result, numerics, marked):
    result = Result({**result.run, "engine": {"slots": 6, "numerics": numerics}}, result.files)
    for figure in (pool_sweep(result), staircase(result), slot_timeline(result, 4),
                   rows_against_positions(result, 4)):  # fmt: skip
        assert ("day34 (fast numerics): " in texts(figure)) == marked


def test_staircase_has_a_panel_per_pool_and_every_latency(result):
    shown = texts(staircase(result))
    for pool in (48, 32, 24, 16, 12, 8):
        assert f"pool of {pool} blocks" in shown
    for latency in (24, 28, 36, 44, 56, 64, 100):
        assert f" {latency} |" in shown


def assert_one_request_a_slot(stays):
    order = np.lexsort((stays.start, stays.slot))
    same = np.diff(stays.slot[order]) == 0
    assert (stays.held[order][:-1] <= stays.start[order][1:])[same].all()


def test_slot_timeline_draws_each_stay(result):
    figure = slot_timeline(result, 4)
    stays = stays_of(result, 4)
    assert len(stays) == 13 and stays.evicted.sum() == 7 and (stays.begins == RESUME).sum() == 7
    assert_one_request_a_slot(stays)
    assert (stays.end - stays.start).sum() == 144
    assert all(label in texts(figure) for label in ("prefill", "decode", "resume", "evicted", "slot", "iteration"))


@pytest.mark.parametrize("name", ["swap", "schedules", "victims"])
def test_every_bar_of_rows_and_positions_names_its_choices_and_pool(name):
    result = load_result(f"results/{name}")
    _, rows, positions = rows_against_positions(result, 2).axes
    names = [f"{row.choices}: {row.pool_blocks}" if row.choices else str(row.pool_blocks)
             for row in result.tables["pools"].itertuples()]  # fmt: skip
    for axes in (rows, positions):
        assert [label.get_text() for label in axes.get_xticklabels()] == names


def test_rows_against_positions_shows_both_counts(result):
    shown = texts(rows_against_positions(result, 4))
    assert shown.count("144") == 6
    assert all(f" {n} " in shown for n in (168, 212, 224, 240, 268, 256))


def test_the_closer_look_is_at_the_pool_that_recomputes_most(result):
    assert closer_look(result, None) == 4


def odd_result(folder, requests, script, **options):
    run = {"scenario": {"name": "odd $x_1$"}, "engine": {"slots": 2}}
    return result_of(folder / "o", run, requests, script, **options)


def test_an_engine_that_reports_little_still_gets_its_figures(tmp_path):
    script = [it(2), it(1, preempted=("a",)), it(1), it(2, finished=("a", "b"))]
    odd = odd_result(tmp_path, [request("a", 3), request("b", 3)], script)
    names = [path.name for path in draw_all(odd, tmp_path)]
    assert names == [
        "pool_sweep.png",
        "staircase.png",
        "service.png",
        "rows_against_positions.png",
    ]  # no slots, no timeline
    assert "no iteration is known" in texts(rows_against_positions(odd, 0))


def test_a_single_pool_with_a_single_request_draws(tmp_path):
    odd = odd_result(tmp_path, [request("a", 1)], [it(1, finished=("a",))])
    draw_all(odd, tmp_path)
    assert "same text" not in texts(pool_sweep(odd))


def test_many_requests_draw_without_labels_that_collide(tmp_path):
    requests = [request(f"r{n}", 1) for n in range(200)]
    odd = odd_result(tmp_path, requests, [it(1, finished=(r.request_id,)) for r in requests], slots=1)
    draw_all(odd, tmp_path)
    assert "r100" not in texts(staircase(odd))


# ---- figures of waiting, of the pool, of the victims --------------------------------------------


def swept(folder, toml, pacing=None, slo=None):
    """A schedule's result."""
    (folder / "x.toml").write_text(toml)
    scenario, saves = load_scenario(folder / "x.toml"), Saves(folder / "o")
    requests = build_requests(scenario.workload, None, scenario.clock)
    make = engine_factory("schedule", scenario.engine)
    timings = sweep_pool_sizes(requests, scenario.sweep.pools, make, observer=saves, pacing=pacing)
    saves.writer.join(timings, {"scenario": {"name": scenario.name, "slo": slo}, "engine": {"slots": 1}})
    return load_result(folder / "o")


TRAFFIC = """
name = "traffic"
clock = "virtual"
[virtual]
iteration_s = 0.01
[engine]
slots = 8
block_size = 4
[workload]
requests = {requests}
prompt_tokens = {{dist = "uniform", min = 4, max = 40}}
output_tokens = {{dist = "uniform", min = 1, max = 30}}
[workload.arrivals]
process = "on-off"
rate = 20
on = 3
off = 10
[sweep]
pools = [120, 40]
"""
PACING = Pacing("virtual", IterationCost.of_seconds(0.01, 0.0003, 0.0001))


@pytest.fixture(scope="module")
def traffic(tmp_path_factory):
    """More requests, stays and iterations than are drawn one by one; with times without work."""
    folder = tmp_path_factory.mktemp("traffic")
    return swept(folder, TRAFFIC.format(requests=1500), PACING, {"ttft_s": 0.5, "tpot_s": None, "e2e_s": 3.0})


def test_pool_use_shows_every_pool_with_those_who_run_and_wait(result):
    figure = pool_use(result)
    shown = texts(figure)
    assert all(f"pool of {n} blocks" in shown for n in (48, 32, 24, 16, 12, 8))
    assert len(figure.axes) == 3 * 6 and shown.count("waiting") == shown.count("running") == 6
    assert "band" not in shown and "iteration" in shown
    blocks, running, waiting = figure.axes[-3:]
    used = 8 - result.point("iterations", 5)["free_blocks"].to_numpy()
    assert list(blocks.lines[1].get_ydata()[:-1]) == list(used)
    assert list(running.lines[0].get_ydata()[:-1]) == list(result.point("iterations", 5)["running"])
    assert list(waiting.lines[0].get_ydata()[:-1]) == list(result.point("iterations", 5)["waiting"])


def test_pool_use_is_in_seconds_where_the_clock_is_and_says_that_it_draws_bands(traffic):
    figure = pool_use(traffic)
    assert "time [s]" in texts(figure) and "band: least to greatest, line: mean" in texts(figure)
    end = (traffic.tables["requests"]["arrival_s"] + traffic.tables["requests"]["latency_s"]).max()
    assert end <= figure.axes[0].get_xlim()[1] <= 1.1 * end


@pytest.mark.parametrize("point", [0, 1])
def test_when_an_iteration_began_is_told_from_who_arrived_and_finished(traffic, point):
    frame, requests = traffic.point("iterations", point), traffic.point("requests", point)
    begin, step = begin_s(traffic, point, frame), frame["step_s"].to_numpy()
    assert (np.diff(begin) >= step[:-1] - 1e-9).all()  # in order, none before the last one's end
    assert (np.diff(begin) > step[:-1] + 1).sum() > 10  # times without work
    for first, at, within in (
        ("arrival_iteration", requests["arrival_s"], 0),
        ("finished_iteration", requests["arrival_s"] + requests["latency_s"], 1),
    ):
        place = np.searchsorted(frame["iteration"], requests[first])
        error = begin[place] + within * step[place] - at
        assert (error > -1e-6).all() and (within == 0 or (error < 1e-6).all())


def test_service_draws_percentiles_and_objectives(traffic):
    figure = service(traffic)
    assert [axes.get_title() for axes in figure.axes] == [
        "To the first token", "Between two tokens", "From arrival to last token",
    ]  # fmt: skip
    rows = traffic.tables["service"].query("metric == 'ttft' and unit == 's'").sort_values("pool_blocks")
    drawn = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert {name: drawn[name] for name in ("p50", "p90", "p99", "max")} == {
        name: list(rows[name]) for name in ("p50", "p90", "p99", "max")
    }
    assert drawn["objective of [slo]"] == [0.5, 0.5]
    assert "objective of [slo]" not in [line.get_label() for line in figure.axes[1].lines]


def test_only_texts_that_were_computed_are_said_to_be_the_same(result, traffic):
    assert "every pool produced the same text" in texts(pool_sweep(result))
    assert "same text" not in texts(pool_sweep(traffic))


def test_service_without_times_is_in_iterations(result):
    figure = service(result)
    assert "[iterations]" in texts(figure) and "[s]" not in texts(figure) and "slo" not in texts(figure)


PARTS = ["queued", "returning", "rebuilding", "decoding"]


def test_victims_stack_what_was_lost_to_the_right_and_what_was_gained_to_the_left(result):
    pools = result.tables["pools"]
    pools.loc[5, [f"victims_{part}_iterations" for part in ("extra", *PARTS)]] = [11, -7, 20, 3, -5]
    figure = victims(result)
    (axes,) = figure.axes
    bars = [(bar.get_y() + bar.get_height() / 2, bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches]
    assert [tuple(sorted(bar[1:])) for bar in bars if round(bar[0]) == 5 and bar[1] == bar[1] and bar[2] == bar[2]] == [
        (-7, 0), (0, 20), (20, 23), (-12, -7),
    ]  # fmt: skip
    assert axes.lines[0].get_xdata()[5] == 11 and axes.get_xlim()[0] < -12
    assert "nobody was evicted" in texts(figure) and "+11" in texts(figure)


def test_finished_members_of_a_static_batch_hold_their_slot_until_it_ends(tmp_path):
    toml = """
name = "static"
[engine]
slots = 3
block_size = 8
batching = "static"
[workload]
lengths = [[12, 40], [100, 8], [30, 30], [5, 60], [20, 5], [7, 9]]
[sweep]
pools = [64, 24, 14]
"""
    static = swept(tmp_path, toml)
    for point in range(3):
        stays, iterations = stays_of(static, point), static.point("iterations", point)
        assert_one_request_a_slot(stays)
        forwarded = [((stays.start <= n) & (n < stays.held)).sum() for n in iterations["iteration"]]
        assert forwarded == list(iterations["issued_tokens"])
        assert "finished, still forwarded" in texts(slot_timeline(static, point))


def test_pools_ascend_on_every_axis(result):
    rows = rows_against_positions(result, 4).axes[1]
    assert [label.get_text() for label in rows.get_xticklabels()] == ["8", "12", "16", "24", "32", "48"]


# ---- many values in few bins --------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_bands_are_the_least_and_greatest_of_each_bin(seed):
    rng = np.random.default_rng(seed)
    count, bins = int(rng.integers(1, 400)), int(rng.integers(1, 50))
    start = np.cumsum(rng.integers(1, 4, count))  # with gaps, over which a value holds
    values = rng.integers(-50, 50, count)
    end = int(start[-1] + rng.integers(1, 5))
    found = bands(start, values, end, bins)
    held = values[np.searchsorted(start, np.arange(start[0], end), side="right") - 1]  # of each iteration
    inside = [held[int(a - start[0]) : int(b - start[0])] for a, b in pairwise(found.edges)]
    assert list(found.low) == [part.min() for part in inside]
    assert list(found.high) == [part.max() for part in inside]
    assert np.allclose(found.mean, [part.mean() for part in inside])
    assert sum(map(len, inside)) == end - start[0]  # nothing is left out
    assert len(found.low) <= bins


def test_bands_over_time_count_a_value_for_as_long_as_it_holds():
    found = bands(np.array([0.0, 0.5, 9.5]), np.array([3, 7, 1]), 10.0, 4)
    assert list(found.low) == [3, 7, 7, 1] and list(found.high) == [7, 7, 7, 7]
    assert np.allclose(found.mean, [(0.5 * 3 + 2 * 7) / 2.5, 7, 7, (2 * 7 + 0.5 * 1) / 2.5])


@pytest.mark.parametrize("count", [50, 5000])
def test_a_state_is_drawn_whole_or_as_its_bands_and_never_outside_them(count):
    values = np.random.default_rng(1).integers(10, 90, count)
    axes = mpl.figure.Figure().subplots()
    look = {"color": "0", "hatch": "", "linestyle": "-"}
    banded = draw_state(axes, np.arange(count), values, count, 200, look)
    assert banded == (count > 200)
    if not banded:
        assert list(axes.lines[0].get_ydata()[:-1]) == list(values)
        return
    found = bands(np.arange(count), values, count, 100)
    corners = axes.collections[0].get_paths()[0].vertices
    for a, b, low, high in zip(found.edges[:-1], found.edges[1:], found.low, found.high, strict=True):
        inside = corners[(corners[:, 0] >= a) & (corners[:, 0] <= b)][:, 1]
        assert low in inside and high in inside
        assert (low, high) == (values[int(a) : int(b)].min(), values[int(a) : int(b)].max())
    assert corners[:, 1].min() == values.min() and corners[:, 1].max() == values.max()


def test_many_requests_are_summarised_and_the_figure_says_so(traffic):
    assert len(traffic.point("requests", 1)) > DRAWN_REQUESTS and len(stays_of(traffic, 1)) > DRAWN_STAYS
    assert_one_request_a_slot(stays_of(traffic, 1))
    figure = staircase(traffic)
    assert "1,500 requests are too many to draw each" in texts(figure)
    requests = traffic.point("requests", 1).sort_values("arrival_iteration", kind="stable")
    latency, (above, below) = requests["latency_iterations"].to_numpy(), figure.axes[2:4]
    corners = above.collections[0].get_paths()[0].vertices
    assert corners[:, 1].min() == latency.min() and corners[:, 1].max() == latency.max()
    line, evicted = above.patches[0], below.patches[0]
    edges = line.get_data().edges
    assert list(line.get_data().values) == list(medians(latency, edges))
    total = (evicted.get_data().values * np.diff(edges)).sum()
    assert round(total) == traffic.tables["pools"]["preemptions"][1] > 0  # every one is drawn
    shown = texts(slot_timeline(traffic, 1))
    assert "stays are too many to draw each" in shown and "Band: least to greatest" in shown


def test_slots_in_use_are_the_rows_that_were_forwarded(traffic):
    stays, iterations = stays_of(traffic, 1), traffic.point("iterations", 1)
    change = np.zeros(iterations["iteration"].max() + 2, dtype=np.int64)
    np.add.at(change, stays.start, 1)
    np.add.at(change, stays.end, -1)
    assert list(np.cumsum(change)[iterations["iteration"]]) == list(iterations["issued_tokens"])


def luminance(colour):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in mpl.colors.to_rgb(colour)]
    return np.dot(linear, [0.2126, 0.7152, 0.0722])


# What dichromats see of linear RGB (Machado, Oliveira and Fernandes, 2009, severity 1).
DICHROMATS = {
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


@pytest.mark.parametrize("eye", DICHROMATS)
def test_the_four_colours_are_told_apart_by_every_eye(eye):
    seen = [np.clip(DICHROMATS[eye] @ np.array(mpl.colors.to_rgb(c)), 0, 1) for c in (DARK, MID, LIGHT, ALERT)]
    for n, one in enumerate(seen):
        assert all(np.abs(one - other).max() > 0.25 for other in seen[n + 1 :])


def test_lines_are_told_apart_without_colour():
    assert len({line["marker"] for line in LINES}) == len(LINES)
    for n, one in enumerate(LINES):
        for other in LINES[n + 1 :]:
            same_grey = abs(luminance(one["color"]) - luminance(other["color"])) < 0.05
            assert not same_grey or one["linestyle"] != other["linestyle"]


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_figure_is_the_same_file_every_time_in_every_format(result, tmp_path, ending):
    first, again = (draw_all(result, tmp_path / name, ending=ending) for name in ("a", "b"))
    assert [path.suffix for path in first] == [f".{ending}"] * 7
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]


def test_svg_has_its_text_as_text_in_the_one_font(result, tmp_path):
    paths = draw_all(result, tmp_path, ending="svg")
    for path in paths:
        assert set(re.findall('font-family: ([^;"]+)', path.read_text())) == {"'DejaVu Sans'"}
    assert ">evictions per request<" in paths[0].read_text()


def test_every_module_of_figures_draws_in_the_style_file():
    assert STYLE["font.family"] == ["DejaVu Sans"] and STYLE["svg.fonttype"] == "none" and STYLE["pdf.fonttype"] == 42
    drawing = [path for path in Path("batchbench").rglob("*.py") if "savefig" in path.read_text()]
    assert len(drawing) == 6
    for path in drawing:
        if path.name != "inline_svg.py":  # is drawn to within the style of its page
            assert "mpl.rc_context(STYLE)" in path.read_text(), path


# What marks say


def test_marks_are_the_values_and_lie_where_they_are_drawn():
    figure = Figure(figsize=(4, 2))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.plot([0, 10], [0, 5], "o", label="a line")
    axes.axhline(1)
    axes.set(xlim=(0, 10), ylim=(0, 5), xlabel="pool", ylabel="cost", title="here")
    figure.canvas.draw()
    low, high = marks_of(figure)
    assert (low.panel, low.series, low.at, low.value) == ("here", "a line, cost", "pool 0", 0.0)
    assert high.sentence == "here; a line, cost; pool 10; 5"
    assert [round(v, 3) for v in low.box] == [-4.5, 144 - 4.5, 9, 9]
    assert [round(v, 3) for v in high.box] == [288 - 4.5, -4.5, 9, 9]


def test_marks_of_bars_are_named_by_their_category_and_of_named_bars_by_their_names():
    figure = Figure(figsize=(4, 2))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.barh([0, 1], [3.0, np.nan], height=1.0)
    axes.set_yticks([0, 1], ["48", "32"])
    axes.set(xlim=(0, 6), ylim=(-0.5, 1.5), xlabel="evictions")
    drawn = bars(axes, np.array([1.0]), np.array([2.0]), np.array([2.0]), 1.0)
    say(drawn, [("r0", "from 2", 2.0)])
    figure.canvas.draw()
    bar, named = sorted(marks_of(figure), key=lambda mark: mark.series)
    assert (bar.series, bar.at, bar.value) == ("evictions", "48", 3.0)
    assert [round(v, 3) for v in bar.box] == [0, 72, 144, 72]
    assert (named.series, named.at, named.value) == ("r0", "from 2", 2.0)
    assert [round(v, 3) for v in named.box] == [96, 0, 96, 72]


def test_an_inline_picture_has_no_style_no_namespace_and_ids_of_its_own(result):
    text, marks = inline_svg(pool_sweep(result), "k", "A <title>", "What & how")
    root = ElementTree.fromstring(text)
    assert root.tag == "svg" and not re.search("style=|xmlns|xlink|http|metadata", text)
    assert [child.tag for child in root][:2] == ["title", "desc"] and root[0].text == "A <title>"
    ids = [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
    assert len(set(ids)) == len(ids) and all(one.startswith("k-") for one in ids)
    assert set(re.findall(r"#([\w.-]+)\)", text)) <= set(ids)
    assert len(root.findall(".//rect[@class='mark']")) == len(marks) == 43


@pytest.mark.parametrize(
    ("asked", "ending"), [((), ".png"), (("--format", "svg"), ".svg"), (("--format", "pdf"), ".pdf")]
)
def test_plot_writes_the_format_that_is_asked_for(day34, tmp_path, asked, ending):  # noqa: F811
    done = invoke("plot", str(day34), "--out", str(tmp_path / "p"), *asked)
    assert done.exit_code == 0, done.output
    assert {path.suffix for path in (tmp_path / "p").iterdir()} == {ending}
    begins = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[ending]
    assert all(path.read_bytes().startswith(begins) for path in (tmp_path / "p").iterdir())
