"""`batchbench inspect`: its figures against slow ones that are easy to see through, and what it prints and draws."""

from __future__ import annotations

import json
import random

import matplotlib.image
import numpy as np
import pytest

from batchbench.trace_stats import (
    collect,
    demand_bins,
    demand_figures,
    describe,
    kv_demand,
    length_percentiles,
    peak_arrivals,
)
from batchbench.traces import open_trace
from tests.batchbench.test_cli import assert_refused, here, invoke  # noqa: F401  # a fixture
from tests.batchbench.test_traces import LOADED, SAMPLES, plain, write

SAMPLES = SAMPLES.resolve()


def ints(*values):
    return np.array(values, np.int64)


def held(t, requests, seconds_per_token, *, before=False):
    """Positions and requests from a time on, or just before it, one request after another."""
    positions, there = 0.0, 0
    for arrival, prompt, output in requests:
        end = arrival + output * seconds_per_token
        if (arrival < t <= end) if before else (arrival <= t < end):
            positions, there = positions + prompt + (t - arrival) / seconds_per_token, there + 1
    return positions, there


def drawn(rng, number):
    """Requests (arrival_s, prompt, output), with times that fall together."""
    return sorted((rng.randrange(12) / 2, rng.randrange(1, 50), rng.randrange(1, 12)) for _ in range(number))


@pytest.mark.parametrize("seed", range(30))
def test_demand_is_what_each_request_holds(seed):
    rng = random.Random(seed)
    requests, pace = drawn(rng, rng.randrange(1, 9)), rng.choice([0.25, 0.5, 1.0])
    start = requests[0][0]
    requests = [(arrival - start, prompt, output) for arrival, prompt, output in requests]
    arrival, prompt, output = (ints(*column) for column in zip(*requests, strict=True))
    arrival = ints(*(round(one[0] * 1e9) for one in requests))
    demand = kv_demand(arrival, prompt, output, pace)
    ends = {one[0] + one[2] * pace for one in requests}
    assert list(demand.time_s) == sorted({one[0] for one in requests} | ends)
    for n, t in enumerate(demand.time_s):
        assert (demand.after[n], demand.requests[n]) == pytest.approx(held(t, requests, pace))
        assert demand.before[n] == pytest.approx(held(t, requests, pace, before=True)[0])
    bins = demand_bins(demand, 7)
    fine = [held(t, requests, pace)[0] for t in np.linspace(0, bins.edges_s[-1], 7 * 400, endpoint=False)]
    for n in range(7):
        part = fine[n * 400 : (n + 1) * 400]
        assert bins.low[n] <= min(part) + 1e-9
        assert bins.high[n] >= max(part) - 1e-9
        assert bins.mean[n] == pytest.approx(np.mean(part), abs=1.0)  # a step may fall between two samples
    figures = demand_figures(demand, 4)
    assert figures["peak_positions"] == round(max(*demand.after, *demand.before)) == round(bins.high.max())
    assert figures["mean_positions"] == pytest.approx(bins.mean.mean())
    assert figures["peak_requests"] == max(demand.requests)


