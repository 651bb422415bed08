"""Figures: every one is drawn from tables alone, shows what it must, survives odd results."""

from __future__ import annotations

from itertools import pairwise

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.image import imread

from batchbench import plots
from batchbench.results import Result, load_result
from tests.batchbench.scripted import it, request, result_of
from tests.batchbench.test_tables import day34  # noqa: F401  # the fixture


@pytest.fixture
def result(day34):  # noqa: F811
    return load_result(day34)


@pytest.fixture(autouse=True)
def style():
    with mpl.rc_context(plots.STYLE):
        yield


def texts(figure):
    return " | ".join(t.get_text() for t in figure.findobj(mpl.text.Text) if t.get_text())


def test_every_figure_is_a_picture_and_stays_legible_in_grey(result, tmp_path):
    paths = plots.draw_all(result, tmp_path / "p")
    assert [p.name for p in paths] == [
        "pool_sweep.png", "staircase.png", "slot_timeline.png", "rows_against_positions.png",
    ]  # fmt: skip
    for path in paths:
        grey = imread(path)[..., :3] @ [0.299, 0.587, 0.114]
        assert grey.shape[1] >= 900
        assert grey.min() < 0.2 and grey.max() > 0.99  # real blacks on real white
        assert 0.02 < (grey < 0.9).mean() < 0.7


def test_the_phases_differ_in_grey_as_well_as_in_colour():
    shades = sorted(np.dot(mpl.colors.to_rgb(c), [0.299, 0.587, 0.114]) for c in (plots.DARK, plots.MID, plots.LIGHT))
    assert all(b - a > 0.1 for a, b in pairwise(shades))


def test_pool_sweep_names_the_pool_that_evicts_more_and_recomputes_less(result):
    shown = texts(plots.pool_sweep(result))
    assert "8 blocks evict more than 12,\nyet recompute less: 12.0 against\n15.3 positions per eviction" in shown
    for label in ("pool [blocks]", "evictions per request", "share of forward positions [%]", "latency ratio"):
        assert label in shown


@pytest.mark.parametrize(("numerics", "marked"), [("fast", True), ("exact", False)])
def test_figures_say_when_numerics_is_fast(result, numerics, marked):
    result = Result({**result.run, "engine": {"slots": 6, "numerics": numerics}}, result.files)
    for figure in (plots.pool_sweep(result), plots.staircase(result), plots.slot_timeline(result, 4),
                   plots.rows_against_positions(result, 4)):  # fmt: skip
        assert ("day34 (fast numerics): " in texts(figure)) == marked


def test_staircase_has_a_panel_per_pool_and_every_latency(result):
    shown = texts(plots.staircase(result))
    for pool in (48, 32, 24, 16, 12, 8):
        assert f"pool of {pool} blocks" in shown
    for latency in (24, 28, 36, 44, 56, 64, 100):
        assert f" {latency} |" in shown


def test_slot_timeline_draws_each_stay(result):
    figure = plots.slot_timeline(result, 4)
    stays = list(plots._stays(result, 4))
    assert (
        len(stays) == 13
        and sum(stay.evicted for stay in stays) == 7
        and sum(stay.begins.startswith("resume") for stay in stays) == 7
    )
    for a in stays:  # a slot holds one request at a time
        for b in stays:
            assert a is b or a.slot != b.slot or a.end <= b.start or b.end <= a.start
    assert sum(stay.end - stay.start for stay in stays) == 144
    assert all(label in texts(figure) for label in ("prefill", "decode", "resume", "evicted", "slot", "iteration"))


def test_rows_against_positions_shows_both_counts(result):
    shown = texts(plots.rows_against_positions(result, 4))
    assert shown.count("144") == 6
    assert all(f" {n} " in shown for n in (168, 212, 224, 240, 268, 256))


def test_the_closer_look_is_at_the_pool_that_recomputes_most(result):
    assert plots._closer_look(result, None) == 4


def odd_result(folder, requests, script, **options):
    run = {"scenario": {"name": "odd $x_1$"}, "engine": {"slots": 2}}
    return result_of(folder / "o", run, requests, script, **options)


def test_an_engine_that_reports_little_still_gets_its_figures(tmp_path):
    script = [it(2), it(1, preempted=("a",)), it(1), it(2, finished=("a", "b"))]
    odd = odd_result(tmp_path, [request("a", 3), request("b", 3)], script)
    names = [path.name for path in plots.draw_all(odd, tmp_path)]
    assert names == ["pool_sweep.png", "staircase.png", "rows_against_positions.png"]  # no slots, no timeline
    assert "no iteration is known" in texts(plots.rows_against_positions(odd, 0))


def test_a_single_pool_with_a_single_request_draws(tmp_path):
    odd = odd_result(tmp_path, [request("a", 1)], [it(1, finished=("a",))])
    plots.draw_all(odd, tmp_path)
    assert "same text" not in texts(plots.pool_sweep(odd))


def test_many_requests_draw_without_labels_that_collide(tmp_path):
    requests = [request(f"r{n}", 1) for n in range(200)]
    odd = odd_result(tmp_path, requests, [it(1, finished=(r.request_id,)) for r in requests], slots=1)
    plots.draw_all(odd, tmp_path)
    assert "r100" not in texts(plots.staircase(odd))
