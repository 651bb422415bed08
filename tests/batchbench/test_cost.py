"""The cost lesson's values and errors, and the flip point as a formula."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from batchbench.calibration import save_calibration
from batchbench.cost import (
    bytes_per_token,
    cheaper,
    eviction_overhead,
    flip_bandwidth_bytes_per_s,
    pick_victim,
    recompute_ms,
    swap_ms,
)
from tests.batchbench.test_calibration import calibration
from tests.batchbench.test_cli import invoke

LESSON = json.loads((Path(__file__).parents[1] / "golden" / "day34.json").read_text())["cost_lesson"]


def test_values_of_the_lesson():
    assert recompute_ms(1000) == LESSON["recompute_ms(1000)"]
    assert swap_ms(1000, 131072, 25e9, round_trip=False) == LESSON["swap_ms(1000, 131072, 25e9, round_trip=False)"]
    assert swap_ms(1000, 131072, 25e9) == LESSON["swap_ms(1000, 131072, 25e9)"]
    assert cheaper(1000, 131072, 25e9) == LESSON["cheaper(1000, 131072, 25e9)"]
    flip = LESSON["link bandwidth at which the choice flips, bytes/s"]
    assert flip_bandwidth_bytes_per_s(131072) == flip
    assert cheaper(1000, 131072, flip) == "recompute"  # equal: a copy that gains nothing is not made
    assert cheaper(1000, 131072, math.nextafter(flip, math.inf)) == "swap"


def test_nothing_cached_costs_nothing_and_is_recomputed():
    assert recompute_ms(0) == swap_ms(0, 131072, 25e9) == 0
    assert cheaper(0, 131072, 25e9) == "recompute"


@pytest.mark.parametrize("bandwidth", [0, -1.0, math.nan])
def test_a_link_must_have_a_bandwidth(bandwidth):
    with pytest.raises(ValueError, match="bandwidth_bytes_per_s is .*, must be positive"):
        swap_ms(1, 1, bandwidth)
    with pytest.raises(ValueError, match="must be positive"):
        cheaper(1, 1, bandwidth)


def test_the_victim_is_the_cheapest_to_rebuild_and_the_first_name_among_equals():
    assert pick_victim({"b": 5, "a": 9, "c": 5}) == "b"
    assert pick_victim({"z": 0}) == "z"
    with pytest.raises(ValueError, match="no sequence to evict"):
        pick_victim({})


def test_overhead_sums_both_strategies():
    assert eviction_overhead([]) == 0
    assert eviction_overhead([(1000, "recompute"), (1000, "swap")]) == 100.0 + 10.48576
    with pytest.raises(ValueError, match="unknown strategy 'drop'; known: recompute, swap"):
        eviction_overhead([(1, "drop")])


def test_bytes_per_token_of_a_model():
    assert bytes_per_token(layers=30, kv_heads=3, head_size=64, element_bytes=2) == 23_040  # SmolLM2-135M in bfloat16
    with pytest.raises(ValueError, match="kv_heads is 0, must be at least 1"):
        bytes_per_token(1, 0, 1, 1)


def test_negative_sizes_are_refused():
    for call in (lambda: recompute_ms(-1), lambda: swap_ms(-1, 1, 1), lambda: flip_bandwidth_bytes_per_s(-1)):
        with pytest.raises(ValueError, match="must not be negative"):
            call()
    with pytest.raises(ValueError, match="never loses"):
        flip_bandwidth_bytes_per_s(1, 0)


def test_the_command_prints_the_lessons_comparison():
    document = json.loads(invoke("cost", "--format", "json").stdout)
    assert document["recompute_ms"] == LESSON["recompute_ms(1000)"]
    assert document["swap_ms"] == LESSON["swap_ms(1000, 131072, 25e9)"]
    assert document["cheaper"] == LESSON["cheaper(1000, 131072, 25e9)"]
    assert document["flip_bandwidth_bytes_per_s"] == LESSON["link bandwidth at which the choice flips, bytes/s"]
    assert "2.62 GB/s" in invoke("cost").stdout


def test_the_command_takes_other_constants_and_draws_them(tmp_path):
    shape = ("--layers", "30", "--kv-heads", "3", "--head-size", "64", "--element-bytes", "2")
    link = ("--bandwidth", "1e9", "--ms-per-token", "0.01", "--tokens", "100")
    figure = tmp_path / "cost.png"
    document = json.loads(invoke("cost", *shape, *link, "--plot", str(figure), "--format", "json").stdout)
    assert (document["kv_bytes_per_token"], document["recompute_ms"]) == (23_040, 1.0)
    assert (document["swap_ms"], document["cheaper"]) == (pytest.approx(4.608), "recompute")
    assert document["figure"] == str(figure)
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_the_command_takes_measured_costs_and_draws_them(tmp_path):
    path, figure = tmp_path / "c.json", tmp_path / "cost.png"
    save_calibration(calibration(), path)
    asked = ("cost", "--calibration", str(path), "--plot", str(figure))
    document = json.loads(invoke(*asked, "--tokens", "14", "--format", "json").stdout)
    assert (document["recompute_ms"], document["swap_ms"], document["cheaper"]) == (pytest.approx(7.2), 6.0, "swap")
    assert document["crossover_tokens"] == [12]
    assert document["flip_bandwidth_bytes_per_s"] == pytest.approx(2 * 14 * 768 / 7.2e-3)
    assert document["extrapolated"] is False
    assert figure.read_bytes().startswith(b"\x89PNG")
    table = invoke(*asked).stdout
    assert "swapping takes less from 12 positions on" in table
    assert "extrapolated: nothing longer than 16 positions was measured" in table