@pytest.mark.parametrize("seed", range(10))
def test_the_peak_in_blocks_lies_within_its_bounds(seed):
    rng = random.Random(seed)
    requests = drawn(rng, 8)
    arrival = ints(*(round((one[0] - requests[0][0]) * 1e9) for one in requests))
    demand = kv_demand(arrival, ints(*(r[1] for r in requests)), ints(*(r[2] for r in requests)), 0.5)
    figures = demand_figures(demand, 4)
    peak = 0
    for t in np.arange(0, 13, 0.5):  # each second token is whole here; just before the time it grows
        there = [(a, p) for a, p, o in requests if a < t + requests[0][0] <= a + o * 0.5]
        peak = max(peak, sum(-(-(p + round((t + requests[0][0] - a) / 0.5)) // 4) for a, p in there))
    assert figures["peak_blocks_at_least"] <= peak <= figures["peak_blocks_at_most"]


def test_the_longest_span_and_the_slowest_tokens_do_not_overflow():
    ends = ints(0, 2**62 + 2**61)
    demand = kv_demand(ends, ints(1, 1), ints(10**7, 10**7), 100.0)
    assert demand.time_s[-1] == pytest.approx((2**62 + 2**61) / 1e9 + 1e9)
    assert demand_figures(demand, 16)["peak_positions"] == 10_000_001


def test_one_request_by_hand():
    demand = kv_demand(ints(0), ints(10), ints(4), 0.5)
    assert (list(demand.time_s), list(demand.before), list(demand.after)) == ([0, 2], [0, 14], [10, 0])
    assert demand_figures(demand, 4) == {
        "peak_positions": 14, "mean_positions": 12.0, "peak_requests": 1,
        "peak_blocks_at_least": 4, "peak_blocks_at_most": 4, "span_s": 2.0,
    }  # fmt: skip
    bins = demand_bins(demand, 2)
    assert (list(bins.low), list(bins.mean), list(bins.high)) == ([10, 12], [11, 13], [12, 14])


def test_percentiles_are_lengths_of_the_trace():
    assert length_percentiles(ints(*range(1, 101))) == {
        "mean": 50.5, "p50": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100,
    }  # fmt: skip
    assert length_percentiles(ints(7)) == {"mean": 7, "p50": 7, "p90": 7, "p95": 7, "p99": 7, "max": 7}


def test_peak_arrivals_count_in_stretches_from_the_first():
    seconds = 1_000_000_000
    assert peak_arrivals(ints(0, 9, 10, 11, 12, 30) * seconds) == 3
    assert peak_arrivals(ints(0)) == 1


def test_shared_positions_are_those_of_leading_ids_seen_before(tmp_path):
    rows = [(1024, [1, 2]), (1030, [1, 2, 3]), (1000, [2, 1]), (600, [9, 1]), (100, [1])]
    text = "".join(
        json.dumps({"timestamp": n, "input_length": length, "output_length": 1, "hash_ids": ids}) + "\n"
        for n, (length, ids) in enumerate(rows)
    )
    facts = collect(open_trace(write(tmp_path, "x", text)))
    assert facts.shared_positions == 0 + 1024 + 1000 + 0 + 100
    found = describe(facts, None, 16)
    assert found["shared_prefix_share"] == 2124 / 3754
    assert found["demand"] is None


def test_rows_are_described_by_arrival(tmp_path):
    facts = collect(open_trace(plain(tmp_path, "9,1,2", "7,3,4", "8,5,6")))
    assert list(facts.arrival_ns) == [0, 10**9, 2 * 10**9]
    assert (list(facts.prompt), list(facts.output)) == ([3, 5, 1], [4, 6, 2])
    facts = collect(open_trace(tmp_path / "x.csv"), (1, 2))
    assert (list(facts.arrival_ns), list(facts.prompt)) == ([0], [5])


def found(*arguments):
    done = invoke("inspect", *map(str, arguments))
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("name", LOADED)
def test_every_sample_is_inspected_and_drawn(here, name):  # noqa: F811
    format_name, read, dropped, noted, prefix_tokens = LOADED[name]
    document = json.loads(found(SAMPLES / name, "--format", "json", "--plot", "x.png"))
    rows = {"rows_read": read, "rows_used": read - sum(dropped.values()), "dropped": dropped, "noted": noted}
    assert {key: document[key] for key in rows} == rows
    assert (document["format"], document["prefix_tokens"]) == (format_name, prefix_tokens)
    assert document["figure"] == "x.png"
    texts = format_name in ("sharegpt", "vllm-custom")
    assert document["prompt"]["unit"] == ("characters" if texts else "tokens")
    assert (document["demand"] is None) == (document["arrivals"] is None) == texts
    height, width, _ = matplotlib.image.imread("x.png").shape
    assert (width, height) == (1440, 540 if texts else 960)
    if not texts:
        assert sum(one["arrivals"] for one in document["demand"]["over_time"]) == document["rows_used"]
        assert max(one["max_positions"] for one in document["demand"]["over_time"]) == pytest.approx(
            document["demand"]["peak_positions"], abs=0.5
        )


def test_the_table_says_what_was_read_and_assumed(here):  # noqa: F811
    text = found(SAMPLES / "burstgpt1_first100.csv", "--seconds-per-token", "0.1", "--block-size", "32", "-o", "f.png")
    assert "burstgpt1_first100.csv: burstgpt\n" in text
    assert "rows: 100 read = 95 used + 5 dropped (prompt of 0 tokens)\n" in text
    assert "noted: at the time of the row before: 1\n" in text
    assert "as if nobody waited and a token took 0.1 s (an assumption: --seconds-per-token)" in text
    assert "blocks of 32; mean" in text
    assert "figure: f.png" in text
    text = found(SAMPLES / "qwen_bailian_made.jsonl", "--format", "markdown")
    assert "- rows: 4 read = 4 used\n" in text
    assert "| prompt [tokens] | 331 | 64 | 700 | 700 | 700 | 700 |" in text
    assert "- shared prefixes: 41.1% of prompt positions, by hash ids seen before" in text
    assert "- arrivals: 0.0655 per second, over 61.114 s; at most 2 in one of the stretches of 10 s" in text


def test_texts_have_no_lengths_in_tokens(here):  # noqa: F811
    text = found(SAMPLES / "vllm_custom_made.jsonl")
    assert "lengths: the trace holds texts; how many tokens they are, only a tokenizer tells" in text
    assert "arrivals: the format has no times" in text
    assert "prompt [characters] of 3 rows" in text
    assert "output [tokens] of 2 rows" in text
    assert "KV demand" not in text


def test_a_window(here):  # noqa: F811
    path = SAMPLES / "azure2023_conv_first2000.csv"
    document = json.loads(found(path, "--window", "60:120", "--format", "json"))
    assert document["dropped"] == {"outside the window": 2000 - document["rows_used"]}
    assert 59 < document["arrivals"]["span_s"] < 60
    whole = [json.loads(found(path, *one, "--format", "json"))["prompt"] for one in ([], ["--window", ":"])]
    assert whole[0] == whole[1]
    assert json.loads(found(path, "--window", "400:", "--format", "json"))["rows_used"] < 200


def test_a_trace_without_usable_rows_says_so_and_draws_nothing(here):  # noqa: F811
    path = plain(here, "0,0,5", "1,5,0")
    text = found(path, "--plot", "x.png")
    assert "rows: 2 read = 0 used + 1 dropped (prompt of 0 tokens) + 1 dropped (output of 0 tokens)" in text
    assert "no row can be used" in text
    assert not (here / "x.png").exists()
    assert json.loads(found(path, "--format", "json"))["rows_used"] == 0
    assert "no row can be used" in found(path, "--format", "markdown")


def test_one_row_is_drawn(here):  # noqa: F811
    found(plain(here, "5,7,1"), "--plot", "x.png")
    assert (here / "x.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--window", "5"], "--window is '5', must be A:B in seconds with A below B, such as 600:1200"),
        (["--window", "5:5"], "must be A:B"),
        (["--window", "a:b"], "must be A:B"),
        (["--window", "nan:nan"], "must be A:B"),
        (["--seconds-per-token", "0"], "--seconds-per-token is 0.0, must be between 1e-6 and 100"),
        (["--seconds-per-token", "nan"], "must be between"),
        (["--plot", "no/where.png"], "figure no/where.png: No such file or directory"),
        (["--trace-format", "gpt"], "trace format 'gpt' is unknown; there are azure"),
        (["--prefix-tokens", "16"], "prefix_tokens = 16 would do nothing: azure has no hash ids"),
        (["--trace-format", "mooncake"], "azure2024_made.csv:1: not JSON: Expecting value"),
    ],
)
def test_bad_usage_is_one_line(here, options, message):  # noqa: F811
    assert_refused(invoke("inspect", str(SAMPLES / "azure2024_made.csv"), *options), here, message)


def test_what_a_file_says_cannot_drive_the_terminal(here):  # noqa: F811
    (here / "file").write_text("timestamp_s,prompt_tokens,output_tokens\n0,\x1b[2J,5\n")
    done = invoke("inspect", "file")
    assert_refused(done, here, r"file:2: prompt length is '\x1b[2J', must be a whole number")
    (here / "file").write_text("timestamp_s,prompt_tokens,output_tokens\n0,5,5\n")
    (here / "file").rename(here / "\x1b[2Jx")
    text = found("\x1b[2Jx", "--plot", "f.png")
    assert "\x1b" not in text
